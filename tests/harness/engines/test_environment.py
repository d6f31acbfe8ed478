"""Which Python runs an engine, and what a machine is said to be able to run."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines.available import best_engine, served
from harness.engines.environment import engine_python, installed
from harness.engines.registered import AUTOMATIC, ENGINES
from harness.records import record as records
from harness.records.record import MemoryData
from qad.command.cli import main
from qad.errors import EngineError, UsageError
from qad.recipes.recipe import Measure

Executable = Callable[[str, str], Path]
CPU = json.dumps({"version": "0.32.0", "gpus": [], "cpu_plugin": True})
GPU = json.dumps({"version": "0.32.0", "gpus": ["NVIDIA B200"], "cpu_plugin": False})


@pytest.fixture(autouse=True)
def _nothing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No engine of this machine takes part."""
    monkeypatch.chdir(tmp_path)
    for name in ("QAD_VLLM_PYTHON", "QAD_TRTLLM_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_the_first_of_argument_variable_folder_and_this_interpreter(
    executable: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="make vllm-env"):
        engine_python("vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "vllm" else None)
    assert engine_python("vllm") == Path(sys.executable)
    local = tmp_path / ".venv-vllm" / "bin" / "python"
    local.parent.mkdir(parents=True)
    local.symlink_to(sys.executable)
    assert engine_python("vllm") == local, "a link of a virtual environment is kept"
    named, given = executable("named", "trtllm-1.2.log"), executable("given", "trtllm-1.2.log")
    monkeypatch.setenv("QAD_VLLM_PYTHON", str(named))
    assert engine_python("vllm") == named
    assert engine_python("vllm", str(given)) == given
    with pytest.raises(UsageError, match=r"--python PATH or QAD_TRTLLM_PYTHON"):
        engine_python("trtllm")
    with pytest.raises(UsageError, match="no executable file"):
        engine_python("vllm", str(tmp_path))
    with pytest.raises(UsageError, match="not started as a server"):
        engine_python("sglang")


def test_this_interpreter_says_what_it_has() -> None:
    with pytest.raises(EngineError, match=r"has no tensorrt_llm"):
        installed("trtllm", Path(sys.executable))
    with pytest.raises(EngineError, match="does not say"):
        installed("vllm", Path("/bin/true"))


@pytest.mark.parametrize(
    ("facts", "here", "native", "text"),
    [
        (CPU, True, False, "serves on the CPU; NVFP4 emulated by our plugin"),
        (CPU.replace("true", "false"), True, False, "our plugin is missing"),
        (GPU, True, True, "serves on NVIDIA B200; which NVFP4 kernel it takes is read from its log"),
        (CPU.replace('"0.32.0"', "null"), False, False, "has no vllm: build one with `make vllm-env`"),
    ],
)
def test_what_is_here_and_why_not(
    facts: str, here: bool, native: bool, text: str, executable: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_INSTALLED", facts)
    monkeypatch.setenv("QAD_VLLM_PYTHON", str(executable("python", "vllm-0.32-cpu-bf16.log")))
    found = served("vllm")
    assert (found.here, found.native) == (here, native)
    assert text in found.text
    assert best_engine("auto") == ("vllm" if native else "transformers"), "emulated figures only where they are asked for"
    assert best_engine("vllm") == "vllm"


def test_trtllm_needs_a_gpu(executable: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_INSTALLED", CPU)
    monkeypatch.setenv("QAD_TRTLLM_PYTHON", str(executable("python", "trtllm-1.2.log")))
    assert not served("trtllm").here
    assert "sees no NVIDIA GPU" in served("trtllm").text


def test_the_command_names_all_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["transformers", "vllm", "trtllm", "guidellm"]
    assert "runs in this process" in lines[0]
    assert all("not here: " in line for line in lines[1:])


def test_memory_of_a_served_folder(
    executable: Executable, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record holds what the files, the config and the engine say; the log lies beside it."""
    monkeypatch.setenv("FAKE_INSTALLED", CPU)
    python, out = executable("python", "vllm-0.32-cpu-bf16.log"), tmp_path / "out" / "memory.json"
    arguments = ["measure", "memory", str(tiny_llama_dir), "--out", str(out), "--engine", "vllm"]
    assert main([*arguments, "--python", str(python), "--max-model-len", "256", "--engine-option=--seed=1"]) == 0
    record = records.read(out)
    assert isinstance(record.data, MemoryData)
    assert record.data.serving is not None
    assert record.data.serving.kv_cache_tokens == 46_592
    assert record.data.serving.weights_bytes is None
    assert (record.data.serving.process_bytes or 0) > 0
    assert record.data.cache is not None
    assert (record.engine.name, record.engine.device) == ("vllm", "cpu")
    assert record.settings["engine"] == "vllm"
    printed = out.with_suffix(".log").read_text()
    assert '"--enforce-eager", "--seed=1"' in printed, "on a CPU nothing is compiled to ask for memory"
    with pytest.raises(SystemExit, match="2"):
        main(["measure", "fidelity", str(tiny_llama_dir), "--out", str(out), "--engine", "vllm"])


def test_every_registered_engine_has_its_module_and_recipes_name_those_a_run_may_take() -> None:
    for name, row in ENGINES.items():
        assert name == row.name
        for function in ("command", "environment", "describe", "memory"):
            assert callable(getattr(row.adapter, function)), f"{name}: {function}"
    assert typing.get_args(Measure.model_fields["engine"].annotation) == AUTOMATIC
