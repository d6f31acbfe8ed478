"""What a comparison of arms is: the result types of harness.recovery, which reports render. No torch here."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval. low/high None: no honest interval exists, `note` says why.

    n: independent items behind it; clusters: groups that were resampled. method: how the interval was made.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    clusters: int
    method: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class BenchmarkRow:
    """One task under one filter, all arms, paired by item. Dictionaries are keyed by arm; recovery has no bf16."""

    task: str
    metric: str
    filter: str
    n_shot: int
    higher_is_better: bool
    chance: float | None
    n: int
    clusters: int
    score: dict[str, Estimate]
    recovery: dict[str, Estimate | None]
    recovery_above_chance: dict[str, Estimate | None]
    flips: dict[str, tuple[int, int]]  # (right -> wrong, wrong -> right) against bf16


@dataclasses.dataclass(frozen=True)
class FidelityRow:
    """kl in nats per token; top1 as a share; perplexity of the text; ratio against the teacher's perplexity."""

    kl: Estimate
    top1: Estimate
    perplexity: Estimate
    perplexity_ratio: Estimate
    token_kl: dict[str, float]
    sequences: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything the report says about PTQ and QAD against BF16.

    median_recovery / worst: over benchmarks, per arm. kl_ratio: KL of qad / KL of ptq. perplexity_gap_closed:
    (ptq - qad) / (ptq - bf16), None unless the interval of the PTQ gap excludes 0. not_compared: what was left out and why.
    """

    arms: list[str]
    benchmarks: list[BenchmarkRow]
    median_recovery: dict[str, Estimate]
    worst: dict[str, tuple[str, Estimate]]
    fidelity: dict[str, FidelityRow]
    kl_ratio: Estimate | None
    perplexity_gap_closed: Estimate | None
    throughput_ratio: dict[str, dict[str, Estimate]]  # arm -> phase -> ratio to bf16
    not_compared: list[str]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Plain JSON types."""
    return dataclasses.asdict(comparison)
