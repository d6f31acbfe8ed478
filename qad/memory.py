"""Memory of a folder: from its files alone, or with what an engine says that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qad.engine_choice import EngineChoice

if TYPE_CHECKING:
    from harness.records import Engine, MemoryData


def memory_of(folder: Path, choice: EngineChoice | None, log: Path, dtype: str = "auto") -> tuple[MemoryData, Engine]:
    """Memory from the files alone, or with what the engine says that serves them."""
    from harness.engines.transformers import FILES
    from harness.memory import measure_memory
    from harness.served_memory import measure_served_memory

    if choice is None:
        return measure_memory(folder), FILES
    return measure_served_memory(
        folder, choice.name, log=log, python=choice.python, dtype=dtype, max_model_len=choice.max_model_len,
        options=choice.options,
    )  # fmt: skip


def memory_settings(choice: EngineChoice | None) -> dict[str, Any]:
    """A record of another engine, or from before sequences were counted, is measured again."""
    from harness.cache_cost import LENGTHS

    lengths = {"lengths": list(LENGTHS)}
    if choice is None:
        return lengths
    return {**lengths, "engine": choice.name, "max_model_len": choice.max_model_len, "options": list(choice.options)}
