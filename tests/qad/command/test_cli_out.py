"""--out of every command that computes: a place that cannot become the result is refused before anything is loaded."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import qad.command.cli
from qad.artifact import open_artifact, run_stage
from qad.command.cli import main
from qad.errors import UsageError
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
    "harness.measure.parity.measure_parity",
    "harness.measure.throughput.import_served",
    "qad.command.validate.only_one",
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
    "parity": ["measure", "parity", "model"],
    "import": ["measure", "import", "results/run.json"],
    "validate": ["validate", "bf16=model", "ptq=checkpoint"],
}
# Folders that a command only reads, by its arguments or by what lies in these.
READ = {
    "run": ["model", "larger"],
    "ptq": ["model", "larger"],
    "train": ["model", "larger", "given/ptq"],
    "export": ["arm", "model"],
    "convert": ["checkpoint"],
    "fix": ["checkpoint", "arm"],
    "compare": ["results"],
    "memory": ["model"],
    "accuracy": ["model"],
    "fidelity": ["model"],
    "throughput": ["model"],
    "parity": ["model"],
    "validate": ["model", "checkpoint"],
}
ARGUMENTS = {
    **COMMANDS,
    "train": ["train", "recipe.yaml", "--ptq", "given/ptq"],
    "fix": ["check", "checkpoint", "--source", "arm"],
    "compare": ["compare", "bf16=results/run.json", "qad=results", "--noise-floor", "results"],
}
RECORDS = {"memory", "accuracy", "fidelity", "throughput", "parity", "import"}  # whose --out is a file


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
    for folder in ("model", "larger", "foreign", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "results" / "run.json").write_text("{}")
    (tmp_path / "file").write_text("{}")
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    finished("arm", "arm", arm="ptq")
    finished("given/ptq", "arm", arm="ptq")
    finished("checkpoint", "checkpoint")
    recipe = {
        "model": "model",
        "calibrate": {"data": "python-docs"},
        "train": {"data": "python-docs", "tokens": 4096, "teacher": "larger"},
    }
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
        ("memory accuracy fidelity throughput", "model/record.json", "would overwrite or lie inside the checkpoint"),
        (" ".join(COMMANDS), "file/out", "file is a file"),
        (" ".join(COMMANDS), "/proc/out", "/proc/out cannot be written"),
        ("run ptq train export convert compare", "..", "would overwrite or lie inside the "),
    ],
)
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


@pytest.mark.parametrize("command", READ)
def test_what_is_read_and_what_is_written_lie_apart_in_both_directions(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by way of symbolic links."""
    option = "--fix" if command == "fix" else "--out"
    for number, read in enumerate(READ[command]):
        inside = f"{read}/deep/out"
        (place / f"link{number}").symlink_to(place / read)
        places = [inside, f"link{number}/out", f"{read}/../{Path(read).name}/out"]
        for out in places if command in RECORDS else [*places, read, f"link{number}"]:
            refused([*ARGUMENTS[command], option, out], "would overwrite or lie inside the ", capsys)
    if command not in RECORDS:
        refused([*ARGUMENTS[command], option, str(place)], "would overwrite or lie inside the ", capsys)


@pytest.mark.parametrize("command", [*COMMANDS, "fix"])
def test_a_link_that_leads_nowhere_is_refused(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, target in {"loop": "loop", "ring": "other", "other": "ring", "dangling": "gone/away"}.items():
        (place / name).symlink_to(target)
    for out in ("loop", "ring", "dangling", "loop/out", "dangling/deep/out"):
        message = f"{out} cannot be used: {out.partition('/')[0]} is a symbolic link to "
        refused([*ARGUMENTS[command], "--fix" if command == "fix" else "--out", out], message, capsys)
    refused([*ARGUMENTS[command], "--fix" if command == "fix" else "--out", "x" * 300], "cannot be used (File name too", capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_that_leads_somewhere_is_followed_once(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sees the place itself, so that everything it leaves lies there."""
    (place / "disk" / "empty").mkdir(parents=True)
    (place / "disk" / "record.json").write_text("")
    target = place / "disk" / ("record.json" if command in RECORDS else "empty")
    (place / "link").symlink_to(target)
    (place / "disks").symlink_to("disk")
    seen: list[Any] = []
    before = qad.command.cli.decide

    def decide(args: Any) -> None:
        before(args)
        seen.append(args.out)

    monkeypatch.setattr(qad.command.cli, "decide", decide)
    for out in ("link", "disks/new"):
        with pytest.raises(WorkError):
            main([*COMMANDS[command], "--out", out])
    assert seen == [target, Path("disks/new")]


def test_a_stage_behind_a_link_is_whole_at_the_place_itself(place: Path) -> None:
    (place / "disk" / "there").mkdir(parents=True)
    (place / "link").symlink_to("disk/there")
    for value in (1, 2):
        stage = run_stage("arm", Path("link"), {"a": value}, {}, lambda folder: None, replace=True)
        assert (stage.path, (place / "link").is_symlink()) == (place / "disk" / "there", True)
        assert [path.name for path in (place / "disk").iterdir()] == ["there"]
        assert open_artifact(place / "link").config == {"a": value}
    (place / "gone").symlink_to("nowhere")
    with pytest.raises(UsageError, match="leads nowhere"):
        run_stage("arm", Path("gone"), {}, {}, lambda folder: None)


@pytest.mark.parametrize("out", ["/dev/null", "pipe", "pipe/out"])
def test_a_device_or_a_pipe_is_no_place(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    for command in COMMANDS:
        assert main([*COMMANDS[command], "--out", out]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_several_records_go_into_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    several = ["measure", "throughput", "model", "foreign", "--engine", "vllm", "--out"]
    refused([*several, "file"], "file is a file", capsys)
    refused([*several, "model/records"], "would overwrite or lie inside the checkpoint", capsys)
