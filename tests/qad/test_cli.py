"""The command itself: instant help, documented commands, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qad.cli import main

COMMANDS = (
    "run",
    "plan",
    "ptq",
    "train",
    "export",
    "convert",
    "check",
    "measure",
    "engines",
    "compare",
    "gate",
    "report",
    "show",
)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom qad.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'yaml', 'matplotlib', 'lm_eval'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"    {command} " in done.stdout for command in COMMANDS)


KINDS = ("memory", "fidelity", "accuracy", "throughput", "parity", "import")


@pytest.mark.parametrize("command", [*COMMANDS, *(f"measure {kind}" for kind in KINDS)])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert f"usage: qad {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["check"], ["run", "x"], ["export", "a", "--out", "b", "--layout", "gguf"]]
)
def test_bad_usage_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


def test_a_folder_that_is_no_artifact_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("qad: error:") == 3


def test_the_readme_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("    "):
            assert line in readme
