"""`qad train` on conversations and on what the teacher writes: what counts, what is kept, what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qad.command.cli import main

pytestmark = pytest.mark.pipeline


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAD_COMPILE", "0")


def write_recipe(folder: Path, model: Path, **train: Any) -> Path:
    chats = folder / "chats.jsonl"
    chats.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"How many sacks, said the miller {i} times, are there in the house?"},
                        {"role": "assistant", "content": f"There are {i} sacks of flour and {i} ducks."},
                    ]
                }
            )
            + "\n"
            for i in range(120)
        )
    )
    source = {"source": "jsonl", "path": str(chats), "field": "messages"}
    recipe = {
        "model": str(model),
        "dtype": "float32",
        "calibrate": {"data": source, "samples": 2, "seq_len": 32},
        "train": {
            "data": [{**source, "weight": 3}, {"source": "teacher", "prompts": source, "length": 12, "batch_size": 2}],
            "tokens": 4 * 128,
            "seq_len": 64,
            "batch_size": 2,
            "epochs": 2,
            "loss_on": "assistant",
            "lr": 1e-4,
            "validate_every": 2,
            "save_every": 4,
            "validation_tokens": 64,
            "chunk": 64,
            **train,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_conversations_and_generations_train_and_are_accounted_for(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["train", str(write_recipe(tmp_path, tiny_llama_dir)), "--out", str(tmp_path / "run" / "qad")]
    assert main(args) == 0
    said = capsys.readouterr().out
    facts = json.loads((tmp_path / "run" / "qad" / "arm.json").read_text())
    train, validation = facts["text"]["train"], facts["text"]["validation"]
    assert train["tokens"] == 4 * 128 / 2
    assert facts["tokens"]["train"] == 4 * 128
    assert list(train["sources"]) == ["chats.jsonl", "generations from chats.jsonl"]
    assert sum(train["sources"].values()) == train["tokens"]
    assert 0 < train["counted"] < train["tokens"]
    assert 0 < validation["counted"] < validation["tokens"] == 64
    assert f"text   train: 256 tokens ({train['sources']['chats.jsonl']} of chats.jsonl" in said
    assert f"{train['counted'] / 256:.1%} of them in the loss" in said
    assert {p.name for p in (tmp_path / "run" / "text").iterdir()} == {"train-1", "validation-1", "windows"}
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "run" / "text").rglob("*.jsonl")}
    assert main(args) == 0
    assert {p: p.stat().st_mtime_ns for p in kept} == kept


def test_text_without_turns_stops_before_anything_is_computed(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, tiny_llama_dir, data={"source": "random", "length": 16})
    assert main(["train", str(recipe), "--out", str(tmp_path / "run" / "qad")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("qad: error: train.loss_on: assistant needs conversations, and random tokens holds")
    assert error.count("\n") == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"text"}, "windows of calibration text, no arm"
