"""--out of every command that computes: a place that cannot become the result is refused before anything is loaded."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qad.artifact import run_stage
from qad.command.cli import main
from qad.recipes.load import load_recipe
from qad.training.stages import arm_settings

WORKERS = (
    "qad.recipes.job.prepare",
    "qad.command.run.prepare",
    "export.writer.export_arm",
    "export.convert.convert",
    "export.repair.repair",
    "harness.measure.folder.measure_folder",
    "harness.measure.folder.measure_memory",
    "qad.command.compare.read_arms",
)
COMMANDS = {
    "run": ["run", "recipe.yaml"],
    "ptq": ["ptq", "recipe.yaml"],
    "train": ["train", "recipe.yaml"],
    "export": ["export", "arm"],
    "convert": ["convert", "checkpoint", "--layout", "compressed-tensors"],
    "compare": ["compare", "bf16=x"],
    "memory": ["measure", "memory", "model"],
    "accuracy": ["measure", "accuracy", "model"],
    "fidelity": ["measure", "fidelity", "model", "--teacher", "model"],
    "throughput": ["measure", "throughput", "model"],
}


class WorkError(Exception):
    """The command went on to its work."""


def finished(out: str, kind: str, **config: Any) -> None:
    """A finished stage that says it came from ./model."""

    def work(folder: Path) -> None:
        (folder / "arm.json").write_text(json.dumps({"source": {"path": str(Path("model").resolve())}}))

    run_stage(kind, Path(out), config, {}, work)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a recipe, its model, an arm and a checkpoint, a file and a folder of somebody else's."""
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "foreign"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("{}")
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    finished("arm", "arm", arm="ptq")
    finished("checkpoint", "checkpoint")
    recipe = {"model": "model", "calibrate": {"data": "python-docs"}, "train": {"data": "python-docs", "tokens": 4096}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def work(*_args: Any, **_options: Any) -> None:
        raise WorkError

    for worker in WORKERS:  # all imported before the first is replaced: modules take from each other by name
        importlib.import_module(worker.rpartition(".")[0])
    for worker in WORKERS:
        monkeypatch.setattr(worker, work)
    return tmp_path


def refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line that says why, and everything as it was."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("commands", "out", "message"),
    [
        ("ptq train export convert compare", "file", "file exists and is no "),
        ("ptq train export convert compare", "foreign", "foreign exists and is no "),
        ("run", "file", "file exists and is not a run folder"),
        ("run", "foreign", "foreign exists and is not a run folder"),
        ("memory accuracy fidelity throughput", "file", "file exists and is no record"),
        ("memory accuracy fidelity throughput", "arm/qad_manifest.json", "exists and is no record"),
        ("memory accuracy fidelity throughput", "foreign", "foreign is a folder: name the record's file"),
        ("ptq train compare", "checkpoint", "checkpoint holds a finished checkpoint"),
        ("convert compare", "arm", "arm holds a finished arm"),
        ("ptq train export", "model/out", "would overwrite or lie inside the source model"),
        ("ptq train export", "model", "would overwrite or lie inside the source model"),
        ("export", "arm", "would overwrite or lie inside the arm"),
        ("convert", "checkpoint/out", "would overwrite or lie inside the checkpoint"),
        ("memory accuracy fidelity throughput", "model/record.json", "lies inside the measured folder model"),
        (" ".join(COMMANDS), "file/out", "file is a file"),
        (" ".join(COMMANDS), "/proc/out", "/proc/out cannot be written"),
        ("compare", "..", ".. has no name of its own"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_work_costs_nothing(
    commands: str, out: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands.split():
        refused([*COMMANDS[command], "--out", out], message, capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_can_work_is_left_to_the_command(command: str) -> None:
    for out in ("new", "deep/new"):
        with pytest.raises(WorkError):
            main([*COMMANDS[command], "--out", out])
        assert not Path(out).exists()


def test_a_finished_arm_of_other_settings_is_refused_and_one_of_the_same_is_left_to_be_reused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = load_recipe("recipe.yaml")
    for arm in ("ptq", "qad"):
        finished(f"arms/{arm}", "arm", **arm_settings(recipe, arm))
    train, ptq = [*COMMANDS["train"], "--out", "arms/qad"], [*COMMANDS["ptq"], "--out", "arms/ptq"]
    for argv in (train, ptq):
        with pytest.raises(WorkError):
            main(argv)
    message = "holds a finished arm made from other inputs or settings"
    refused([*train, "--set", "train.lr=3e-5"], f"arms/qad {message}", capsys)
    refused([*train, "--set", "train.method=qat"], f"arms/qad {message}", capsys)
    refused([*train, "--set", "calibrate.samples=7"], f"arms/ptq {message}", capsys)
    refused([*ptq, "--set", "seed=1"], f"arms/ptq {message}", capsys)


def test_training_does_not_write_over_the_arm_it_starts_from(capsys: pytest.CaptureFixture[str]) -> None:
    refused([*COMMANDS["train"], "--ptq", "arm", "--out", "arm"], "would overwrite or lie inside the PTQ arm", capsys)
    refused([*COMMANDS["train"], "--ptq", "absent", "--out", "new"], "absent is not a finished arm", capsys)
    refused([*COMMANDS["train"], "--ptq", "checkpoint", "--out", "new"], "is of kind checkpoint, expected arm", capsys)


def test_a_repair_has_a_place_too(capsys: pytest.CaptureFixture[str]) -> None:
    refused(["check", "checkpoint", "--fix", "foreign"], "foreign exists and is no ", capsys)
    refused(["check", "checkpoint", "--fix", "checkpoint"], "would overwrite or lie inside the checkpoint", capsys)


def test_several_records_go_into_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    several = ["measure", "throughput", "model", "foreign", "--engine", "vllm", "--out"]
    refused([*several, "file"], "file is a file", capsys)
    refused([*several, "model/records"], "lies inside the measured folder model", capsys)
