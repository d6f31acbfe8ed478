"""Several accuracy records of one arm under several seeds -> one record: every question's answers together, a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.records import AccuracyData, Outputs, Record, TaskScore


def merge_seeds(records: Sequence[Record]) -> list[Record]:
    """Accuracy records that differ in their seed alone become one, with a list of seeds among its settings.

    Items keep their order and their clusters, so that several answers to one question are no independent items. Arms measured
    under other lists of seeds then differ in a setting, and are not compared. Everything else is passed on as it is.
    """
    merged: list[Record] = []
    for record in sorted(records, key=lambda r: str(r.settings.get("seed"))):
        place = next((i for i, other in enumerate(merged) if _alike(other, record)), None)
        if place is None:
            merged.append(record)
        else:
            merged[place] = _joined(merged[place], record)
    return merged


def _alike(a: Record, b: Record) -> bool:
    """Of one arm, the same weights and settings, and under seeds that are not yet among the first's."""
    if not (isinstance(a.data, AccuracyData) and isinstance(b.data, AccuracyData)):
        return False
    settings = [{k: v for k, v in r.settings.items() if k != "seed"} for r in (a, b)]
    same = (a.arm, a.checkpoint, a.engine, a.model) == (b.arm, b.checkpoint, b.engine, b.model)
    names = [[(t.task, t.filter, t.metric) for t in r.data.tasks] for r in (a, b) if isinstance(r.data, AccuracyData)]
    seed = b.settings.get("seed")
    return same and settings[0] == settings[1] and names[0] == names[1] and seed is not None and seed not in _seeds(a)


def _seeds(record: Record) -> list[object]:
    seed = record.settings.get("seed")
    return list(seed) if isinstance(seed, list) else [seed]


def _joined(a: Record, b: Record) -> Record:
    assert isinstance(a.data, AccuracyData)
    assert isinstance(b.data, AccuracyData)
    tasks = [_task(x, y) for x, y in zip(a.data.tasks, b.data.tasks, strict=True)]
    return dataclasses.replace(
        a,
        settings={**a.settings, "seed": [*_seeds(a), *_seeds(b)]},
        seconds=a.seconds + b.seconds,
        data=AccuracyData(tasks),
    )


def _task(a: TaskScore, b: TaskScore) -> TaskScore:
    outputs = None
    if a.outputs is not None and b.outputs is not None:
        fields = dataclasses.fields(Outputs)
        outputs = Outputs(*(getattr(a.outputs, f.name) + getattr(b.outputs, f.name) for f in fields))
    return dataclasses.replace(a, items=[*a.items, *b.items], outputs=outputs)
