"""Which Python runs an engine. Engines pin their own torch, so each may live in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from qad.errors import UsageError

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
