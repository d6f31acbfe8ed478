"""What `run` could not finish, `plan` refuses in one line that says what is wrong and what to do; `run` says the same at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from qad.command.cli import main
from qad.command.planning import init, machine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tiny_llama_dir: Path, make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, text, and one of each with something wrong."""
    folder = tmp_path_factory.mktemp("refused")
    lines = [f"{i}: the river runs past {i} old mills and under a stone bridge, {i} boats on it." for i in range(300)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    (folder / "few.txt").write_text("\n\n".join(line * 4 for line in lines[:1]))
    (folder / "empty.txt").write_text("")
    questions = [[{"role": "user", "content": f"How many on day {i}?"}] for i in range(300)]
    (folder / "asked.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in questions))
    for name in ("model", "cut", "untold", "template", "quantized", "renamed"):
        shutil.copytree(tiny_llama_dir, folder / name)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path in (folder / "untold").glob("token*"):
        path.unlink()
    (folder / "template" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['role'] }")
    config = json.loads((folder / "quantized" / "config.json").read_text())
    (folder / "quantized" / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    tokenizer = json.loads((folder / "renamed" / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = sorted(words, key=words.__getitem__)[300:302]
    words[first], words[second] = words[second], words[first]
    (folder / "renamed" / "tokenizer.json").write_text(json.dumps(tokenizer))
    make_llama(folder / "odd", hidden_size=72, intermediate_size=136)
    return folder


PROMPTS = "{data: PLACE/text.txt, tokens: 256, seq_len: 32, new_tokens: 4}"
CHATS = "{source: jsonl, path: PLACE/asked.jsonl, field: messages}"
REFUSED = {
    "a misspelt key": ("train.leraning_rate=1", "unknown key 'train.leraning_rate'"),
    "a split that is none": ("train.data={source: text, path: x, split: trian}", "Input should be 'auto' or 'all' (got 'trian')"),
    "sequences that make no step": ("train.seq_len=100000", "less than one step of 400,000 (batch_size 4 x seq_len 100,000)"),
    "test text too short": ("measure.fidelity.tokens=100000", "the test split needs 100,000 tokens"),
    "prompts longer than the text": (f"measure.fidelity={PROMPTS}", "prompt of 32"),
    "validation text too short": ("train.validation_tokens=100000", "validation needs 100,000 tokens"),
    "training text too short": ("train.tokens=10000000", "ask for fewer or give more text"),
    "a text in which no split holds anything": ("train.data=PLACE/few.txt", "of its 1 documents falls into the"),
    "an empty file": ("train.data=PLACE/empty.txt", "empty.txt holds no text"),
    "no such file": ("train.data=PLACE/absent.txt", "absent.txt cannot be read"),
    "another field": ("train.data=PLACE/asked.jsonl", "it has messages; set field"),
    "questions without an answer": (f"train.data={CHATS}\ntrain.loss_on=assistant", "no token that the assistant"),
    "a task's data": ("measure.accuracy={suite: local}", "there is no arc_easy.jsonl"),
    "a task that is none": ("measure.accuracy={tasks: [qad_fact]}", "did you mean qad_facts?"),
    "a suite that is none": ("measure.accuracy={suite: locla}", "suite 'locla' is neither a file nor shipped"),
    "an engine that is not here": ("measure.engine=vllm", "QAD_VLLM_PYTHON names absent"),
    "a tracker that is not here": ("track={to: wandb}", "pip install wandb"),
    "weights cut off": ("model=PLACE/cut", "the download is incomplete"),
    "no tokenizer": ("model=PLACE/untold", "has no tokenizer"),
    "a broken chat template": (f"train.data={CHATS}\nmodel=PLACE/template", "the chat template refuses"),
    "a quantized source": ("model=PLACE/quantized", "is already quantized (fp8)"),
    "rows not divisible by 16": ("model=PLACE/odd", "in_features 72 is not divisible by 16"),
    "a teacher of another tokenizer": ("train.teacher=PLACE/renamed", "a teacher needs the student's tokenizer"),
    "a format for no module": ("quantize.formats={'*nothing*': FP8}", "pattern '*nothing*' matches no module"),
    "a group with two formats": ("quantize.formats={'*q_proj': FP8}", "give all of them one format"),
    "nothing to train": ("train.trainable=['*nothing*']", "matches no trainable parameter"),
    "a layout that cannot be measured": ("export.layout=compressed-tensors", "computes in bfloat16 only"),
}


def recipe(place: Path) -> dict[str, Any]:
    text = str(place / "text.txt")
    return {
        "model": str(place / "model"),
        "dtype": "float32",
        "calibrate": {"data": text, "samples": 4, "seq_len": 32},
        "train": {"data": text, "tokens": 1024, "seq_len": 32, "validation_tokens": 128},
        "measure": {"fidelity": {"data": text, "tokens": 256, "seq_len": 32}},
    }


def refusals(place: Path, folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """The errors of `plan` and of `run`, which writes nothing."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(place)))
    settings = [word for override in overrides for word in ("--set", override.replace("PLACE", str(place)))]
    said = []
    for command in (["plan"], ["run", "--out", str(folder / "run")]):
        capsys.readouterr()
        assert main([command[0], str(folder / "recipe.yaml"), *command[1:], *settings]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
        assert len(lines) == 1, lines
        said += lines
    assert not (folder / "run" / "arms").exists()
    return said


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_that_cannot_be_finished(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QAD_VLLM_PYTHON", "absent")
    overrides, message = REFUSED[name]
    planned, run = refusals(place, tmp_path, capsys, *overrides.split("\n"))
    assert planned == run
    assert message in planned


def test_a_machine_without_room(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny Llama has 115 thousand parameters, of 4 bytes in the student, the masters, the gradients and the teacher, and 8 in
    the moments."""
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: free._replace(free=1_000_000))
    planned, run = refusals(place, tmp_path, capsys)
    assert "are free: choose another --out, or make room" in planned
    assert planned.partition("small")[2] == run.partition("small")[2]
    monkeypatch.undo()
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=2_000_000))
    monkeypatch.setattr(machine.psutil, "swap_memory", lambda: SimpleNamespace(total=0))
    planned, run = refusals(place, tmp_path, capsys)
    assert planned == run
    assert "does not fit: 0.00" in planned
    assert "activations on 0.002 GB of this machine: train.optimizer: adamw8bit saves" in planned
    monkeypatch.undo()
    monkeypatch.setitem(init.GPUS, "l40s", 0.002)
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpu", "h200"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next   qad run {tmp_path / 'recipe.yaml'} --out runs/recipe"
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpu", "l40s"]) == 2
    assert "GB of l40s" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--gpu", "l50s"]) == 2
    assert "--gpu 'l50s' is unknown: use one of a100" in capsys.readouterr().err
