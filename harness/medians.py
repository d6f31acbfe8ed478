"""Median recovery over benchmarks, and the difference of two such medians, with intervals.

Resampling around the observed recoveries counts their noise twice where benchmarks are alike and keeps the bias of an order
statistic where they fall into groups (the median of six equal values below five lower ones is the smallest of six noisy ones:
it covers .1-.6). So the true values get a model that allows ties: benchmarks fall into an unknown number of groups of equal
value, any number and any sizes as likely a priori, with every grouping and every value weighed by how well it explains the
recoveries and their errors (a mixture of finite mixtures: Miller and Harrison, Journal of the American Statistical
Association 113, 2018, 340-356), sampled by Gibbs chains. The interval holds the middle 99.4 % of the medians drawn from it,
since which group holds the middle one cannot be seen where groups are two or three errors apart; two benchmarks have a mean.

Coverage in simulation (tests/bench/coverage.py, 60-100 suites each), 11 benchmarks: of equal errors, alike or scattered 1.00, in
groups two, three and five errors apart .98, .92-.96 and .97; of errors that differ tenfold, alike 1.00, scattered .97-1.00, in
groups .95-1.00. Too wide where benchmarks are alike is the price of groups that cannot be told from them. The difference of two
medians, of arms whose errors correlate by half, covers 1.00 where the arms lose alike; where they do not, .92-1.00.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln

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

AVERAGED = 2  # benchmarks: their median is a mean, which noise does not move to one side
CREDIBLE = 0.997  # of each limit, over more benchmarks
CHAINS, BURNED, KEPT = 400, 12, 10  # chains side by side, and their sweeps


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
    level = LEVEL if benchmarks <= AVERAGED else CREDIBLE
    low, high = np.quantile(drawn, [1 - level, level])
    few = f"only {benchmarks} benchmark{'s' if benchmarks > 1 else ''}" if benchmarks <= 3 else ""
    method = "resampling within each benchmark, values that may be equal"
    return Interval(min(value, float(low)), max(value, float(high)), clusters, method, few)


def _median(observed: Floats, draws: Floats) -> Floats:
    return np.asarray(np.median(observed[:, None] + draws, axis=0), dtype=np.float64)


def _medians(observed: Floats, draws: Floats, stream: int) -> Floats:
    """Medians of true values drawn given observed values [K] and their deviations [K, RESAMPLES]."""
    if len(observed) <= AVERAGED:
        return _median(observed, draws)
    error = np.sqrt(np.maximum(draws.var(axis=1), 1e-12))
    chains = _Chains(observed, error, np.random.default_rng([SEED, len(observed), stream]))
    for _ in range(BURNED):
        chains.sweep()
    kept = []
    for _ in range(KEPT):
        chains.sweep()
        kept.append(np.median(chains.values, axis=1))
    return np.concatenate(kept)


class _Chains:
    """CHAINS Gibbs samplers side by side of the true values behind `observed` [K] of known errors [K].

    Values of one group are equal. A group's value is N(weighted mean, (3 spreads of the observed)^2) a priori. A benchmark joins
    a group of n others with weight n + 1, times how well the group's value explains it, or opens one with `_opening`. Chains are
    rows: group of each benchmark, value and size of each group, all [CHAINS, K].
    """

    def __init__(self, observed: Floats, error: Floats, rng: np.random.Generator) -> None:
        k = len(observed)
        self.observed, self.error, self.rng = observed, error, rng
        weight = 1 / error**2
        self.centre = float((weight * observed).sum() / weight.sum())
        self.spread = 3 * math.sqrt(max(float(observed.var()), float((error**2).mean())))
        self.row = np.arange(CHAINS)
        # Half of the chains begin with every benchmark in a group of its own, half with all in one.
        self.group = np.where(self.row[:, None] % 2, np.arange(k), 0)
        self.level = np.where(self.row[:, None] % 2, observed, self.centre)
        self.count = (self.group[:, :, None] == np.arange(k)).sum(axis=1).astype(np.float64)
        self.opening = _opening(k)

    @property
    def values(self) -> Floats:
        """[CHAINS, K]"""
        return np.take_along_axis(self.level, self.group, axis=1)

    def sweep(self) -> None:
        """Every benchmark chooses its group anew, then every group its value."""
        for k in range(len(self.observed)):
            self._choose(k)
        member = self.group[:, :, None] == np.arange(len(self.observed))
        weight = 1 / self.error**2
        precision = (member * weight[:, None]).sum(axis=1) + self.spread**-2
        mean = ((member * (weight * self.observed)[:, None]).sum(axis=1) + self.centre * self.spread**-2) / precision
        self.level = mean + self.rng.standard_normal(mean.shape) / np.sqrt(precision)

    def _choose(self, k: int) -> None:
        row, rng, x, error = self.row, self.rng, self.observed[k], self.error[k]
        self.count[row, self.group[:, k]] -= 1
        taken = self.count > 0
        log = np.where(taken, np.log(self.count + 1) - 0.5 * ((x - self.level) / error) ** 2 - math.log(error), -np.inf)
        free = taken.argmin(axis=1)
        wide = math.hypot(error, self.spread)
        log[row, free] = self.opening[taken.sum(axis=1)] - 0.5 * ((x - self.centre) / wide) ** 2 - math.log(wide)
        chance = np.exp(log - log.max(axis=1, keepdims=True)).cumsum(axis=1)
        chosen = (chance < (rng.random(CHAINS) * chance[:, -1])[:, None]).sum(axis=1)
        precision = error**-2 + self.spread**-2
        fresh = (x * error**-2 + self.centre * self.spread**-2) / precision
        fresh = fresh + rng.standard_normal(CHAINS) / math.sqrt(precision)
        self.level[row, chosen] = np.where(chosen == free, fresh, self.level[row, chosen])
        self.group[:, k] = chosen
        self.count[row, chosen] += 1


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
