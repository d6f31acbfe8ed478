"""Intervals against published examples, closed forms, and their coverage in simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from harness.statistics import intervals, medians, resampling
from harness.statistics.intervals import Floats, Ints


@pytest.mark.parametrize(
    ("gained", "lost", "n", "low", "high"),
    [
        # Fagerland, Lydersen, Laake, Statistics in Medicine 33 (2014), airway hyper-responsiveness: 1 and 7 of 21.
        (1, 7, 21, -0.517, -0.026),
        # No item differs: the limits are +-z^2 / (n + z^2).
        (0, 0, 30, -3.8415 / 33.8415, 3.8415 / 33.8415),
        (0, 0, 1000, -3.8415 / 1003.8415, 3.8415 / 1003.8415),
    ],
)
def test_tango_published(gained: int, lost: int, n: int, low: float, high: float) -> None:
    assert intervals.tango(gained, lost, n) == pytest.approx((low, high), abs=5e-4)


def test_tango_inverts_its_score_test() -> None:
    """At the limits the constrained likelihood, maximised numerically, gives a score statistic of exactly z."""
    gained, lost, n = 3, 9, 80
    for limit in intervals.tango(gained, lost, n):
        lost_share = np.linspace(max(0.0, -limit) + 1e-9, (1 - limit) / 2 - 1e-9, 2_000_001)
        gained_share = lost_share + limit
        rest = 1 - lost_share - gained_share
        likelihood = gained * np.log(gained_share) + lost * np.log(lost_share) + (n - gained - lost) * np.log(rest)
        best = float(lost_share[np.argmax(likelihood)])
        statistic = (gained - lost - n * limit) / math.sqrt(n * (2 * best + limit - limit**2))
        assert abs(statistic) == pytest.approx(intervals.Z, abs=1e-4)


def test_tango_swaps_with_the_arms() -> None:
    low, high = intervals.tango(2, 6, 50)
    assert intervals.tango(6, 2, 50) == pytest.approx((-high, -low))


def test_wilson_of_independent_items() -> None:
    """Wilson's textbook interval, at Student's t of n - 1."""
    scores = np.array([1.0] * 81 + [0.0] * 19)
    found = intervals.mean_interval(scores, np.arange(100))
    t, p, n = 1.98421695, 0.81, 100
    middle = (p + t * t / 2 / n) / (1 + t * t / n)
    half = t / (1 + t * t / n) * math.sqrt(p * (1 - p) / n + t * t / 4 / n / n)
    assert (found.low, found.high) == pytest.approx((middle - half, middle + half), abs=1e-8)


def test_all_right_is_not_certainty() -> None:
    """100 of 100 right: no zero width; 10 templates of 10 items say less than 100 items."""
    ones = np.ones(100)
    alone = intervals.mean_interval(ones, np.arange(100))
    grouped = intervals.mean_interval(ones, np.arange(100) // 10)
    assert alone.low is not None
    assert grouped.low is not None
    assert grouped.low < alone.low < 0.97
    assert alone.high == 1.0


def test_design_effect() -> None:
    """Items of one cluster that all agree count once (times G / (G - 1)); independent items count each."""
    scores = np.repeat(np.array([0.0, 1.0] * 10), 5)
    assert intervals.design_effect(scores, np.arange(100) // 5) == pytest.approx(5 * 20 / 19)
    assert intervals.design_effect(scores, np.arange(100)) == 1.0


def test_few_discordant_items_are_never_certain() -> None:
    """Nothing differs: a bootstrap would say 100 % (100-100)."""
    base = np.array([1.0] * 80 + [0.0] * 20)
    found = intervals.paired_ratio_interval(base, base, np.arange(100))
    assert found.low == pytest.approx(1 - 3.8415 / 103.8415 / 0.8, abs=1e-4)
    assert found.note == "only 0 of 100 items differ"


def test_few_discordant_scores_that_are_not_binary() -> None:
    base = np.linspace(0.1, 0.9, 50)
    other = base.copy()
    other[:3] += 0.05
    found = intervals.paired_ratio_interval(other, base, np.arange(50))
    assert (found.low, found.high) == (None, None)
    assert found.note == "inconclusive: only 3 of 50 items differ"


def test_one_cluster_has_no_interval() -> None:
    base = np.array([1.0, 0.0] * 20)
    assert intervals.paired_ratio_interval(1 - base, base, np.zeros(40, dtype=np.int64)).low is None
    assert intervals.mean_interval(base, np.zeros(40, dtype=np.int64)).low is None
    assert resampling.ratio_of_sums(base, base + 1, np.zeros(40, dtype=np.int64), log=False).low is None


def test_same_data_same_bits() -> None:
    rng = np.random.default_rng(0)
    top, bottom, cluster = rng.random(60), rng.random(60) + 1, np.arange(60) // 3
    assert resampling.ratio_of_sums(top, bottom, cluster, log=True) == resampling.ratio_of_sums(
        top.copy(), bottom.copy(), cluster.copy(), log=True
    )


def test_resampled_sums_are_of_whole_rows() -> None:
    """Every resample takes G rows, also across chunks; columns stay together."""
    sums = resampling.resampled_sums(np.stack([np.ones(3000), np.full(3000, 2.0)], axis=1), stream=1)
    assert sums.shape == (resampling.RESAMPLES, 2)
    assert (sums == [3000.0, 6000.0]).all()


def test_equal_clusters_need_no_resampling() -> None:
    found = resampling.ratio_of_sums(np.zeros(10), np.arange(1.0, 11.0), np.arange(10), log=False)
    assert (found.low, found.high) == (0.0, 0.0)


def test_log_ratio_t() -> None:
    found = intervals.log_ratio_t([20.0, 22.0, 21.0], [10.0, 10.0, 10.0])
    logs = np.log([2.0, 2.2, 2.1])
    half = 4.30265273 * logs.std(ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((math.exp(logs.mean() - half), math.exp(logs.mean() + half)))
    assert found.note == "only 3 repeats"
    assert intervals.log_ratio_t([2.0], [1.0]).low is None


# --- coverage ------------------------------------------------------------------------------------


def _draw(rng: np.random.Generator, n: int, size: int, right: float, noise: float) -> tuple[Floats, Floats, Ints]:
    """Answers of two arms whose margins differ by `noise`; items of a cluster share 30 % of the variance."""
    cluster = np.arange(n) // size
    share = 0.3 if size > 1 else 0.0

    def normal() -> Floats:
        common = rng.standard_normal(n // size)[cluster]
        return math.sqrt(share) * common + math.sqrt(1 - share) * rng.standard_normal(n)

    margin = normal() + ndtri(right)
    moved = margin + noise * normal() - noise / 3
    return (moved > 0).astype(np.float64), (margin > 0).astype(np.float64), cluster


@pytest.mark.parametrize(
    ("n", "size", "right", "noise"),
    [
        (30, 1, 0.55, 1.0),  # 8 discordant items expected
        (30, 1, 0.55, 1.6),  # 10
        (100, 1, 0.55, 0.35),  # 11
        (100, 1, 0.9, 0.05),  # 1: a bootstrap covers .5 here
        (100, 10, 0.55, 1.0),  # 26 in 10 clusters
        (300, 10, 0.9, 0.3),  # 15
        (1000, 1, 0.9, 0.3),  # 50
        (1000, 10, 0.55, 0.3),  # 98
    ],
)
def test_recovery_interval_covers(n: int, size: int, right: float, noise: float) -> None:
    """At least 93 % (less three standard errors of 800 simulations) of the intervals hold the true recovery."""
    rng = np.random.default_rng([n, size, round(100 * noise)])
    true = float(ndtr((ndtri(right) - noise / 3) / math.sqrt(1 + noise**2))) / right
    hits = 0
    for _ in range(800):
        found = intervals.paired_ratio_interval(*_draw(rng, n, size, right, noise))
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= true <= found.high
    assert hits / 800 >= 0.93 - 3 * math.sqrt(0.93 * 0.07 / 800)


@pytest.mark.parametrize(("sequences", "spread"), [(8, 0.3), (8, 1.1), (24, 0.3), (24, 1.1), (64, 0.7)])
def test_kl_interval_covers(sequences: int, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean KL per token of sequences whose own KL is log-normal: 93 %, less three standard errors."""
    monkeypatch.setattr(resampling, "RESAMPLES", 500)
    rng = np.random.default_rng(sequences)
    hits = 0
    for _ in range(300):
        tokens = rng.integers(200, 512, sequences).astype(np.float64)
        kl = tokens * 0.1 * np.exp(rng.normal(-(spread**2) / 2, spread, sequences))
        found = resampling.ratio_of_sums(kl, tokens, np.arange(sequences), log=True)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.1 <= found.high
    assert hits / 300 >= 0.93 - 3 * math.sqrt(0.93 * 0.07 / 300)


def test_median_of_three_says_so() -> None:
    draws = [np.random.default_rng(i).standard_normal(4000) * 0.01 for i in range(3)]
    assert medians.median_interval([0.9, 1.0, 1.1], draws, 0).note == "only 3 benchmarks"
