"""Intervals by resampling whole clusters: ratios of sums over sequences, such as KL per token.

Studentised cluster bootstrap, on the log scale where the ratio is positive, widened by what few clusters hide. For
sequences whose own KL is log-normal it covers, at log-sd .3 / .7 / 1.1: 8 sequences .97 / .96 / .95, 24 sequences
.95 / .95 / .93 (300 simulations each; without the widening .95 / .95 / .91 and .94 / .93 / .91).

All randomness is seeded from the arguments alone: the same data give the same bits.
"""

from __future__ import annotations

import math

import numpy as np

from harness.records.comparison import Estimate
from harness.statistics.intervals import LEVEL, Floats, Ints, Z, cluster_count, cluster_totals, estimate, few_clusters, student_t

RESAMPLES = 4000
SEED = 20_25
_CHUNK = 1 << 21  # indices drawn at a time


def ratio_of_sums(top: Floats, bottom: Floats, cluster: Ints, *, log: bool) -> Estimate:
    """sum(top) / sum(bottom) over sequences [n] in clusters: studentised cluster bootstrap.

    bottom must be positive. log: work on the log of the ratio; only where every top is positive too.
    """
    groups, n, value = cluster_count(cluster), len(top), float(top.sum() / bottom.sum())
    if groups < 2:
        return Estimate(value, None, None, n, groups, "none", "one cluster: no interval")
    totals = np.stack([cluster_totals(top, cluster), cluster_totals(bottom, cluster)], axis=1)
    products = np.stack([totals[:, 0] ** 2, totals[:, 0] * totals[:, 1], totals[:, 1] ** 2], axis=1)
    residual = totals[:, 0] - value * totals[:, 1]
    spread = math.sqrt(float((residual**2).sum()) * groups / (groups - 1)) / abs(float(totals[:, 1].sum()))
    if spread <= 1e-12 * max(1.0, abs(value)):
        return Estimate(value, value, value, n, groups, "none needed", "every cluster gives the same value")
    sums = resampled_sums(np.concatenate([totals, products], axis=1), stream=0)
    drawn, errors = _ratio_and_error(sums[:, :2], sums[:, 2:], groups)
    # A resample of near-identical clusters has no error of its own; the smallest sensible one keeps it finite.
    errors = np.maximum(errors, 0.05 * spread)
    # Resampling few clusters shows too little spread: as much too little as a normal quantile does beside Student's t.
    spread *= student_t(groups) / Z * math.sqrt(groups / (groups - 1))
    if log:
        pivot = np.log(drawn / value) / (errors / drawn)
        low, high = np.quantile(pivot, [1 - LEVEL, LEVEL])
        ends = value * math.exp(-high * spread / value), value * math.exp(-low * spread / value)
    else:
        low, high = np.quantile((drawn - value) / errors, [1 - LEVEL, LEVEL])
        ends = value - high * spread, value - low * spread
    method = f"studentised cluster bootstrap, {RESAMPLES} resamples"
    return estimate(value, float(ends[0]), float(ends[1]), n, groups, method, few_clusters(groups))


def _ratio_and_error(sums: Floats, squares: Floats, groups: int) -> tuple[Floats, Floats]:
    """sums [B, 2] of (top, bottom), squares [B, 3] of (top^2, top bottom, bottom^2) -> ratio and its error [B]."""
    ratio = sums[:, 0] / sums[:, 1]
    residual = squares[:, 0] - 2 * ratio * squares[:, 1] + ratio**2 * squares[:, 2]
    return ratio, np.sqrt(np.maximum(residual, 0) * groups / (groups - 1)) / np.abs(sums[:, 1])


def resampled_sums(values: Floats, stream: int) -> Floats:
    """Sums over resampled rows: values [G, C] -> [RESAMPLES, C], rows drawn with replacement, G at a time."""
    groups = len(values)
    rng = np.random.default_rng([SEED, stream, groups])
    out = np.empty((RESAMPLES, values.shape[1]))
    step = max(1, _CHUNK // groups)
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        drawn = rng.integers(0, groups, (rows, groups)) + groups * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups)
        out[start : start + rows] = counts.astype(np.float64) @ values
    return out
