"""What the stated intervals and tests do in simulation, small; tests/bench/coverage.py is the large version.

Two arms answer the same items. An item's margin is normal; the second arm's margin differs by noise and a shift, so
that the share of differing items and the true recovery follow. Items of a cluster share part of both.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from harness.statistics import intervals, medians, paired_tests
from harness.statistics.intervals import Floats, Ints

pytestmark = pytest.mark.slow
SIMULATIONS = 400


def least(level: float, simulations: int = SIMULATIONS) -> float:
    """Three standard errors of the simulation below a share that is to be reached."""
    return level - 3 * math.sqrt(level * (1 - level) / simulations)


def draw(rng: np.random.Generator, n: int, repeats: int, right: float, noise: float, shift: float) -> tuple[Floats, Floats, Ints]:
    """Scores of two arms [n * repeats] and clusters. With repeats each answer has noise of its own in both arms."""
    items = rng.standard_normal(n) + ndtri(right) * math.sqrt(1 + noise**2)
    cluster = np.repeat(np.arange(n), repeats)
    first = items[cluster] + noise * rng.standard_normal(n * repeats)
    second = items[cluster] + noise * rng.standard_normal(n * repeats) - shift
    return (second > 0).astype(np.float64), (first > 0).astype(np.float64), cluster


def truth(right: float, noise: float, shift: float) -> float:
    """Mean score of the second arm."""
    return float(ndtr(ndtri(right) - shift / math.sqrt(1 + noise**2)))


CASES = [
    # items, repeats, BF16's score, noise, shift, discordant items expected at least
    (30, 1, 0.6, 1.0, 0.3),
    (30, 1, 0.9, 0.2, 0.0),  # 2 discordant items
    (30, 16, 0.8, 0.5, 0.2),
    (100, 1, 0.7, 0.4, 0.1),
    (100, 8, 0.35, 0.6, 0.2),
    (1000, 1, 0.8, 0.2, 0.05),
    (1000, 1, 0.8, 0.02, 0.0),  # 7 discordant items
]


@pytest.mark.parametrize(("n", "repeats", "right", "noise", "shift"), CASES)
def test_recovery_and_difference_cover(n: int, repeats: int, right: float, noise: float, shift: float) -> None:
    """At least 93 %, also where the expected number of differing items is below ten."""
    rng = np.random.default_rng([n, repeats, round(100 * noise)])
    score = truth(right, noise, shift)
    hits = np.zeros(2)
    for _ in range(SIMULATIONS):
        top, bottom, cluster = draw(rng, n, repeats, right, noise, shift)
        ratio = intervals.paired_ratio_interval(top, bottom, cluster)
        difference = intervals.paired_difference_interval(top, bottom, cluster)
        for number, (found, true) in enumerate(((ratio, score / right), (difference, score - right))):
            assert found.low is not None
            assert found.high is not None
            hits[number] += found.low <= true <= found.high
    assert hits.min() / SIMULATIONS >= least(0.93), hits / SIMULATIONS


@pytest.mark.parametrize(("n", "repeats", "noise"), [(30, 1, 1.0), (100, 1, 0.3), (1000, 1, 0.2), (30, 8, 0.5)])
def test_no_difference_is_found_in_no_more_than_five_percent(n: int, repeats: int, noise: float) -> None:
    rng = np.random.default_rng([n, repeats])
    found = 0
    for _ in range(SIMULATIONS):
        top, bottom, cluster = draw(rng, n, repeats, 0.7, noise, 0.0)
        found += paired_tests.no_difference(top - bottom, cluster)[0] <= 0.05
    assert found / SIMULATIONS <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / SIMULATIONS)


@pytest.mark.parametrize(("n", "repeats", "noise"), [(100, 1, 0.3), (1000, 1, 0.05), (30, 8, 0.5), (100, 8, 0.3)])
def test_at_the_margin_five_percent_are_called_non_inferior(n: int, repeats: int, noise: float) -> None:
    """The true recovery is exactly 1 - margin: both wrong verdicts are the gate's own risk."""
    right, margin = 0.7, 0.05
    shift = (ndtri(right) - float(ndtri(right * (1 - margin)))) * math.sqrt(1 + noise**2)
    assert truth(right, noise, shift) == pytest.approx(right * (1 - margin))
    rng = np.random.default_rng([n, repeats, 7])
    verdicts = []
    for _ in range(SIMULATIONS):
        top, bottom, cluster = draw(rng, n, repeats, right, noise, shift)
        verdicts.append(paired_tests.non_inferiority(top, bottom, cluster, margin))
    for wrong in ("non-inferior", "inferior"):
        assert verdicts.count(wrong) / SIMULATIONS <= 0.06 + 3 * math.sqrt(0.06 * 0.94 / SIMULATIONS), wrong


