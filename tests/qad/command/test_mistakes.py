"""Mistakes of a first hour: each is answered in one line that says what to type instead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qad.command.cli import main

RECIPE = """model: MODEL
calibrate: {data: text.txt, samples: 4, seq_len: 32}
train: {data: text.txt, tokens: 1024, seq_len: 32, validation_tokens: 128}
"""
CHAT = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Seven."}]
MISTAKES = {
    "a typo beside a required key": (["plan", "typo.yaml"], "typo.yaml: unknown key 'train.tokns': did you mean 'tokens'?"),
    "ShareGPT rows": (
        ["plan", "recipe.yaml", "--set", "train.data={source: jsonl, path: share.jsonl, field: conversations}"],
        "it is written as from and value; rename them, human to user and gpt to assistant",
    ),
    "one list in place of lines": (
        ["plan", "recipe.yaml", "--set", "train.data=list.json"],
        "it is a list: write one object a line, as `jq -c .[] list.json` does",
    ),
    "the same for init": (["init", "--model", "MODEL", "--data", "list.json"], "write one object a line"),
    "a recipe that is not there": (["plan", "recipes.yaml"], "recipe recipes.yaml does not exist: check the path"),
    "a shipped recipe by another name": (["plan", "qwen-3"], "did you mean 'qwen3'?"),
    "an override without a value": (["plan", "recipe.yaml", "--set", "train.lr"], "expected key=value, such as train.lr=1e-5"),
    "a word for a number": (
        ["plan", "recipe.yaml", "--set", "train.batch_size=two"],
        "train.batch_size: Input should be a valid integer",
    ),
    "YAML that is none": (["plan", "none.yaml"], "none.yaml is not valid YAML: mapping values are not allowed here"),
    "a model where a checkpoint is meant": (["check", "MODEL"], "is not quantized: give an NVFP4 checkpoint"),
    "folders without names": (["validate", "MODEL", "--out", "run"], "give NAME=DIR, such as bf16=models/mine"),
    "a section that is none": (["keys", "trian"], "did you mean 'train'?"),
}


@pytest.fixture
def folder(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of somebody who begins."""
    text = [f"{i}: the river runs past {i} old mills and under a stone bridge, {i} boats on it." for i in range(300)]
    (tmp_path / "text.txt").write_text("\n\n".join(text))
    (tmp_path / "share.jsonl").write_text(json.dumps({"conversations": CHAT}) + "\n")
    (tmp_path / "list.json").write_text(json.dumps([{"text": line} for line in text]))
    recipe = RECIPE.replace("MODEL", str(tiny_llama_dir))
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "typo.yaml").write_text(recipe.replace("tokens: 1024", "tokns: 1024"))
    (tmp_path / "none.yaml").write_text("model: a\n  train: [\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line(
    name: str, folder: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = MISTAKES[name]
    assert main([word.replace("MODEL", str(tiny_llama_dir)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_bad_yaml_needs_no_torch(folder: Path) -> None:
    script = "import sys; from qad.command.cli import main; print(main(['plan', 'none.yaml']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_paths_are_beside_the_recipe_or_in_the_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(["plan", str(folder / "recipe.yaml")]) == 0
    (folder / "recipes").mkdir()
    (folder / "recipe.yaml").rename(folder / "recipes" / "recipe.yaml")
    monkeypatch.chdir(folder)
    assert main(["plan", "recipes/recipe.yaml"]) == 0
    assert "1,024 of text.txt" in capsys.readouterr().out
