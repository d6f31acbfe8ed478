"""What a source's card says about itself is shown, visible and harmless, on the terminal and in the export's card."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from qad.command.cli import main

NAMES = {
    "a script": "<script>alert(1)</script>",
    "an image": "<img src=x onerror=alert(1)>",
    "a link": "[click](javascript:alert(1))",
    "bidi": "safe\u202egpj.exe\u2066",
    "escapes": "\x1b[2J\x1b]0;owned\x07name",
    "half a character": "\ud800name",
    "lines": "name\n\n# Another heading\n---\nlicense: mit",
    "a table": "a | b `code` *bold* ![x](y)",
    "a long name": "n" * 100_000,
}
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_is_text(name: str, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(shutil.copytree(tiny_llama_dir, tmp_path / "source"))
    front = {"model_name": NAMES[name], "license": NAMES[name], "tags": [NAMES[name], "chat"]}
    (source / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n")
    recipe = {"model": str(source), "dtype": "float32", "quantize": {"format": "W4A16_NVFP4"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["ptq", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "arm")]) == 0
    assert main(["export", str(tmp_path / "arm"), "--out", str(tmp_path / "out")]) == 0
    assert main(["check", str(tmp_path / "out")]) == 0
    assert main(["show", str(tmp_path / "out")]) == 0
    printed = "".join(capsys.readouterr()).replace("\r", "")  # of progress bars
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert not HIDDEN.search(printed)
    assert not HIDDEN.search(card)
    assert len(printed) < 20_000
    assert len(card) < 10_000
    text = card.split("\n---\n", 1)[1]
    headings = [line for line in text.splitlines() if line.startswith("#")][1:]
    assert headings == ["## Size", "## Serve", "## How it was made"], "no heading of its own"
    ours = re.sub(r"```[a-z]*\n.*?\n```\n", "", text, flags=re.DOTALL).replace("`qad check .`", "")
    assert not re.search(r"<[a-z]|(?<!\\)[\[\]]\(|(?<!\\)`|\n\n---", ours), ours
    read = ModelCard.load(tmp_path / "out" / "README.md")
    assert read.data.model_name.endswith(", W4A16_NVFP4 (PTQ)")
    unread = name in ("half a character", "a long name")  # no YAML that is taken: nothing is carried over
    assert ("chat" in read.data.tags) is not unread


def test_findings_and_errors_do_not_act_on_the_terminal(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, place, key in (
        ("config.json", "quantization_config", "ignore"),
        ("hf_quant_config.json", "quantization", "exclude_modules"),
    ):
        value = json.loads((exported / file).read_text())
        value[place][key] += ["\x1b[31mred\u202e", "x" * 100_000]
        (exported / file).write_text(json.dumps(value))
    paths = [["check", "/tmp/\x1b[31m\u202e"], ["show", "\x1b[31m"], ["plan", "\x1b]0;x\x07\u202e"], ["gate", "\x1b[2J"]]
    for argv in (["check", str(exported)], ["check", str(exported), "--json"], *paths):
        assert main(argv) in (1, 2)
        captured = capsys.readouterr()
        assert captured.out + captured.err
        assert not HIDDEN.search(captured.out + captured.err)
        assert len(captured.err) < 5000
