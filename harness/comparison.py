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
    """One task under one filter, all arms, paired by item. Dictionaries are keyed by arm; recovery has no bf16.

    recovery None: n/a, `Comparison.not_compared` says why. recovery_above_chance: (candidate - chance) / (bf16 - chance).
    """

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
    flips: dict[str, tuple[int, int]]  # items that got (worse, better) than under bf16
    limit: int | None = None  # items asked for; not None: a smoke run, not the whole task
    headline: bool = True  # counts in the median; False for every filter of a task but its first

    @property
    def label(self) -> str:
        """The task's name; with the filter where the task is shown under several."""
        return self.task if self.headline else f"{self.task} ({self.filter})"


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

    median_recovery: per arm, over the headline rows that have a recovery. worst: label and recovery of the lowest of
    all rows. kl_ratio: KL of qad / KL of ptq. perplexity_gap_closed: (ptq - qad) / (ptq - bf16), None unless the
    interval of the PTQ gap lies above 0. throughput_ratio: arm -> phase (with its shape where a phase was measured
    at several) -> speed / bf16's. not_compared: what was left out and why.
    """

    arms: list[str]
    benchmarks: list[BenchmarkRow]
    median_recovery: dict[str, Estimate]
    worst: dict[str, tuple[str, Estimate]]
    fidelity: dict[str, FidelityRow]
    kl_ratio: Estimate | None
    perplexity_gap_closed: Estimate | None
    throughput_ratio: dict[str, dict[str, Estimate]]
    not_compared: list[str]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Plain JSON types."""
    return dataclasses.asdict(comparison)
