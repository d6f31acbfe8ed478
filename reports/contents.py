"""report.json: what it holds, as typed data, so that its JSON Schema (reports/schema.json) is generated from here.

Every number is unrounded; null where one is not known or not finite.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from harness.records.comparison import Comparison
from harness.records.record import Engine, MemoryData, Record, ThroughputPoint, Training
from harness.records.verdict import Verdict
from reports.load import Run, SplitText, Step
from reports.parts import Banner, Document
from reports.sections import items, origin
from reports.sections.engine_parity import Parity, parity_of
from reports.sections.outcome import memory_of
from reports.sections.tables import points_of

SCHEMA_VERSION = 3


@dataclasses.dataclass(frozen=True)
class Missing:
    what: str
    why: str


@dataclasses.dataclass(frozen=True)
class ArmMemory:
    """The record's data, with bits on disk per parameter and the share of parameters in four bits."""

    data: MemoryData
    effective_bits: float | None
    quantized_share: float | None


@dataclasses.dataclass(frozen=True)
class Changes:
    """Items of one benchmark under one arm that score worse or better than under BF16. All of them, one by one, are in
    tables/items.parquet."""

    task: str
    filter: str
    metric: str
    arm: str
    items: int
    worse: int
    better: int


@dataclasses.dataclass(frozen=True)
class RecordFacts:
    """A record without its data. sha256: of its canonical JSON. control: what was changed on purpose for a second measurement of
    the arm's weights, which gives the noise floor; null: an arm's record. training: seed and recipe
    of a trained checkpoint."""

    kind: str
    sha256: str
    arm: str
    model: str
    checkpoint: str
    engine: Engine
    settings: dict[str, object]
    provenance: dict[str, object]
    created: str
    seconds: float
    schema_version: int
    control: dict[str, object] | None
    training: Training | None


@dataclasses.dataclass(frozen=True)
class Contents:
    """report.json. memory, throughput, parity: keyed by arm. training: lines of metrics.jsonl; training_of: of the other trained
    arms. manifests: path inside the run -> that stage's manifest. changed: by benchmark and arm.
    not_measured: everything a report can show that the records do not hold."""

    schema_version: int
    title: str
    subtitle: str
    verdict: Verdict | None
    outcome: list[str]
    banners: list[Banner]
    comparison: Comparison
    changed: list[Changes]
    memory: dict[str, ArmMemory]
    throughput: dict[str, list[ThroughputPoint]]
    parity: dict[str, Parity]
    training: list[Step]
    training_of: dict[str, list[Step]]
    not_measured: list[Missing]
    recipe: str
    text: list[SplitText]
    records: list[RecordFacts]
    manifests: dict[str, dict[str, object]]


def contents(
    document: Document,
    comparison: Comparison,
    records: list[Record],
    others: list[Record],
    run: Run,
    verdict: Verdict | None,
    pairs: list[items.Pair],
    missing: list[tuple[str, str]],
) -> dict[str, object]:
    """Plain JSON types."""
    value = Contents(
        schema_version=SCHEMA_VERSION,
        title=document.title,
        subtitle=document.subtitle,
        verdict=verdict,
        outcome=document.outcome,
        banners=document.banners,
        comparison=comparison,
        changed=_changes(pairs),
        memory={arm: _memory(data) for arm, data in memory_of(records).items()},
        throughput=points_of(records),
        parity=parity_of(records),
        training=run.steps,
        training_of=run.other_steps,
        not_measured=[Missing(what, why) for what, why in missing],
        recipe=run.recipe,
        text=run.text,
        records=[_facts(record) for record in [*records, *others]],
        manifests=run.manifests,
    )
    plain: dict[str, object] = finite(dataclasses.asdict(value))
    return plain


def _memory(data: MemoryData) -> ArmMemory:
    known = data.parameters > 0
    return ArmMemory(data, data.effective_bits if known else None, data.quantized_share if known else None)


def _changes(pairs: list[items.Pair]) -> list[Changes]:
    counts: dict[tuple[str, str, str, str], list[str]] = {}
    for pair in pairs:
        counts.setdefault((pair.task, pair.filter, pair.metric, pair.arm), []).append(pair.change)
    return [Changes(*key, len(found), found.count("worse"), found.count("better")) for key, found in counts.items()]


def _facts(record: Record) -> RecordFacts:
    kept = {f.name for f in dataclasses.fields(RecordFacts)} - {"kind", "sha256"}
    values = {name: getattr(record, name) for name in kept}
    return RecordFacts(kind=record.kind, sha256=origin.record_hash(record), **values)


def finite(value: object) -> Any:
    """JSON has no NaN: what is not a number is null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
