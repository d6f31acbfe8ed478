"""README and docs/: every command parses as printed, every recipe validates, the pages build strictly."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.compare.policy import load_policy
from qad.command.cli import _parser
from qad.command.planning.keys import recipe_keys
from qad.recipes.load import load_recipe
from qad.recipes.quantize import Quantize
from qad.recipes.recipe import Measure, Train

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def fenced(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of a language; "" is the shell's."""
    found = []
    for page in PAGES:
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            if match[2] == language:
                found.append((page.relative_to(ROOT).as_posix(), match[3].replace("\n" + match[1], "\n")))
    return found


def commands() -> list[tuple[str, str]]:
    lines = [(page, line.strip()) for page, text in fenced("") for line in text.splitlines()]
    return sorted({(page, line) for page, line in lines if line.startswith("qad ")})


def test_there_are_commands_and_recipes_to_hold() -> None:
    assert len(commands()) > 20
    assert len(fenced("yaml")) > 1


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_parses_as_it_is_printed(page: str, line: str) -> None:
    """Placeholders stand for paths; what follows # is said to the reader. [OPTION] may be left out."""
    words = shlex.split(line, comments=True)[1:]
    words = [word for word in words if not word.startswith("[")]
    _parser().parse_args(words)  # a command that does not parse exits


@pytest.mark.parametrize(("page", "text"), fenced("yaml"))
def test_a_recipe_or_a_part_of_one_or_a_policy_validates(page: str, text: str, tmp_path: Path) -> None:
    raw = yaml.safe_load(text)
    assert isinstance(raw, dict)
    if "about" in raw:
        file = tmp_path / "policy.yaml"
        file.write_text(text)
        assert load_policy(str(file)).name == raw["name"]
    if "model" in raw:
        (tmp_path / "recipe.yaml").write_text(text)
        load_recipe(str(tmp_path / "recipe.yaml"))
    sections = {"quantize": Quantize, "measure": Measure}
    for name, section in sections.items():
        if name in raw:
            section.model_validate(raw[name])
    if "train" in raw:
        Train.model_validate({"data": "python-docs", "tokens": 10**6, **raw["train"]})


def test_the_results_are_those_of_the_committed_report() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "reference" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    report = json.loads((ROOT / "reports" / "published" / "demo" / "report.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert generate.with_results(readme, report) == readme, "run python docs/reference/generate.py"
    assert report["comparison"]["arms"] == ["bf16", "ptq_plain", "ptq", "qad"]


DEFAULTS = ROOT / "docs" / "concepts" / "studies.md"


def named_values(heading: str) -> dict[str, str]:
    """Key -> value as the page of defaults shows it under a heading."""
    part = DEFAULTS.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\S+)` \| `([^`]*)` \|", part, re.MULTILINE))


def test_the_page_of_defaults_has_those_of_the_recipe_and_each_says_what_chose_it() -> None:
    keys = {key.name: key for key in recipe_keys()}
    shown = named_values("Defaults of a recipe")
    assert {"quantize.scales", "quantize.rounding", "quantize.balance"} < set(shown)
    assert {f"train.{name}" for name in ("method", "loss", "lr", "schedule", "betas")} < set(shown)
    assert shown == {name: keys[name].default for name in shown}
    studies = json.loads((ROOT / "reports" / "published" / "studies" / "result.json").read_text(encoding="utf-8"))["studies"]
    for name in shown:
        text = keys[name].text
        assert re.search(r"\b(published|convention|studies: )", text), f"{name}: nothing says what chose its default"
        assert set(re.findall(r"studies: (\w+)", text)) <= set(studies)


def test_the_page_of_defaults_has_the_values_of_the_demo() -> None:
    demo = load_recipe("smollm2-135m").model_dump(mode="json")
    shown = named_values("The demo's recipe")
    assert shown
    for name, value in shown.items():
        section, key = name.split(".")
        assert yaml.safe_load(value) == demo[section][key], name
    entries = re.findall(r"^## (.*)", (ROOT / "LOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = re.findall(r'\| LOG.md, ([\d-]+), "([^"]+)"', DEFAULTS.read_text(encoding="utf-8"))
    assert cited
    assert [c for c in cited if not any(e.startswith(c[0]) and c[1] in e for e in entries)] == []


def test_the_pages_build_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    keys = (tmp_path / "site" / "reference" / "keys" / "index.html").read_text(encoding="utf-8")
    assert "train.lr" in keys
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]*)"', keys)
    assert loaded == [], "a page must need no network"
