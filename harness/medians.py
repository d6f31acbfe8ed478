"""Median recovery over benchmarks, and the difference of two such medians, with intervals.

Resampling around the observed recoveries counts their noise twice where benchmarks are alike (it covers .99) and keeps
the bias of an order statistic where they fall into groups (the median of six equal values below five lower ones is the
smallest of six noisy ones: .1-.8). So the true values get a model that allows ties: the benchmarks, in the order of
their recoveries, are cut into runs of equal true value, with every cutting and every value weighed by how well it
explains the recoveries (a product partition model: Barry and Hartigan, Annals of Statistics 20, 1992, 260-279). The
interval holds the middle 95 % of the medians of true values drawn from it.

Coverage in simulation (tests/bench/coverage.py, 80 suites each), 11 benchmarks: of equal errors, alike 1.00, scattered
.95-.99, in groups two to ten errors apart .94-.96; of errors that differ tenfold .99, .88-.98 and .85-.96. The
difference of two medians, of arms whose errors correlate by half, covers .95-1.00: too wide rather than too narrow.
"""

from __future__ import annotations

import dataclasses
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
    return _interval(float(np.median(observed)), _medians(observed, draws, 0), clusters, len(values))


def median_difference_interval(
    top: Sequence[float],
    top_deviations: Sequence[Floats],
    bottom: Sequence[float],
    bottom_deviations: Sequence[Floats],
    clusters: int,
) -> Interval:
    """Interval of median(top) - median(bottom), two arms on the same K benchmarks, deviations drawn together.

    The two medians are drawn independently; then the spread of their difference is reduced by what the deviations,
    which share items and baseline, say about how the two medians move together. The interval also holds what a rerun
    of both arms would move the difference by: precise benchmarks shall not speak for the others.
    """
    a, b = np.array(top), np.array(bottom)
    up, down = np.stack(top_deviations), np.stack(bottom_deviations)
    apart = np.roll(down, RESAMPLES // 2, axis=1)  # the same draws, no longer together
    moved = _median(a, up) - _median(b, down)
    together, alone = float(np.std(moved)), float(np.std(_median(a, up) - _median(b, apart)))
    drawn = _medians(a, up, 0) - _medians(b, down, 1)
    middle = float(drawn.mean())
    drawn = middle + (drawn - middle) * (min(1.0, together / alone) if alone > 0 else 1.0)
    value = float(np.median(a) - np.median(b))
    found = _interval(value, drawn, clusters, len(a))
    low, high = np.quantile(moved - moved.mean(), [1 - LEVEL, LEVEL])
    assert found.low is not None
    assert found.high is not None
    return dataclasses.replace(found, low=min(found.low, value - float(high)), high=max(found.high, value - float(low)))


def _interval(value: float, drawn: Floats, clusters: int, benchmarks: int) -> Interval:
    low, high = np.quantile(drawn, [1 - LEVEL, LEVEL])
    few = f"only {benchmarks} benchmark{'s' if benchmarks > 1 else ''}" if benchmarks <= 3 else ""
    method = "resampling within each benchmark, values that may be equal"
    return Interval(min(value, float(low)), max(value, float(high)), clusters, method, few)


def _median(observed: Floats, draws: Floats) -> Floats:
    return np.asarray(np.median(observed[:, None] + draws, axis=0), dtype=np.float64)


def _medians(observed: Floats, draws: Floats, stream: int) -> Floats:
    """Medians of the true values [RESAMPLES], given observed values [K] and their deviations [K, RESAMPLES]."""
    if len(observed) == 1:
        return _median(observed, draws)
    variance = np.maximum(draws.var(axis=1), 1e-12)
    order = np.argsort(observed, kind="stable")
    rng = np.random.default_rng([SEED, len(observed), stream])
    return np.asarray(np.median(_true_values(observed[order], variance[order], rng), axis=1), dtype=np.float64)


# How readily two neighbours differ, each a priori as likely.
_CUTS = (0.1, 0.3, 0.6, 0.95)


def _true_values(observed: Floats, variance: Floats, rng: np.random.Generator) -> Floats:
    """Draws [RESAMPLES, K] of the true values behind `observed` [K], ascending, of known error variance [K].

    A run of equal values is N(weighted mean, nine times the spread of the observed); between neighbours it ends with probability
    cut. Forward: probability of everything up to a place that ends a run. Backward: draw the runs from the last on.
    """
    weight = 1 / variance
    centre = float((weight * observed).sum() / weight.sum())
    spread = 9 * max(float(observed.var()), float(variance.mean()))
    likelihood, mean, deviation = _runs(observed - centre, weight, spread)
    forwards = [_forward(likelihood, cut) for cut in _CUTS]
    total = np.array([forward[-1] for forward in forwards])
    share = np.exp(total - total.max())
    chosen = rng.choice(len(_CUTS), RESAMPLES, p=share / share.sum())
    drawn = np.empty((RESAMPLES, len(observed)))
    for number, (cut, forward) in enumerate(zip(_CUTS, forwards, strict=True)):
        waiting = {len(observed): np.flatnonzero(chosen == number)}
        for end in range(len(observed), 0, -1):
            rows = waiting.pop(end, np.zeros(0, dtype=np.int64))
            if not len(rows):
                continue
            log = _steps(likelihood, forward, cut, end)
            chance = np.exp(log - log.max())
            starts = rng.choice(end, len(rows), p=chance / chance.sum())
            for start in np.unique(starts):
                those = rows[starts == start]
                value = centre + mean[start, end] + deviation[start, end] * rng.standard_normal(len(those))
                drawn[those, start:end] = value[:, None]
                waiting[int(start)] = np.concatenate([waiting.get(int(start), those[:0]), those])
    return drawn


def _runs(observed: Floats, weight: Floats, spread: float) -> tuple[Floats, Floats, Floats]:
    """Of a run from i to j (exclusive), [K, K + 1] each: log likelihood, mean and deviation of its value."""
    k = len(observed)
    sums = [np.concatenate([[0.0], np.cumsum(v)]) for v in (weight, weight * observed, weight * observed**2)]
    total, first, second = (s[None, :] - s[:-1, None] for s in sums)
    inside = np.arange(k + 1)[None, :] > np.arange(k)[:, None]
    variance = 1 / (np.where(inside, total, 0.0) + 1 / spread)
    log = 0.5 * np.log(variance / spread) - 0.5 * (second - first**2 * variance)
    return np.where(inside, log, -np.inf), first * variance, np.sqrt(variance)


def _forward(likelihood: Floats, cut: float) -> Floats:
    """Log probability of the first j values, a run ending there, [K + 1]."""
    forward = np.zeros(likelihood.shape[1])
    for end in range(1, len(forward)):
        log = _steps(likelihood, forward, cut, end)
        forward[end] = log.max() + math.log(float(np.exp(log - log.max()).sum()))
    return forward


def _steps(likelihood: Floats, forward: Floats, cut: float, end: int) -> Floats:
    """Log probability, [end], of a last run from each start to `end`."""
    start = np.arange(end)
    log = forward[:end] + likelihood[:end, end] + (end - start - 1) * math.log(1 - cut)
    return np.asarray(log + np.where(start > 0, math.log(cut), 0.0), dtype=np.float64)
