"""The plan: the numbers are those of the folders that the run then writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from export.writer import export_arm
from qad.command.cli import main
from qad.recipes.job import prepare
from qad.recipes.load import parse_recipe
from qad.training.stages import ptq_arm


def recipe(model: Path, **train: object) -> dict[str, object]:
    settings = {"data": "python-docs", "tokens": 1024, "seq_len": 32, "batch_size": 4, **train}
    return {
        "model": str(model),
        "dtype": "float32",
        "calibrate": {"data": "python-docs", "samples": 4, "seq_len": 32},
        "train": settings,
    }


def run_plan(model: Path, folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(model)))
    assert main(["plan", str(path), *[x for o in overrides for x in ("--set", o)]]) == 0
    return capsys.readouterr().out


def test_the_plan_says_what_the_run_does(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    tiny_llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    message: str,
) -> None:
    monkeypatch.setenv("QAD_VLLM_PYTHON", "absent")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(tiny_llama_dir)))
    for command in (["plan", str(path)], ["run", str(path), "--out", str(tmp_path / "out")]):
        assert main([*command, "--set", override]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def refused(model: Path, folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What `plan` and `ptq` say, which is the same."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(model)))
    said = []
    capsys.readouterr()
    for command in (["plan", str(path)], ["ptq", str(path), "--out", str(folder / "arm")]):
        assert main([*command, *[x for o in overrides for x in ("--set", o)]]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert not (folder / "arm").exists()
    return said[0]


@pytest.fixture(scope="module")
def opt_dir(make_tokenizer: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny OPT of 16 learned positions."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "vocab_size": 512,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    folder = tmp_path_factory.mktemp("opt")
    OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=16)).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def test_more_positions_than_the_model_has_are_refused_wherever_they_are_asked_for(
    opt_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["calibrate.seq_len=16", "train.seq_len=16"]
    asked = {
        "calibrate.seq_len 32": ["train.seq_len=16"],
        "train.seq_len 32": ["calibrate.seq_len=16"],
        "measure.fidelity.seq_len 17": [*short, "measure.fidelity={data: python-docs, seq_len: 17}"],
        "measure.fidelity.prompt_tokens + new_tokens 18": [
            *short,
            "measure.fidelity={data: python-docs, seq_len: 16, prompt_tokens: 8, new_tokens: 10}",
        ],
        "measure.throughput.input_tokens + output_tokens 17": [*short, "measure.throughput={input_tokens: 16, output_tokens: 1}"],
    }
    for key, overrides in asked.items():
        assert f"{key} is more than the 16 positions" in refused(opt_dir, tmp_path, capsys, *overrides)


def test_positions_and_rows_of_another_teacher_count_too(
    opt_dir: Path, make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = make_llama(tmp_path / "student")
    assert "train.seq_len 32 is more than the 16" in refused(student, tmp_path, capsys, f"train.teacher={opt_dir}")
    small = make_llama(tmp_path / "small", vocab_size=430)
    said = refused(student, tmp_path, capsys, f"train.teacher={small}")
    assert f"{small}: id 430 of the tokenizer" in said
    assert "which has 430 (7 such tokens)" in said
    assert f"{small}: id 430 of the tokenizer" in refused(small, tmp_path, capsys)
