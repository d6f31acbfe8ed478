"""A user's own folder or file with the name of a package of this tool is found before anything is imported from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qad.command.own_packages import hides

ROOT = Path(__file__).parents[3]
SCRIPT = "import sys\nfrom qad.command.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"  # as pip writes it


def run(way: str, user: Path) -> subprocess.CompletedProcess[str]:
    """`python -m qad` looks in the folder it is run in first, the installed script in its own and on PYTHONPATH."""
    script = user.parent / "bin" / "qad"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    path = [str(user), str(ROOT)] if way == "script" else [str(ROOT)]
    command = [sys.executable, str(script)] if way == "script" else [sys.executable, "-m", "qad"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run([*command, "--version"], cwd=user, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("way", ["module", "script"])
@pytest.mark.parametrize("name", ["export/__init__.py", "harness/__init__.py", "reports/__init__.py", "export.py"])
def test_what_hides_a_package_is_named_and_not_run(name: str, way: str, tmp_path: Path) -> None:
    file = tmp_path / "user" / name
    file.parent.mkdir(parents=True)
    file.write_text("raise SystemExit('the user\\'s own code was run')\n")
    done = run(way, tmp_path / "user")
    assert done.returncode == 2
    assert done.stdout == ""
    hidden = tmp_path / "user" / name.removesuffix("/__init__.py")
    assert done.stderr.startswith(f"qad: error: {hidden} hides the part of this tool")
    assert done.stderr.count("\n") == 1
    assert "PYTHONPATH" in done.stderr


@pytest.mark.parametrize("way", ["module", "script"])
def test_folders_that_are_no_packages_hide_nothing(way: str, tmp_path: Path) -> None:
    """A run's own `export` or `reports`, say."""
    for name in ("export", "harness", "reports"):
        (tmp_path / "user" / name).mkdir(parents=True)
    (tmp_path / "user" / "reports" / "render.py").touch()
    done = run(way, tmp_path / "user")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nvfp4-qad ")


def test_beside_an_editable_installation_a_folder_hides_the_modules_that_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, users = tmp_path / "ours" / "qad_probe", tmp_path / "user" / "qad_probe"
    for folder in (ours, users):
        folder.mkdir(parents=True)
    (ours / "render.py").touch()
    (users / "notes.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "user")
    assert hides("qad_probe", ours) is None
    (users / "render.py").touch()
    assert hides("qad_probe", ours) == users
    assert hides("qad_probe", users) is None
    assert hides("qad_no_such_package", ours) is None
