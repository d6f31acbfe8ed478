"""Memory of a checkpoint that an engine serves: what is on disk and what the config says, and the engine's own figures."""

from __future__ import annotations

import dataclasses
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


def memory_of(folder: Path, choice: EngineChoice | None, log: Path, dtype: str = "auto") -> tuple[MemoryData, Engine]:
    """Memory from the files alone; or with what an engine says, which serves the folder once for it. On a CPU nothing is
    compiled: the memory is the same, and it starts sooner.

    Raises UsageError, EngineError as `serve` does; SourceError, BrokenCheckpointError as `measure_memory` does.
    """
    data = measure_memory(folder)
    if choice is None:
        return data, FILES
    interpreter, row = engine_python(choice.name, choice.python), engine_named(choice.name)
    eager = row.eager if row.plugin and not installed(choice.name, interpreter).gpus else ()
    with serve(
        choice.name,
        folder,
        log=log,
        python=str(interpreter),
        dtype=dtype,
        max_model_len=choice.max_model_len,
        options=[*eager, *choice.options],
        ready_s=READY_S,
    ) as server:
        return dataclasses.replace(data, serving=server.facts), server.engine


def memory_settings(choice: EngineChoice | None) -> dict[str, Any]:
    """A record of another engine, or from before sequences were counted, is measured again."""
    lengths = {"lengths": list(LENGTHS)}
    if choice is None:
        return lengths
    return {**lengths, "engine": choice.name, "max_model_len": choice.max_model_len, "options": list(choice.options)}
