"""95 % intervals of scores, paired ratios, ratios of sums and medians, over clustered items. numpy and two scipy
special functions; no torch.

Items of one cluster (a source document, a template, a text sequence) are not independent, so every variance here is
taken between cluster totals. Which interval is used where, and what it covers in simulation
(tests/harness/test_intervals.py holds the small version):

- a mean of 0/1 scores: Wilson's score interval at n / design effect; other scores: cluster-robust t.
- a ratio of two paired means, at least MIN_DISCORDANT items differ: delta method with cluster-robust variance and
  Student's t on (clusters - 1) degrees of freedom. Covers .94-.97 at n = 30 to 1,000, alone and in clusters of 10.
- the same with fewer differing items, 0/1 scores: Tango's score interval of the difference (Statistics in Medicine
  17, 1998, 891-908) at n / design effect, divided by the baseline. Bootstrap and delta method are too short here
  (.67-.94 at n = 30 and 100). Settings in which nearly all draws have few differing items cover .94-1.0 with this
  one, .99 or more in clusters of 10: wide, on purpose. Scores that are not 0/1 have no such interval: None.
- a ratio of sums over sequences (KL per token and the like): cluster bootstrap, studentised, on the log scale where
  the ratio is positive. At 24 sequences whose KL varies by a factor of two (log-sd .7) it covers .935 where the
  percentile bootstrap covers .90; at a log-sd of .3, .95; at 1.1 only .92. With 8 sequences it covers .88-.94.
- a median over benchmarks: within-benchmark resampling around shrunken recoveries, see `median_interval`.

All randomness is seeded from the arguments alone: the same data give the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVEL = 0.975
Z = 1.959963984540054  # normal quantile at LEVEL
RESAMPLES = 4000
MIN_DISCORDANT = 10
FEW_CLUSTERS = 10
_SEED = 20_25
_CHUNK = 1 << 21  # indices drawn at a time


@dataclasses.dataclass(frozen=True)
class Interval:
    """low/high None: no honest interval exists, `note` says why. clusters: groups behind it."""

    low: float | None
    high: float | None
    clusters: int
    method: str
    note: str = ""


def cluster_index(labels: Sequence[str]) -> Ints:
    """Number the clusters 0..G-1 in the order of their sorted names -> int64 [len(labels)]."""
    number = {name: i for i, name in enumerate(sorted(set(labels)))}
    return np.array([number[name] for name in labels], dtype=np.int64)


def mean_interval(scores: Floats, cluster: Ints) -> Interval:
    """Interval of the mean of `scores` [n] in clusters `cluster` [n]."""
    groups = _count(cluster)
    if groups < 2:
        return Interval(None, None, groups, "none", "one cluster: no interval")
    mean, n = float(scores.mean()), len(scores)
    t = _t(groups)
    if not is_binary(scores):
        half = t * math.sqrt(_cluster_variance(scores - mean, cluster)) / n
        return Interval(mean - half, mean + half, groups, "cluster-robust t", _few(groups))
    # A score of 0 or 1 shows nothing of the clustering: then a cluster counts as one item.
    effect = design_effect(scores, cluster) if 0 < mean < 1 else n / groups
    size = n / effect
    middle = (mean + t * t / (2 * size)) / (1 + t * t / size)
    half = t / (1 + t * t / size) * math.sqrt(mean * (1 - mean) / size + t * t / (4 * size * size))
    method = "Wilson" if effect == 1 else f"Wilson, design effect {effect:.2f}"
    return Interval(max(0.0, middle - half), min(1.0, middle + half), groups, method, _few(groups))


def paired_ratio_interval(top: Floats, bottom: Floats, cluster: Ints, chance: float = 0.0) -> Interval:
    """Interval of (mean(top) - chance) / (mean(bottom) - chance), scores of the same items [n]; bottom above chance."""
    groups = _count(cluster)
    if groups < 2:
        return Interval(None, None, groups, "none", "inconclusive: one cluster")
    differing = int(np.count_nonzero(top != bottom))
    if differing < MIN_DISCORDANT:
        return _few_discordant(top, bottom, cluster, chance)
    base = float(bottom.mean()) - chance
    ratio = (float(top.mean()) - chance) / base
    residuals = top - chance - ratio * (bottom - chance)
    half = _t(groups) * math.sqrt(_cluster_variance(residuals, cluster)) / (base * len(top))
    return Interval(ratio - half, ratio + half, groups, "paired, cluster-robust t", _few(groups))


def _few_discordant(top: Floats, bottom: Floats, cluster: Ints, chance: float) -> Interval:
    groups, n = _count(cluster), len(top)
    differing = int(np.count_nonzero(top != bottom))
    note = f"only {differing} of {n} items differ"
    if not (is_binary(top) and is_binary(bottom)):
        return Interval(None, None, groups, "none", f"inconclusive: {note}")
    effect = 1.0
    if groups < n:
        # Few flips say little about how flips cluster; how correctness clusters is an upper guide to it.
        mean = float(bottom.mean())
        effect = design_effect(bottom, cluster) if 0 < mean < 1 else n / groups
        if differing:
            effect = max(effect, design_effect(top - bottom, cluster))
    gained = float(np.count_nonzero(top > bottom))
    lost = float(np.count_nonzero(top < bottom))
    quantile = Z if groups == n else _t(groups)
    low, high = tango(gained / effect, lost / effect, n / effect, quantile)
    base = float(bottom.mean()) - chance
    method = "Tango score" if effect == 1 else f"Tango score, design effect {effect:.2f}"
    floor = -chance / base  # a score of 0
    return Interval(max(floor, 1 + low / base), 1 + high / base, groups, method, note)


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
    """Variance of the mean with clusters over its variance without, at least 1; 1 where no cluster has two items."""
    deviation = values - values.mean()
    spread = float((deviation**2).sum())
    if _count(cluster) == len(values) or spread == 0:
        return 1.0
    return max(1.0, _cluster_variance(deviation, cluster) / spread)


def ratio_of_sums(top: Floats, bottom: Floats, cluster: Ints, *, log: bool) -> Interval:
    """Interval of sum(top) / sum(bottom) over sequences [n] in clusters: studentised cluster bootstrap.

    bottom must be positive. log: work on the log of the ratio; only where every top is positive too.
    """
    groups = _count(cluster)
    if groups < 2:
        return Interval(None, None, groups, "none", "one cluster: no interval")
    totals = np.stack([_totals(top, cluster), _totals(bottom, cluster)], axis=1)
    ratio, error = _ratio_and_error(totals.sum(0)[None], _squares(totals)[None], groups)
    value, spread = float(ratio[0]), float(error[0])
    if spread <= 1e-12 * max(1.0, abs(value)):
        return Interval(value, value, groups, "none needed", "every cluster gives the same value")
    products = np.stack([totals[:, 0] ** 2, totals[:, 0] * totals[:, 1], totals[:, 1] ** 2], axis=1)
    sums = resampled_sums(np.concatenate([totals, products], axis=1), stream=0)
    drawn, errors = _ratio_and_error(sums[:, :2], sums[:, 2:], groups)
    # A resample of near-identical clusters has no error of its own; the smallest sensible one keeps it finite.
    errors = np.maximum(errors, 0.05 * spread)
    if log:
        pivot = np.log(drawn / value) / (errors / drawn)
        low, high = np.quantile(pivot, [1 - LEVEL, LEVEL])
        ends = value * math.exp(-high * spread / value), value * math.exp(-low * spread / value)
    else:
        low, high = np.quantile((drawn - value) / errors, [1 - LEVEL, LEVEL])
        ends = value - high * spread, value - low * spread
    method = f"studentised cluster bootstrap, {RESAMPLES} resamples"
    return Interval(float(ends[0]), float(ends[1]), groups, method, _few(groups))


def _ratio_and_error(sums: Floats, squares: Floats, groups: int) -> tuple[Floats, Floats]:
    """sums [B, 2] of (top, bottom), squares [B, 3] of (top^2, top bottom, bottom^2) -> ratio and its error [B]."""
    ratio = sums[:, 0] / sums[:, 1]
    residual = squares[:, 0] - 2 * ratio * squares[:, 1] + ratio**2 * squares[:, 2]
    return ratio, np.sqrt(np.maximum(residual, 0) * groups / (groups - 1)) / np.abs(sums[:, 1])


def _squares(totals: Floats) -> Floats:
    return np.array([(totals[:, 0] ** 2).sum(), (totals[:, 0] * totals[:, 1]).sum(), (totals[:, 1] ** 2).sum()])


def resampled_sums(values: Floats, stream: int) -> Floats:
    """Sums over resampled rows: values [G, C] -> [RESAMPLES, C], rows drawn with replacement, G at a time."""
    groups = len(values)
    rng = np.random.default_rng([_SEED, stream, groups])
    out = np.empty((RESAMPLES, values.shape[1]))
    step = max(1, _CHUNK // groups)
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        drawn = rng.integers(0, groups, (rows, groups)) + groups * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups)
        out[start : start + rows] = counts.astype(np.float64) @ values
    return out


def paired_ratio_deviations(top: Floats, bottom: Floats, cluster: Ints, stream: int) -> Floats | None:
    """Resampled ratio minus the observed one [RESAMPLES], for `median_interval`; None where it has no interval.

    With enough differing items: cluster bootstrap, widened to what Student's t gives at this number of clusters.
    With few: two half-normals of the score interval's two widths, because resampling would show no spread at all.
    stream: number of the benchmark, so that benchmarks are resampled independently.
    """
    interval = paired_ratio_interval(top, bottom, cluster)
    if interval.low is None or interval.high is None:
        return None
    ratio = float(top.mean() / bottom.mean())
    if np.count_nonzero(top != bottom) < MIN_DISCORDANT:
        draws = np.random.default_rng([_SEED, stream]).standard_normal(RESAMPLES) / Z
        return np.where(draws > 0, draws * (interval.high - ratio), draws * (ratio - interval.low))
    groups = interval.clusters
    sums = resampled_sums(np.stack([_totals(top, cluster), _totals(bottom, cluster)], axis=1), stream)
    kept = sums[:, 1] > 0
    drawn = np.where(kept, sums[:, 0] / np.where(kept, sums[:, 1], 1.0), ratio)
    widen = _t(groups) / Z * math.sqrt(groups / (groups - 1))
    return np.asarray((drawn - ratio) * widen, dtype=np.float64)


def median_interval(values: Sequence[float], deviations: Sequence[Floats], clusters: int) -> Interval:
    """Interval of the median of `values` [K] (one per benchmark) from resampled deviations, K arrays [RESAMPLES].

    Resampling around the observed values counts their noise twice and covers .99 where the true values are alike.
    So the values are first shrunk towards their weighted mean by the share of their spread that noise explains
    (between-benchmark variance of DerSimonian and Laird, Controlled Clinical Trials 7, 1986, 177-188). With that it
    covers .93-.97 for 3, 5 and 11 benchmarks whose true values scatter normally with a standard deviation of 0 to 10
    points. It is no guarantee: true values in tight groups far apart (steps of 10 or 20 points) gave .75-.85 at 11
    benchmarks, and one collapsed benchmark beside noisy ones .84-.88 at 3 and 4.
    """
    observed = np.array(values)
    draws = np.stack(deviations)
    few = f"only {len(values)} benchmark{'s' if len(values) > 1 else ''}" if len(values) <= 3 else ""
    variance = np.maximum(draws.var(axis=1), 1e-12)
    weight = 1 / variance
    mean = float((weight * observed).sum() / weight.sum())
    excess = float((weight * (observed - mean) ** 2).sum()) - (len(values) - 1)
    scale = float(weight.sum() - (weight**2).sum() / weight.sum())
    between = max(0.0, excess / scale) if scale > 0 else 0.0
    centre = mean + (observed - mean) * between / (between + variance)
    low, high = np.quantile(np.median(centre[:, None] + draws, axis=0) - np.median(centre), [1 - LEVEL, LEVEL])
    median = float(np.median(observed))
    return Interval(median + float(low), median + float(high), clusters, "resampling within each benchmark", few)


def log_ratio_t(top: Sequence[float], bottom: Sequence[float]) -> Interval:
    """Interval of the geometric mean of top[i] / bottom[i] over paired repeats: t on the log ratios."""
    n = len(top)
    if n < 2:
        return Interval(None, None, n, "none", "one repeat: no interval")
    logs = np.log(np.array(top) / np.array(bottom))
    half = _t(n) * float(logs.std(ddof=1)) / math.sqrt(n)
    mean = float(logs.mean())
    note = f"only {n} repeats" if n < 5 else ""
    return Interval(math.exp(mean - half), math.exp(mean + half), n, "t on log ratios of paired repeats", note)


def is_binary(scores: Floats) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def _count(cluster: Ints) -> int:
    return int(cluster.max()) + 1 if len(cluster) else 0


def _totals(values: Floats, cluster: Ints) -> Floats:
    return np.bincount(cluster, weights=values, minlength=_count(cluster)).astype(np.float64)


def _cluster_variance(residuals: Floats, cluster: Ints) -> float:
    """Variance of the sum of residuals (mean 0) when clusters are the independent units."""
    groups = _count(cluster)
    return float((_totals(residuals, cluster) ** 2).sum()) * groups / (groups - 1)


def _t(groups: int) -> float:
    return float(stdtrit(groups - 1, LEVEL))


def _few(groups: int) -> str:
    return f"only {groups} clusters" if groups < FEW_CLUSTERS else ""
