"""The house: small rooms, names that say one thing, and imports that go down only, which the contracts of pyproject.toml refuse
where they do not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("qad", "export", "harness", "reports")
MODULES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_no_room_holds_more_than_sixteen_modules() -> None:
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in MODULES if path.name != "__init__.py")
    assert {room: count for room, count in rooms.items() if count > 16} == {}


def test_no_name_stands_three_times() -> None:
    names = Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert {name: count for name, count in names.items() if count > 2} == {}
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
    assert [path for path in MODULES if vague & {path.stem, path.parent.name}] == []


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {path: lines for path, lines in lengths.items() if lines > 400} == {}


def test_windows_alone_say_what_a_model_is_given() -> None:
    """`Windows.model_inputs`: whoever takes ids and positions himself drops the images beside them without a word."""
    takes = [path for path in MODULES if "position_ids_ST" in path.read_text(encoding="utf-8")]
    assert [path.relative_to(ROOT).as_posix() for path in takes] == ["qad/text/windows.py"]


WRONG = {
    "upwards": ("qad/numerics/nvfp4.py", "import qad.command.cli", "storeys"),
    "between packages": ("export/folder.py", "import harness.records", "storeys"),
    "torch in a report": ("reports/rows.py", "import torch", "reports read records"),
    "a room that no storey names": ("qad/attic/__init__.py", "", "exhaustive"),
}


def contracts(root: Path) -> subprocess.CompletedProcess[str]:
    """lint-imports on the packages of a folder."""
    script = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-P", "-c", script, "--no-cache"]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages and their contracts, beside each other."""
    root = tmp_path_factory.mktemp("house")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_the_contracts_hold(copied: Path) -> None:
    done = contracts(copied)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_import_breaks_a_contract(name: str, copied: Path) -> None:
    file, line, contract = WRONG[name]
    path = copied / file
    before = path.read_text(encoding="utf-8") if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{before or ''}\n{line}\n", encoding="utf-8")
    try:
        done = contracts(copied)
    finally:
        if before is None:
            shutil.rmtree(path.parent)
        else:
            path.write_text(before, encoding="utf-8")
    assert done.returncode == 1
    assert any(contract in text and "BROKEN" in text for text in done.stdout.splitlines()), done.stdout[-2000:]
