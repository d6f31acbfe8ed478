"""Tests of paired scores: is there a difference, is it small enough, and how many items would tell.

No difference: exact McNemar (0/1 scores, one answer a cluster), which is the sign-flip test over clusters: under the
null hypothesis each cluster's total difference is as likely to have the other sign. In clusters of any size that test
stays exact where the scores are whole numbers; for other scores 9,999 random flips stand for all of them.

Small enough: an arm is non-inferior where the lower one-sided 95 % limit of its recovery lies above 1 - margin,
inferior where the upper one lies below it, else undecided. In clusters of several answers the limits are 97.5 % ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, ndtri

from harness.statistics.intervals import (
    LEVEL,
    MIN_DISCORDANT,
    Floats,
    Ints,
    cluster_count,
    cluster_totals,
    design_effect,
    is_binary,
    paired_ratio_interval,
    student_t,
    tango,
)

NON_INFERIORITY_LEVEL = 0.95
POWER = 0.8
FLIPS = 9_999
EXACT = 1e6  # of the differences' sum: the exact distribution has so many places
_SEED = 1947


def no_difference(difference: Floats, cluster: Ints) -> tuple[float, str]:
    """Two-sided p-value of paired differences [n] in clusters [n], and the name of the test."""
    totals = cluster_totals(difference, cluster)
    moved = totals[totals != 0]
    if np.abs(moved).sum() <= EXACT and (moved == np.rint(moved)).all():
        alone = len(totals) == len(difference) and (np.abs(moved) == 1).all()
        return _exact(np.rint(moved).astype(np.int64)), "exact McNemar" if alone else "exact sign-flip over clusters"
    signs = np.random.default_rng([_SEED, len(moved)])
    observed = abs(float(moved.sum()))
    hits = 0
    for start in range(0, FLIPS, 500):
        flips = signs.integers(0, 2, (min(500, FLIPS - start), len(moved)), dtype=np.int8)
        hits += int(np.count_nonzero(np.abs((2.0 * flips - 1.0) @ moved) >= observed * (1 - 1e-12)))
    return (1 + hits) / (1 + FLIPS), f"sign-flip over clusters, {FLIPS:,} flips"


def _exact(totals: Ints) -> float:
    """P(|sum of +-totals| >= |sum of totals|), by the distribution of the sum: one binomial for each absolute value."""
    distribution = np.ones(1)
    for size, count in zip(*np.unique(np.abs(totals), return_counts=True), strict=True):
        steps = np.zeros(2 * size * count + 1)
        steps[:: 2 * size] = _binomial(int(count))
        distribution = _convolved(distribution, steps)
    reach = len(distribution) // 2  # the sum runs from -reach to reach
    observed = abs(int(totals.sum()))
    if observed == 0:
        return 1.0
    return min(1.0, 2.0 * float(distribution[reach + observed :].sum()))


def _binomial(count: int) -> Floats:
    """Probabilities of 0..count heads of a fair coin."""
    k = np.arange(count + 1)
    log = gammaln(count + 1) - gammaln(k + 1) - gammaln(count - k + 1) - count * math.log(2)
    return np.asarray(np.exp(log), dtype=np.float64)


def _convolved(a: Floats, b: Floats) -> Floats:
    if min(len(a), len(b)) < 500:
        return np.asarray(np.convolve(a, b), dtype=np.float64)
    from scipy.signal import fftconvolve  # half a second that few comparisons need

    return np.asarray(np.maximum(fftconvolve(a, b), 0.0), dtype=np.float64)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values (Scandinavian Journal of Statistics 6, 1979, 65-70); None stays None and is not counted."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, i) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[i] = running
    return adjusted


def non_inferiority(top: Floats, bottom: Floats, cluster: Ints, margin: float) -> str:
    """non-inferior, inferior or undecided: mean(top) / mean(bottom) against 1 - margin; mean(bottom) > 0."""
    level = _limit_level(len(top), cluster)
    found = paired_ratio_interval(top, bottom, cluster, level=level)
    if found.low is None or found.high is None:
        return "undecided"
    low, high = found.low, found.high
    if np.count_nonzero(top != bottom) >= MIN_DISCORDANT and is_binary(top) and is_binary(bottom):
        # The t limits alone are wrong more often than 5 % where few items hold the differences (.08): the score
        # limits, which lean towards what was not seen, have to agree.
        score_low, score_high = _score_limits(top, bottom, cluster, level)
        low, high = min(low, score_low), max(high, score_high)
    return "non-inferior" if low > 1 - margin else "inferior" if high < 1 - margin else "undecided"


def _limit_level(items: int, cluster: Ints) -> float:
    """How sure a limit is. In clusters that hold several answers 95 % limits are wrong in 7-10 % of the runs, because
    few clusters hold the differences; 97.5 % limits are wrong in 5 %."""
    return NON_INFERIORITY_LEVEL if cluster_count(cluster) == items else LEVEL


def _score_limits(top: Floats, bottom: Floats, cluster: Ints, level: float) -> tuple[float, float]:
    """Tango's limits of the ratio, at n / design effect of the differences."""
    n, groups = len(top), cluster_count(cluster)
    effect = design_effect(top - bottom, cluster)
    quantile = float(ndtri(level)) if groups == n else student_t(groups, level)
    gained, lost = np.count_nonzero(top > bottom), np.count_nonzero(top < bottom)
    low, high = tango(gained / effect, lost / effect, n / effect, quantile)
    base = float(bottom.mean())
    return 1 + low / base, 1 + high / base


def items_needed(top: Floats, bottom: Floats, cluster: Ints, margin: float) -> int | None:
    """Items at which an arm that is truly as good would be found non-inferior with 80 % power; None for no margin, and
    where all items are of one cluster, which says nothing of others.

    The variance is that of the paired difference here. Where few items differ it is itself uncertain: then one more is
    assumed to differ, and never fewer are asked for than Tango's limit needs where none does.
    """
    loss = margin * abs(float(bottom.mean()))
    if not loss > 0 or (cluster_count(cluster) < 2 <= len(top)):
        return None
    difference = top - bottom
    variance = float(difference.var()) * design_effect(difference, cluster)
    if np.count_nonzero(difference) < MIN_DISCORDANT:
        variance = max(variance, float(np.abs(difference).max(initial=0.0) or 1.0) / len(difference))
    level = _limit_level(len(top), cluster)
    return max(items_to_decide(variance, loss, level), math.ceil(float(ndtri(level)) ** 2 * (1 / loss - 1)))


def items_to_decide(variance: float, loss: float, level: float = NON_INFERIORITY_LEVEL) -> int:
    """Items at which a limit of this level excludes a loss of `loss` per item with 80 % power where there is none.

    variance: of one item's paired difference; the share of differing items, for 0/1 scores.
    """
    quantiles = float(ndtri(level) + ndtri(POWER))
    return math.ceil(quantiles**2 * variance / loss**2)
