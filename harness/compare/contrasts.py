"""Arm against arm, benchmark by benchmark: paired difference, test of no difference, non-inferiority."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from harness.compare.comparable import BASELINE
from harness.records.comparison import BenchmarkRow, Contrast, Estimate
from harness.statistics.intervals import Floats, Ints, paired_difference_interval
from harness.statistics.paired_tests import holm, items_needed, no_difference, non_inferiority

MARGIN = 0.01
NOT_TESTED = "none: imported without items"


@dataclasses.dataclass(frozen=True)
class PairedScores:
    """A row and what it was made of: arm -> float64 [n] scores of the same items (none for imported means), their
    clusters int64 [n], and arm -> resampled deviations of its recovery (None: it has no interval)."""

    row: BenchmarkRow
    values: Mapping[str, Floats]
    cluster: Ints
    deviations: Mapping[str, Floats | None]


def contrasts(benchmarks: Sequence[PairedScores], arms: Sequence[str], margin: float) -> list[Contrast]:
    """Every arm against bf16, then qad against ptq; p-values adjusted over each pair's headline benchmarks."""
    pairs = [(arm, BASELINE) for arm in arms if arm != BASELINE and BASELINE in arms]
    if "ptq" in arms and "qad" in arms:
        pairs.append(("qad", "ptq"))
    return [contrast for arm, against in pairs for contrast in _pair(benchmarks, arm, against, margin)]


def _pair(benchmarks: Sequence[PairedScores], arm: str, against: str, margin: float) -> list[Contrast]:
    both = {arm, against}
    rows = [s for s in benchmarks if both <= (s.row.score if s.row.imported else s.values).keys()]
    found = [(_printed(s.row, arm, against, margin) if s.row.imported else _measured(s, arm, against, margin)) for s in rows]
    adjusted = holm([c.p if s.row.headline else None for c, s in zip(found, rows, strict=True)])
    return [dataclasses.replace(c, p_holm=p) for c, p in zip(found, adjusted, strict=True)]


def _measured(scores: PairedScores, arm: str, against: str, margin: float) -> Contrast:
    row, cluster = scores.row, scores.cluster
    top, bottom = (scores.values[name] for name in ((arm, against) if row.higher_is_better else (against, arm)))
    difference = top - bottom
    p, test = no_difference(difference, cluster)
    positive = bool(bottom.mean() > 0)
    return Contrast(
        benchmark=row.label,
        arm=arm,
        against=against,
        difference=paired_difference_interval(top, bottom, cluster),
        worse=int(np.count_nonzero(difference < 0)),
        better=int(np.count_nonzero(difference > 0)),
        p=p,
        p_holm=None,
        test=test,
        margin=margin,
        verdict=non_inferiority(top, bottom, cluster, margin) if positive else "undecided",
        items_needed=items_needed(top, bottom, cluster, margin) if positive else None,
    )


def _printed(row: BenchmarkRow, arm: str, against: str, margin: float) -> Contrast:
    """Means without items: the difference, from both printed errors where there are any, and no test."""
    sign = 1.0 if row.higher_is_better else -1.0
    a, b = row.score[arm], row.score[against]
    value = sign * (a.value - b.value)
    difference = Estimate(value, None, None, row.n, row.clusters, "none", "inconclusive: imported without items")
    if a.high is not None and b.high is not None:
        half = math.hypot(a.high - a.value, b.high - b.value)
        difference = Estimate(value, value - half, value + half, row.n, row.clusters, "both scores' errors, unpaired")
    return Contrast(
        benchmark=row.label,
        arm=arm,
        against=against,
        difference=difference,
        worse=0,
        better=0,
        p=None,
        p_holm=None,
        test=NOT_TESTED,
        margin=margin,
        verdict="undecided",
        items_needed=None,
    )
