"""The Python that runs vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engines.environment import engine_python
from qad.errors import UsageError


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Skips where there is no vLLM; REQUIRE=engine makes that a failure."""
    try:
        return engine_python("vllm")
    except UsageError as error:
        pytest.skip(str(error))
