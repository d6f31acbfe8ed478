"""Memory of a checkpoint that an engine serves: what is on disk and what the config says, and the engine's own figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from harness.engines.environment import engine_python, installed
from harness.engines.server import serve
from harness.memory import measure_memory
from harness.records import Engine, MemoryData

READY_S = 3600  # large models load for long; an engine that fails ends by itself


def measure_served_memory(
    folder: Path,
    engine: str,
    *,
    log: Path,
    python: str | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    options: Sequence[str] = (),
) -> tuple[MemoryData, Engine]:
    """Serve `folder` once, ask, and stop. On a CPU vLLM runs eager: its memory is the same, and it starts sooner.

    Raises UsageError, EngineError as `serve` does; SourceError, BrokenCheckpointError as `measure_memory` does.
    """
    data = measure_memory(folder)
    interpreter = engine_python(engine, python)
    eager = ["--enforce-eager"] if engine == "vllm" and not installed(engine, interpreter).gpus else []
    with serve(
        engine, folder, log=log, python=str(interpreter), dtype=dtype, max_model_len=max_model_len,
        options=[*eager, *options], ready_s=READY_S,
    ) as server:  # fmt: skip
        return dataclasses.replace(data, serving=server.facts), server.engine
