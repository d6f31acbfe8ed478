"""`qad completion`: a script that a shell runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from qad.command.cli import main


def script(folder: Path, shell: str, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / shell
    path.write_text(capsys.readouterr().out)
    return path


def test_bash_completes_commands_options_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = 'source {}; COMP_WORDS=(qad {}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_qad; echo "${{COMPREPLY[@]}}"'
    path = script(tmp_path, "bash", capsys)
    for typed, expected in (
        ("pla", "plan"),
        ("measure fid", "fidelity"),
        ("run --red", "--redo"),
        ("convert --layout mod", "modelopt"),
    ):
        done = subprocess.run(["bash", "-c", ask.format(path, typed)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [expected]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_others_have_every_command(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, shell, capsys)
    assert all(name in path.read_text() for name in ("validate", "--noise-floor", "compressed-tensors"))
    if shutil.which(shell):
        subprocess.run([shell, "-n", path], check=True)
