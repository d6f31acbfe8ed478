"""95 % intervals of scores and of paired ratios and differences, over clustered items. numpy and two scipy special
functions; no torch.

Items of one cluster (a source document, a template, several answers to one question) are not independent, so every
variance here is taken between cluster totals. Which interval is used where (what each covers in simulation:
tests/harness/test_coverage.py and, larger, tests/bench/coverage.py):

- a mean of 0/1 scores: Wilson's score interval at n / design effect; other scores: cluster-robust t.
- a ratio or difference of two paired means, at least MIN_DISCORDANT items differ: delta method with cluster-robust
  variance and Student's t on (clusters - 1) degrees of freedom.
- the same with fewer differing items, 0/1 scores: Tango's score interval of the difference (Statistics in Medicine
  17, 1998, 891-908) at n / design effect, for a ratio divided by the baseline. Bootstrap and delta method are too
  short here (.67-.94 at n = 30 and 100). In clusters this one covers .99 or more: wide, on purpose. Scores that are
  not 0/1 have no such interval: None.

Ratios of sums: harness.statistics.resampling. Medians over benchmarks: harness.statistics.medians.
Randomness, there and nowhere here, is seeded from the arguments alone: the same data give the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from harness.records.comparison import Estimate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVEL = 0.975
Z = 1.959963984540054  # normal quantile at LEVEL
MIN_DISCORDANT = 10
FEW_CLUSTERS = 10


def cluster_index(labels: Sequence[str]) -> Ints:
    """Number the clusters 0..G-1 in the order of their sorted names -> int64 [len(labels)]."""
    number = {name: i for i, name in enumerate(sorted(set(labels)))}
    return np.array([number[name] for name in labels], dtype=np.int64)


def mean_interval(scores: Floats, cluster: Ints) -> Estimate:
    """The mean of `scores` [n] in clusters `cluster` [n]."""
    groups, n = cluster_count(cluster), len(scores)
    mean = float(scores.mean())
    if groups < 2:
        return Estimate(mean, None, None, n, groups, "none", "one cluster: no interval")
    t = student_t(groups)
    if not is_binary(scores):
        half = t * math.sqrt(_cluster_variance(scores - mean, cluster)) / n
        return estimate(mean, mean - half, mean + half, n, groups, "cluster-robust t", few_clusters(groups))
    # A score of 0 or 1 shows nothing of the clustering: then a cluster counts as one item.
    effect = design_effect(scores, cluster) if 0 < mean < 1 else n / groups
    size = n / effect
    middle = (mean + t * t / (2 * size)) / (1 + t * t / size)
    half = t / (1 + t * t / size) * math.sqrt(mean * (1 - mean) / size + t * t / (4 * size * size))
    method = "Wilson" if effect == 1 else f"Wilson, design effect {effect:.2f}"
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half), n, groups, method, few_clusters(groups))


def paired_ratio_interval(top: Floats, bottom: Floats, cluster: Ints, chance: float = 0.0, level: float = LEVEL) -> Estimate:
    """(mean(top) - chance) / (mean(bottom) - chance), scores of the same items [n]; bottom above chance.

    level: how sure each of the two limits is, 0.975 for a 95 % interval.
    """
    base = float(bottom.mean()) - chance
    ratio = (float(top.mean()) - chance) / base
    found = _paired_interval(top - chance - ratio * (bottom - chance), top, bottom, cluster, level)
    middle, floor = ratio, -math.inf
    if _differing(top, bottom) < MIN_DISCORDANT:  # limits of the difference
        middle, floor = 1.0, -chance / base  # a score of 0
    low, high = (None if end is None else middle + end / base for end in (found.low, found.high))
    return dataclasses.replace(found, value=ratio, low=None if low is None else max(floor, low), high=high)


def paired_difference_interval(top: Floats, bottom: Floats, cluster: Ints) -> Estimate:
    """mean(top) - mean(bottom), scores of the same items [n]."""
    difference = float(top.mean()) - float(bottom.mean())
    found = _paired_interval(top - bottom - difference, top, bottom, cluster, LEVEL)
    middle = 0.0 if _differing(top, bottom) < MIN_DISCORDANT else difference
    low, high = (None if end is None else middle + end for end in (found.low, found.high))
    return dataclasses.replace(found, value=difference, low=low, high=high)


def _paired_interval(residuals: Floats, top: Floats, bottom: Floats, cluster: Ints, level: float) -> Estimate:
    """-+ the half-width of the mean of `residuals` [n] (mean 0); with few differing items Tango's limits of the
    difference of the means, or none. Without its value."""
    groups, n = cluster_count(cluster), len(top)
    if groups < 2:
        return Estimate(math.nan, None, None, n, groups, "none", "inconclusive: one cluster")
    if _differing(top, bottom) < MIN_DISCORDANT:
        return _few_discordant(top, bottom, cluster, level)
    half = student_t(groups, level) * math.sqrt(_cluster_variance(residuals, cluster)) / n
    return estimate(math.nan, -half, half, n, groups, "paired, cluster-robust t", few_clusters(groups))


def _differing(top: Floats, bottom: Floats) -> int:
    return int(np.count_nonzero(top != bottom))


def _few_discordant(top: Floats, bottom: Floats, cluster: Ints, level: float) -> Estimate:
    groups, n = cluster_count(cluster), len(top)
    differing = _differing(top, bottom)
    note = f"only {differing} of {n} items differ"
    if not (is_binary(top) and is_binary(bottom)):
        return Estimate(math.nan, None, None, n, groups, "none", f"inconclusive: {note}")
    effect = 1.0
    if groups < n:
        # Few flips say little about how flips cluster; how correctness clusters is an upper guide to it.
        mean = float(bottom.mean())
        effect = design_effect(bottom, cluster) if 0 < mean < 1 else n / groups
        if differing:
            effect = max(effect, design_effect(top - bottom, cluster))
    gained = float(np.count_nonzero(top > bottom))
    lost = float(np.count_nonzero(top < bottom))
    quantile = float(ndtri(level)) if groups == n else student_t(groups, level)
    low, high = tango(gained / effect, lost / effect, n / effect, quantile)
    method = "Tango score" if effect == 1 else f"Tango score, design effect {effect:.2f}"
    return Estimate(math.nan, low, high, n, groups, method, note)


def tango(gained: float, lost: float, n: float, quantile: float = Z) -> tuple[float, float]:
    """Score interval of the difference of two paired shares, (gained - lost) / n; counts may be fractional.

    Inverts T(D) = (gained - lost - nD) / sqrt(n (2 p(D) + D (1 - D))), where p(D) is the share of lost items that is
    likeliest under difference D, by bisection (Tango 1998, equations 7-9).
    """
    estimate = (gained - lost) / n

    def statistic(d: float) -> float:
        b = -gained - lost + (2 * n - gained + lost) * d
        c = -lost * d * (1 - d)
        share = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
        variance = n * (2 * share + d * (1 - d))
        top = gained - lost - n * d
        return top / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, top) if top else 0.0

    def solve(inside: float, outside: float) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            if abs(statistic(middle)) <= quantile:
                inside = middle
            else:
                outside = middle
        return inside

    return solve(estimate, -1.0), solve(estimate, 1.0)


def design_effect(values: Floats, cluster: Ints) -> float:
    """Variance of the mean with clusters over its variance without, at least 1; 1 where no cluster has two items.

    A single cluster says nothing of how clusters differ: its items count as one.
    """
    if cluster_count(cluster) < 2:
        return float(max(1, len(values)))
    deviation = values - values.mean()
    spread = float((deviation**2).sum())
    if cluster_count(cluster) == len(values) or spread == 0:
        return 1.0
    return max(1.0, _cluster_variance(deviation, cluster) / spread)


def log_ratio_t(top: Sequence[float], bottom: Sequence[float]) -> Estimate:
    """Geometric mean of top[i] / bottom[i] over paired repeats: t on the log ratios."""
    n, logs = len(top), np.log(np.array(top) / np.array(bottom))
    mean = float(logs.mean())
    if n < 2:
        return Estimate(math.exp(mean), None, None, n, n, "none", "one repeat: no interval")
    half = student_t(n) * float(logs.std(ddof=1)) / math.sqrt(n)
    note = f"only {n} repeats" if n < 5 else ""
    method = "t on log ratios of paired repeats"
    return estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n, n, method, note)


def is_binary(scores: Floats) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def cluster_count(cluster: Ints) -> int:
    """Number of clusters of an index made by `cluster_index`."""
    return int(cluster.max()) + 1 if len(cluster) else 0


def cluster_totals(values: Floats, cluster: Ints) -> Floats:
    """Sums of `values` [n] over clusters -> float64 [G]."""
    return np.bincount(cluster, weights=values, minlength=cluster_count(cluster)).astype(np.float64)


def _cluster_variance(residuals: Floats, cluster: Ints) -> float:
    """Variance of the sum of residuals (mean 0) when clusters are the independent units."""
    groups = cluster_count(cluster)
    return float((cluster_totals(residuals, cluster) ** 2).sum()) * groups / (groups - 1)


def student_t(groups: int, level: float = LEVEL) -> float:
    """Quantile of Student's t on groups - 1 degrees of freedom."""
    return float(stdtrit(groups - 1, level))


def few_clusters(groups: int) -> str:
    """The remark that goes with an interval from few clusters, "" for enough."""
    return f"only {groups} clusters" if groups < FEW_CLUSTERS else ""


def renumbered(cluster: Ints) -> Ints:
    """Clusters 0..G-1 of what is left of some."""
    return np.unique(cluster, return_inverse=True)[1].astype(np.int64)


def estimate(value: float, low: float, high: float, n: int, clusters: int, method: str, note: str = "") -> Estimate:
    """Limits that are not finite are no limits."""
    known = math.isfinite(low) and math.isfinite(high)
    return Estimate(value, low if known else None, high if known else None, n, clusters, method, note)
