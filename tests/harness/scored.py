"""What tests share: the score of a model in memory on a few tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.accuracy.in_memory import InMemory
from harness.accuracy.samples import Sample
from harness.accuracy.scores import measure_suite
from harness.accuracy.suite import of_tasks
from harness.accuracy.task_files import Places
from harness.records.record import AccuracyData


def score_tasks(
    model: Any,
    tokenizer: Any,
    tasks: list[str],
    *,
    limit: int | None = None,
    n_shot: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    task_path: Path | None = None,
    think_end: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> AccuracyData:
    """task_path: a folder of task files, searched before the shipped ones."""
    suite = of_tasks(tasks, limit, n_shot, think_end)
    backend = InMemory(model, tokenizer, batch_size, think_end)
    return measure_suite(backend, suite, Places.of(task_path), seed=seed, progress=progress).data


def read_samples(path: Path) -> list[Sample]:
    """What `harness.accuracy.samples.write_samples` wrote."""
    import pyarrow.parquet as pq

    return [Sample(**row) for row in pq.read_table(path).to_pylist()]
