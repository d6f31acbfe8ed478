"""The plan: the numbers are those of the folders that the run then writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from export.writer import export_arm
from qad.command.cli import main
from qad.recipes.job import prepare
from qad.recipes.load import parse_recipe
from qad.training.stages import ptq_arm


def recipe(model: Path, **train: object) -> dict[str, object]:
    settings = {"data": "python-docs", "tokens": 1024, "seq_len": 32, "batch_size": 4, **train}
    return {"model": str(model), "dtype": "float32", "calibrate": {"data": "python-docs", "samples": 4, "seq_len": 32},
            "train": settings}  # fmt: skip


def run_plan(model: Path, folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(model)))
    assert main(["plan", str(path), *[x for o in overrides for x in ("--set", o)]]) == 0
    return capsys.readouterr().out


def test_the_plan_says_what_the_run_does(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_plan(tiny_llama_dir, tmp_path, capsys, "train.method=[qat, qad]")
    assert "14 Linears" in out
    assert "text   train: 1,024 tokens (1,024 of python-docs)" in out
    for line in ("qat: cross-entropy, 8 steps of 128 tokens", "qad: forward_kl, 8 steps of 128 tokens"):
        assert line in out
    assert not list(tmp_path.glob("*.partial"))
    assert len(list(tmp_path.iterdir())) == 1


def test_the_planned_size_is_that_of_the_checkpoint(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = re.search(r"checkpoint ([\d.e+-]+) GB", run_plan(tiny_llama_dir, tmp_path, capsys))
    assert planned
    job = prepare(parse_recipe(recipe(tiny_llama_dir), "test"))
    ptq_arm(job, tmp_path / "ptq")
    export_arm(tmp_path / "ptq", tmp_path / "out")
    written = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert float(planned[1]) * 1e9 == pytest.approx(written, rel=0.1)  # the header of a tiny file, and rounding


def test_frozen_parameters_take_no_gradient_memory(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_plan(tiny_llama_dir, tmp_path, capsys)
    linears = run_plan(tiny_llama_dir, tmp_path, capsys, "train.trainable=linears")
    sizes = [float(re.search(r"gradients ([\d.e+-]+) GB", out)[1]) for out in (whole, linears)]  # type: ignore[index]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("measure.accuracy={suite: local}", "there is no arc_easy.jsonl"),
        ("measure.accuracy={tasks: [qad_fact]}", "did you mean qad_facts?"),
        ("measure.engine=vllm", "QAD_VLLM_PYTHON names absent"),
    ],
)
def test_what_the_run_could_not_measure_is_said_before(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    override: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("QAD_VLLM_PYTHON", "absent")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(tiny_llama_dir)))
    for command in (["plan", str(path)], ["run", str(path), "--out", str(tmp_path / "out")]):
        assert main([*command, "--set", override]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
