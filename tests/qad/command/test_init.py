"""`qad init`: a recipe that fits, and plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from qad.command.cli import main


def chats(path: Path, count: int) -> Path:
    rows = (
        {"messages": [{"role": "user", "content": f"How many {i}?"}, {"role": "assistant", "content": f"{i} and " * 20}]}
        for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_recipe_plans_as_it_is(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = chats(tmp_path / "chats.jsonl", 300)
    out = tmp_path / "recipe.yaml"
    assert main(["init", "--model", str(tiny_llama_dir), "--data", str(data), "--out", str(out)]) == 0
    text = out.read_text()
    recipe = yaml.safe_load(text)
    assert recipe["train"]["data"] == {"source": "jsonl", "path": str(data), "field": "messages"}
    assert "1e-6 for models after SFT" in text
    assert "300 documents, about" in text
    assert not re.search(r"[&*]id\d", text)
    capsys.readouterr()
    assert main(["plan", str(out)]) == 0
    assert main(["init", "--model", str(tiny_llama_dir), "--data", str(data), "--out", str(out)]) == 2
    assert "exists: choose another file" in capsys.readouterr().err


def test_it_goes_by_the_machine_that_is_named(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = chats(tmp_path / "chats.jsonl", 200)
    assert main(["init", "--model", str(tiny_llama_dir), "--data", str(data), "--gpu", "h200", "--gpus", "8"]) == 0
    assert "here are 1128 GB" in capsys.readouterr().out
    assert main(["init", "--model", str(tiny_llama_dir), "--data", str(data), "--gpu", "h999"]) == 2
    assert "'h999' is unknown: use one of a100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("".join(json.dumps({"text": f"row {i} of few"}) + "\n" for i in range(12)), "holds 12 documents, too few"),
        (json.dumps({"question": "a", "answer": "b"}) + "\n", "its rows have question, answer, none of messages"),
        ("{not json}\n", "cannot be read"),
    ],
)
def test_data_that_no_recipe_could_use_is_one_line(
    tiny_llama_dir: Path, tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    assert main(["init", "--model", str(tiny_llama_dir), "--data", str(tmp_path / "data.jsonl")]) == 2
    assert message in capsys.readouterr().err