def test_the_n_that_would_decide_decides() -> None:
    """At that n, an arm that is truly equal is found non-inferior in about 80 of 100 runs."""
    rng = np.random.default_rng(8)
    pilot = draw(rng, 4000, 1, 0.8, 0.1, 0.0)
    n = paired_tests.items_needed(*pilot, 0.02)
    assert n is not None
    found = [paired_tests.non_inferiority(*draw(rng, n, 1, 0.8, 0.1, 0.0), 0.02) for _ in range(200)]
    assert 0.70 < found.count("non-inferior") / 200 < 0.90


TENFOLD = [0.008, 0.015, 0.011, 0.027, 0.05, 0.005, 0.017, 0.04, 0.03, 0.02, 0.012]


@pytest.mark.parametrize(
    ("lower", "apart", "scatter"),
    [(0, 0.0, 0.0), (0, 0.0, 0.03), (5, 0.03, 0.0), (5, 0.06, 0.0), (5, 0.1, 0.0)],
    ids=["alike", "scattered", "near", "three-errors", "far"],
)
@pytest.mark.parametrize("errors", [[0.02] * 11, TENFOLD, [0.02, 0.035, 0.08, 0.02, 0.05]], ids=["equal", "tenfold", "five"])
def test_the_median_of_a_suite_covers(
    errors: list[float], lower: int, apart: float, scatter: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median is one of the equal values above the lower group, where it is hardest to cover."""
    monkeypatch.setattr(medians, "DRAWS", 4000)
    k, simulations = len(errors), 40
    error = np.array(errors)
    rng = np.random.default_rng([k, round(1000 * apart)])
    low = min(lower, (k - 1) // 2)
    true = np.array([rng.permutation([1 - apart] * low + [1.0] * (k - low)) for _ in range(simulations)])
    true = true + scatter * rng.standard_normal((simulations, k))
    observed = true + error * rng.standard_normal((simulations, k))
    deviations = list(error[:, None] * rng.standard_normal((k, medians.RESAMPLES)))
    hits = 0
    for values, one in zip(observed, true, strict=True):
        found = medians.median_interval(values, deviations, 0)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= np.median(one) <= found.high
    assert hits / simulations >= least(0.93, simulations)


def width(values: Floats, draws: list[Floats]) -> float:
    found = medians.median_interval(values.tolist(), draws, 0)
    assert found.low is not None
    assert found.high is not None
    return found.high - found.low


def test_a_collapsed_benchmark_leaves_the_interval_as_wide() -> None:
    """One of eleven, at .3: the others say no more of the median than they said before."""
    rng = np.random.default_rng(5)
    draws = list(0.02 * rng.standard_normal((11, medians.RESAMPLES)))
    values = 1 + 0.02 * rng.standard_normal(11)
    fallen = np.where(values == values.min(), 0.3, values)
    assert width(fallen, draws) == pytest.approx(width(values, draws), rel=0.1)


def test_two_benchmarks_have_a_mean() -> None:
    """Their median is no order statistic: its interval is that of the mean."""
    rng = np.random.default_rng(1)
    draws = 0.02 * rng.standard_normal((2, medians.RESAMPLES))
    found = medians.median_interval([0.9, 1.1], list(draws), 0)
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(2 * intervals.Z * 0.02 / math.sqrt(2), rel=0.05)


def test_equal_recoveries_share_what_they_know() -> None:
    """Eleven equal recoveries say more about their median than one of them does, eleven far apart no more than that."""
    rng = np.random.default_rng(2)
    draws = list(0.02 * rng.standard_normal((11, medians.RESAMPLES)))
    noise = 0.02 * rng.standard_normal(11)
    assert width(1 + noise, draws) < 2 * intervals.Z * 0.02 < width(np.linspace(0.2, 1.0, 11) + noise, draws)
