"""Which engine is started as a server to measure with."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """An engine to start as a server, in the environment of `python` (default: its usual place)."""

    name: str
    python: str | None = None
    max_model_len: int | None = None
    options: tuple[str, ...] = ()


def run_engine(choice: str) -> EngineChoice | None:
    """The engine a run serves its arms with; None: this process."""
    from harness.engines.available import best_engine

    name = best_engine(choice)
    return None if name == "transformers" else EngineChoice(name)
