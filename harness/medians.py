"""Median recovery over benchmarks, and the difference of two such medians, with intervals.

PLACEHOLDER
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.intervals import (
    LEVEL,
    MIN_DISCORDANT,
    Floats,
    Interval,
    Ints,
    Z,
    cluster_totals,
    paired_ratio_interval,
    student_t,
)  # fmt: skip
from harness.resampling import RESAMPLES, SEED, resampled_sums


def paired_ratio_deviations(top: Floats, bottom: Floats, cluster: Ints, stream: int, arm: int = 0) -> Floats | None:
    """Resampled ratio minus the observed one [RESAMPLES], for `median_interval`; None where it has no interval.

    With enough differing items: cluster bootstrap, widened to what Student's t gives at this number of clusters.
    With few: two half-normals of the score interval's two widths, because resampling would show no spread at all.
    stream: number of the benchmark, so that benchmarks are resampled independently. arm: its number. Two arms of one
    benchmark resample the same clusters, so that their deviations go together as their scores do; the half-normals
    are independent, which makes a difference of two arms too wide rather than too narrow.
    """
    interval = paired_ratio_interval(top, bottom, cluster)
    if interval.low is None or interval.high is None:
        return None
    ratio = float(top.mean() / bottom.mean())
    if np.count_nonzero(top != bottom) < MIN_DISCORDANT:
        draws = np.random.default_rng([SEED, stream, arm]).standard_normal(RESAMPLES) / Z
        return np.where(draws > 0, draws * (interval.high - ratio), draws * (ratio - interval.low))
    groups = interval.clusters
    sums = resampled_sums(np.stack([cluster_totals(top, cluster), cluster_totals(bottom, cluster)], axis=1), stream)
    kept = sums[:, 1] > 0
    drawn = np.where(kept, sums[:, 0] / np.where(kept, sums[:, 1], 1.0), ratio)
    widen = student_t(groups) / Z * math.sqrt(groups / (groups - 1))
    return np.asarray((drawn - ratio) * widen, dtype=np.float64)


def median_interval(values: Sequence[float], deviations: Sequence[Floats], clusters: int) -> Interval:
    """Interval of the median of `values` [K] (one per benchmark) from resampled deviations, K arrays [RESAMPLES]."""
    observed, draws = np.array(values), np.stack(deviations)
    median = float(np.median(observed))
    return _interval(median, _median_errors(observed, draws), clusters, len(values))


def median_difference_interval(
    top: Sequence[float], top_deviations: Sequence[Floats], bottom: Sequence[float], bottom_deviations: Sequence[Floats],
    clusters: int,
) -> Interval:  # fmt: skip
    """Interval of median(top) - median(bottom), two arms on the same K benchmarks."""
    a, b = np.array(top), np.array(bottom)
    errors = _median_errors(a, np.stack(top_deviations)) - _median_errors(b, np.stack(bottom_deviations))
    return _interval(float(np.median(a) - np.median(b)), errors, clusters, len(a))


def _interval(value: float, errors: Floats, clusters: int, benchmarks: int) -> Interval:
    low, high = np.quantile(errors, [1 - LEVEL, LEVEL])
    few = f"only {benchmarks} benchmark{'s' if benchmarks > 1 else ''}" if benchmarks <= 3 else ""
    method = "resampling within each benchmark"
    return Interval(value - float(high), value - float(low), clusters, method, few)


def _median_errors(observed: Floats, draws: Floats) -> Floats:
    """Error of the median of K benchmarks, [RESAMPLES], from `draws` [K, RESAMPLES] around centres that stand for the
    true values."""
    centre = _centres(observed, np.maximum(draws.var(axis=1), 1e-12))
    return np.asarray(np.median(centre[:, None] + draws, axis=0) - np.median(centre), dtype=np.float64)


def _centres(observed: Floats, variance: Floats) -> Floats:
    weight = 1 / variance
    mean = float((weight * observed).sum() / weight.sum())
    excess = float((weight * (observed - mean) ** 2).sum()) - (len(observed) - 1)
    scale = float(weight.sum() - (weight**2).sum() / weight.sum())
    between = max(0.0, excess / scale) if scale > 0 else 0.0
    return np.asarray(mean + (observed - mean) * between / (between + variance), dtype=np.float64)
