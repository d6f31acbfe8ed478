"""Throughput records of the arms -> speed as a ratio to bf16, phase by phase, from interleaved repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from harness.compare.comparable import BASELINE
from harness.records.comparison import Estimate
from harness.records.record import Record, ThroughputData, ThroughputPoint
from harness.statistics.intervals import log_ratio_t, mean_interval

Shape = tuple[str, int, int, int]  # phase, batch, input tokens, output tokens


def compare_throughput(arms: dict[str, Record], notes: list[str]) -> dict[str, dict[str, Estimate]]:
    """arm -> phase -> speed / bf16's. Repeat i of an arm is paired with repeat i of bf16, which ran next to it.

    Settings or devices that differ are no error here, speed is measured elsewhere all the time: no ratio, and a note.
    """
    compared = beside_baseline("throughput", "throughput", arms, _obstacle, notes)
    return {arm: _ratios(arm, _points(base), _points(own), notes) for arm, base, own in compared}


def _obstacle(base: Record, record: Record) -> str:
    if base.engine.device != record.engine.device:
        return f"measured on {record.engine.device}, {BASELINE} on {base.engine.device}"
    differing = differing_settings(base, record)
    return f"settings differ in {', '.join(differing)}" if differing else ""


def _points(record: Record) -> dict[Shape, ThroughputPoint]:
    assert isinstance(record.data, ThroughputData)
    return {(p.phase, p.batch, p.input_tokens, p.output_tokens): p for p in record.data.points}


def _ratios(
    arm: str, base: dict[Shape, ThroughputPoint], other: dict[Shape, ThroughputPoint], notes: list[str]
) -> dict[str, Estimate]:
    shared = [shape for shape in base if shape in other]
    phases = [shape[0] for shape in shared]
    ratios = {}
    for shape in shared:
        name = shape[0] if phases.count(shape[0]) == 1 else shape_name(*shape)
        pairs = list(zip(other[shape].tokens_per_s, base[shape].tokens_per_s, strict=False))
        repeats = [*other[shape].tokens_per_s, *base[shape].tokens_per_s]
        estimate = mean_ratio(pairs) if all(math.isfinite(v) and v > 0 for v in repeats) else None
        if estimate is None:
            notes.append(f"throughput of {arm}, {name}: a repeat is missing or not positive, so there is no ratio")
        else:
            ratios[name] = estimate
    unpaired = [shape_name(*shape) for shape in {**base, **other} if shape not in shared]
    notes += [f"throughput of {arm}: {name} was measured in only one of {BASELINE} and {arm}" for name in unpaired]
    return ratios


def shape_name(phase: str, batch: int, input_tokens: int, output_tokens: int) -> str:
    return f"{phase}, batch {batch}, {input_tokens} + {output_tokens} tokens"


def emulated(arms: dict[str, Record]) -> list[str]:
    """Arms whose speed was measured without FP4 arithmetic."""
    return [arm for arm, record in arms.items() if record.engine.emulated]


def failure_shares(arms: dict[str, Record], answered: dict[str, tuple[int, int]]) -> dict[str, Estimate]:
    """arm -> failed / sent requests, Wilson's interval; only where a server was asked.

    arms: throughput records. answered: arm -> (failed, sent) of accuracy.
    """
    counts = {arm: list(found) for arm, found in answered.items()}
    for arm, record in arms.items():
        for point in _points(record).values():
            if point.requests is not None and point.failed is not None:
                total = counts.setdefault(arm, [0, 0])
                total[0] += point.failed
                total[1] += point.requests
    shares = {}
    for arm, (failed, sent) in counts.items():
        if sent > 0:
            shares[arm] = mean_interval(np.repeat([1.0, 0.0], [failed, sent - failed]), np.arange(sent))
    return shares


def beside_baseline(
    kind: str, what: str, arms: dict[str, Record], obstacle: Callable[[Record, Record], str], notes: list[str]
) -> Iterator[tuple[str, Record, Record]]:
    """(arm, bf16's record, its own) of each arm that may be held against bf16; of every other one a note with the reason.

    kind, what: of speed, as notes call it. obstacle: of two records; "" where there is none.
    """
    if arms and BASELINE not in arms:
        notes.append(f"{kind}: {BASELINE} was not measured, so there are no ratios")
        return
    for arm, record in arms.items():
        if arm == BASELINE:
            continue
        reason = obstacle(arms[BASELINE], record)
        if reason:
            notes.append(f"{what} of {arm} has no ratio to {BASELINE}: {reason}")
        else:
            yield arm, arms[BASELINE], record


def differing_settings(base: Record, other: Record) -> list[str]:
    """Names of the settings in which two records differ, sorted."""
    return sorted(key for key in {**base.settings, **other.settings} if base.settings.get(key) != other.settings.get(key))


def mean_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Geometric mean of top / bottom over paired repeats, both positive; None without any. The interval is Student's t on the
    logs."""
    return log_ratio_t([top for top, _ in pairs], [bottom for _, bottom in pairs]) if pairs else None
