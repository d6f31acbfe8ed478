"""Second measurements of the same weights, for the noise floor: other batch size, other seeds of the samples, other attention
kernel. Nothing of that should matter; how much it does is what a difference between arms has to exceed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.accuracy.section import Scoring, score_loaded

if TYPE_CHECKING:
    from harness.records.record import AccuracyData, Engine, FidelityData

SAMPLES_APART = 10_000  # more than any suite has samples an item
OTHER_ATTENTION = "eager"  # transformers' own choice is sdpa wherever a model has it


@dataclasses.dataclass(frozen=True)
class Again:
    """conditions: what was changed on purpose."""

    data: AccuracyData | FidelityData
    engine: Engine
    conditions: dict[str, Any]


def accuracy_again(folder: Path, scoring: Scoring, dtype: str, device: str, checkpoint: str, record: Path) -> Again:
    """Accuracy of a folder a second time. Few-shot examples stay, so that the prompts do."""
    from harness.engines.transformers import load

    attention = OTHER_ATTENTION
    batch_size = scoring.batch_size // 2 or 2
    loaded = load(folder, dtype, device, attention)
    changed = dataclasses.replace(scoring, batch_size=batch_size, suite=scoring.suite.reseeded(SAMPLES_APART))
    data = score_loaded(loaded, changed, checkpoint, record)
    conditions: dict[str, Any] = {"batch_size": batch_size, "attention": attention}
    if any(task.outputs is not None for task in data.tasks):
        conditions["seed"] = f"+{SAMPLES_APART}"
    return Again(data, loaded.engine, conditions)


def fidelity_again(
    first: Any, folder: Path, sequences: list[tuple[str, Any]], data_name: str, dtype: str, device: str,
    progress: Callable[[int], object] | None = None,
) -> Again:  # fmt: skip
    """Distance of a folder under another attention kernel from itself, `first`, as it was measured."""
    from harness.engines.transformers import load
    from harness.fidelity.distance import measure_fidelity

    attention = OTHER_ATTENTION
    loaded = load(folder, dtype, device, attention)
    measured = measure_fidelity({"again": loaded.model}, first, sequences, data_name, progress, teacher_name="first")
    return Again(measured["again"], loaded.engine, {"attention": attention})
