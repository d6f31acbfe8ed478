"""Memory of a checkpoint that an engine serves: what is on disk and what the config says, and the engine's own figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.engines.available import EngineChoice
from harness.engines.environment import engine_python, installed
from harness.engines.registered import engine_named
from harness.engines.server import serve
from harness.engines.transformers import FILES
from harness.memory.cache_cost import LENGTHS
from harness.memory.files import measure_memory
from harness.records.record import Engine, MemoryData

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
    """Serve `folder` once, ask, and stop. On a CPU nothing is compiled: the memory is the same, and it starts sooner.

    Raises UsageError, EngineError as `serve` does; SourceError, BrokenCheckpointError as `measure_memory` does.
    """
    data = measure_memory(folder)
    interpreter = engine_python(engine, python)
    row = engine_named(engine)
    eager = row.eager if row.plugin and not installed(engine, interpreter).gpus else ()
    with serve(
        engine,
        folder,
        log=log,
        python=str(interpreter),
        dtype=dtype,
        max_model_len=max_model_len,
        options=[*eager, *options],
        ready_s=READY_S,
    ) as server:
        return dataclasses.replace(data, serving=server.facts), server.engine


def memory_of(folder: Path, choice: EngineChoice | None, log: Path, dtype: str = "auto") -> tuple[MemoryData, Engine]:
    """Memory from the files alone, or with what the engine says that serves them."""
    if choice is None:
        return measure_memory(folder), FILES
    return measure_served_memory(
        folder,
        choice.name,
        log=log,
        python=choice.python,
        dtype=dtype,
        max_model_len=choice.max_model_len,
        options=choice.options,
    )


def memory_settings(choice: EngineChoice | None) -> dict[str, Any]:
    """A record of another engine, or from before sequences were counted, is measured again."""
    lengths = {"lengths": list(LENGTHS)}
    if choice is None:
        return lengths
    return {**lengths, "engine": choice.name, "max_model_len": choice.max_model_len, "options": list(choice.options)}
