"""Median recovery over benchmarks, and the difference of two such medians, with intervals.

Resampling around the observed recoveries counts their noise twice where benchmarks are alike and keeps the bias of an order
statistic where they fall into groups (the median of six equal values above five lower ones is the lowest of six noisy ones:
it covers .1-.6). So the true values get a model that allows ties: benchmarks fall into an unknown number of groups of equal
value, any number and any sizes as likely a priori, with every grouping and every value weighed by how well it explains the
recoveries and their errors (a mixture of finite mixtures: Miller and Harrison, Journal of the American Statistical
Association 113, 2018, 340-356), drawn by sequential imputation (Kong, Liu and Wong, same journal 89, 1994, 278-288). Which group
holds the middle one cannot be seen where groups are two or three errors apart, so of K benchmarks the interval leaves out 5 % / K
of the medians drawn; two benchmarks have a mean.

Coverage in simulation (tests/bench/coverage.py), 11 benchmarks of known errors. Hardest is a median at the edge of the larger
of two groups, six and five, that are 1, 1.5, 2, 2.5, 3, 4 and 5 errors apart: .99, .98, .98, .94, .93, .98, .99 with equal
errors, .97, .96, .98, .97, .98, .99, .98 with errors that differ tenfold (400 suites each, +-.012, drawn exactly). Alike,
scattered, in more groups or with a collapsed one .98-1.00, above .98 because groups may be there unseen: two groups two errors
apart pass a chi-square test of being alike in two suites of five, their median .9 errors off their mean, and an interval of the
mean +-.9 errors, three standard errors of it, covers .997 where all are alike. 3 to 10 benchmarks cover .93-1.00.

The difference of two medians, of arms whose errors correlate by half, covers 1.00 where both arms lose alike and .93-1.00 where
one is in two groups and the other alike or scattered. It falls to .70-.90 in one setting: groups of six and five, 1.5 to 3
errors apart, of which one arm has six in the upper, the other six in the lower, so that one benchmark decides both medians.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, ndtri

from harness.records.comparison import Estimate
from harness.statistics.intervals import LEVEL, MIN_DISCORDANT, Floats, Ints, Z, cluster_totals, paired_ratio_interval, student_t
from harness.statistics.resampling import RESAMPLES, SEED, resampled_sums

AVERAGED = 2  # benchmarks: their median is a mean, which noise does not move to one side
DRAWS = 16_000


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


def median_interval(values: Sequence[float], deviations: Sequence[Floats], clusters: int) -> Estimate:
    """The median of `values` [K] (one per benchmark) from resampled deviations, K arrays [RESAMPLES]."""
    observed = np.array(values)
    return _interval(float(np.median(observed)), _drawn(observed, np.stack(deviations), 0), clusters, len(values))


def median_difference_interval(
    top: Sequence[float],
    top_deviations: Sequence[Floats],
    bottom: Sequence[float],
    bottom_deviations: Sequence[Floats],
    clusters: int,
) -> Estimate:
    """median(top) - median(bottom), two arms on the same K benchmarks, deviations drawn together.

    The two medians are drawn independently; then the spread of their difference is reduced by what the deviations,
    which share items and baseline, say about how the two medians move together. The interval also holds what a rerun
    of both arms would move the difference by: precise benchmarks shall not speak for the others.
    """
    a, b = np.array(top), np.array(bottom)
    up, down = np.stack(top_deviations), np.stack(bottom_deviations)
    apart = np.roll(down, RESAMPLES // 2, axis=1)  # the same draws, no longer together
    moved = _median(a, up) - _median(b, down)
    together, alone = float(np.std(moved)), float(np.std(_median(a, up) - _median(b, apart)))
    drawn = _drawn(a, up, 0) - _drawn(b, down, 1)
    middle = float(drawn.mean())
    drawn = middle + (drawn - middle) * (min(1.0, together / alone) if alone > 0 else 1.0)
    value = float(np.median(a) - np.median(b))
    found = _interval(value, drawn, clusters, len(a))
    low, high = np.quantile(moved - moved.mean(), [1 - LEVEL, LEVEL])
    assert found.low is not None
    assert found.high is not None
    return dataclasses.replace(found, low=min(found.low, value - float(high)), high=max(found.high, value - float(low)))


def _interval(value: float, drawn: Floats, clusters: int, benchmarks: int) -> Estimate:
    level = LEVEL if benchmarks <= AVERAGED else 1 - (1 - LEVEL) / benchmarks
    low, high = np.quantile(drawn, [1 - level, level])
    few = f"only {benchmarks} benchmark{'s' if benchmarks > 1 else ''}" if benchmarks <= 3 else ""
    method = "resampling within each benchmark, values that may be equal"
    return Estimate(value, min(value, float(low)), max(value, float(high)), benchmarks, clusters, method, few)


def _median(observed: Floats, draws: Floats) -> Floats:
    return np.asarray(np.median(observed[:, None] + draws, axis=0), dtype=np.float64)


def _drawn(observed: Floats, deviations: Floats, stream: int) -> Floats:
    """Medians [DRAWS] of true values drawn given observed values [K] and their deviations [K, RESAMPLES].

    Values of one group are equal. A group's value is N(median, spread^2) a priori, the spread three times that of the observed
    values about their median (MAD, so that a collapsed benchmark does not widen it) or the median error. Each draw takes the
    benchmarks in an order of its own and puts one into a group of n others with weight n + 1, or opens a group with `_opening`,
    times how well what the group holds predicts it. It counts for the product of the sums of these weights.
    """
    if (k := len(observed)) <= AVERAGED:
        return _median(observed, deviations)
    error = np.sqrt(np.maximum(deviations.var(axis=1), 1e-12))
    rng, row, opening = np.random.default_rng([SEED, k, stream]), np.arange(DRAWS), _opening(k)
    centre = float(np.median(observed))
    spread = 3 * max(np.median(np.abs(observed - centre)) / ndtri(0.75), np.median(error))
    precision = np.full((DRAWS, k), spread**-2)  # of each group's value, and times its mean
    total, count, group, weight = centre * precision, np.zeros((DRAWS, k), int), np.zeros((DRAWS, k), int), np.zeros(DRAWS)
    joining = np.concatenate([[-np.inf], np.log(np.arange(2, k + 2))])
    for one in rng.permuted(np.tile(np.arange(k), (DRAWS, 1)), axis=1).T:  # of each draw its next benchmark
        log, free = joining[count], np.count_nonzero(count, axis=1)
        log[row, free] = opening[free]
        variance = error[one, None] ** 2 + 1 / precision
        log += -0.5 * (observed[one, None] - total / precision) ** 2 / variance - 0.5 * np.log(variance)
        most = log.max(axis=1)
        chance = np.exp(log - most[:, None]).cumsum(axis=1)
        chosen = (chance < rng.random((DRAWS, 1)) * chance[:, -1:]).sum(axis=1)
        weight += most + np.log(chance[:, -1])
        group[row, one] = chosen
        count[row, chosen] += 1
        precision[row, chosen] += error[one] ** -2
        total[row, chosen] += error[one] ** -2 * observed[one]
    share = np.exp(weight - weight.max())
    kept = rng.choice(DRAWS, DRAWS, p=share / share.sum())
    level = (total / precision)[kept] + rng.standard_normal((DRAWS, k)) / np.sqrt(precision[kept])
    return np.asarray(np.median(np.take_along_axis(level, group[kept], axis=1), axis=1), dtype=np.float64)


def _opening(k: int) -> Floats:
    """Log weight, [K], of a new group beside t others: log V(t + 1) - log V(t) of Miller and Harrison, where the number of groups
    is as likely to be 1 as 2, ..., or K, and all sizes are."""
    groups = np.arange(1, k + 1)
    log = np.full(k + 2, -np.inf)
    for t in range(1, k + 1):
        able = groups[t - 1 :]
        terms = gammaln(able + 1) - gammaln(able - t + 1) - gammaln(able + k) + gammaln(able)
        log[t] = terms.max() + math.log(float(np.exp(terms - terms.max()).sum()))
    return np.asarray(np.concatenate([[0.0], log[2 : k + 1] - log[1:k]]), dtype=np.float64)
