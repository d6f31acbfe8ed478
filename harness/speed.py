"""Throughput records of the arms -> speed as a ratio to bf16, phase by phase, from interleaved repeats."""

from __future__ import annotations

import math

import numpy as np

from harness.comparable import BASELINE
from harness.comparison import Estimate
from harness.estimates import estimate
from harness.intervals import log_ratio_t, mean_interval
from harness.records import Record, ThroughputData, ThroughputPoint

Shape = tuple[str, int, int, int]  # phase, batch, input tokens, output tokens


def compare_throughput(arms: dict[str, Record], notes: list[str]) -> dict[str, dict[str, Estimate]]:
    """arm -> phase -> speed / bf16's. Repeat i of an arm is paired with repeat i of bf16, which ran next to it.

    Settings or devices that differ are no error here, speed is measured elsewhere all the time: no ratio, and a note.
    """
    if arms and BASELINE not in arms:
        notes.append(f"throughput: {BASELINE} was not measured, so there are no ratios")
        return {}
    ratios = {}
    for arm, record in arms.items():
        if arm == BASELINE:
            continue
        reason = _obstacle(arms[BASELINE], record)
        if reason:
            notes.append(f"throughput of {arm} has no ratio to {BASELINE}: {reason}")
            continue
        ratios[arm] = _ratios(arm, _points(arms[BASELINE]), _points(record), notes)
    return ratios


def _obstacle(base: Record, record: Record) -> str:
    if base.engine.device != record.engine.device:
        return f"measured on {record.engine.device}, {BASELINE} on {base.engine.device}"
    differing = sorted(
        key for key in {**base.settings, **record.settings} if base.settings.get(key) != record.settings.get(key)
    )
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
        estimate = _ratio(other[shape].tokens_per_s, base[shape].tokens_per_s)
        if estimate is None:
            notes.append(f"throughput of {arm}, {name}: a repeat is missing or not positive, so there is no ratio")
        else:
            ratios[name] = estimate
    unpaired = [shape_name(*shape) for shape in {**base, **other} if shape not in shared]
    notes += [f"throughput of {arm}: {name} was measured in only one of {BASELINE} and {arm}" for name in unpaired]
    return ratios


def shape_name(phase: str, batch: int, input_tokens: int, output_tokens: int) -> str:
    return f"{phase}, batch {batch}, {input_tokens} + {output_tokens} tokens"


def _ratio(top: list[float], bottom: list[float]) -> Estimate | None:
    """Geometric mean of the paired ratios. The interval is Student's t on their logs."""
    n = min(len(top), len(bottom))
    if n == 0 or not all(math.isfinite(v) and v > 0 for v in [*top, *bottom]):
        return None
    value = math.exp(sum(math.log(t / b) for t, b in zip(top[:n], bottom[:n], strict=True)) / n)
    interval = log_ratio_t(top[:n], bottom[:n])
    return estimate(value, interval, n)


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
            outcome = np.repeat([1.0, 0.0], [failed, sent - failed])
            found = mean_interval(outcome, np.arange(sent))
            shares[arm] = Estimate(failed / sent, found.low, found.high, sent, sent, found.method, found.note)
    return shares
