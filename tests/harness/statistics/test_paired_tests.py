"""Tests of paired scores: against scipy and closed forms, Holm, non-inferiority and the n that would decide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from harness.statistics.intervals import Floats, design_effect
from harness.statistics.paired_tests import holm, items_needed, items_to_decide, no_difference, non_inferiority


def paired(gained: int, lost: int, both: int, neither: int) -> tuple[Floats, Floats]:
    top = [1.0] * gained + [0.0] * lost + [1.0] * both + [0.0] * neither
    bottom = [0.0] * gained + [1.0] * lost + [1.0] * both + [0.0] * neither
    return np.array(top), np.array(bottom)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 7), (12, 5), (0, 30), (60, 60), (3, 2000)])
def test_mcnemar_is_the_binomial_test(gained: int, lost: int) -> None:
    top, bottom = paired(gained, lost, 40, 10)
    p, name = no_difference(top - bottom, np.arange(len(top)))
    expected = binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
    assert p == pytest.approx(expected, rel=1e-9, abs=1e-300)
    assert name == "exact McNemar"


def test_sign_flips_over_clusters_are_exact() -> None:
    """Against all 2^10 sign patterns of ten cluster totals."""
    rng = np.random.default_rng(4)
    totals = rng.integers(-5, 6, 10)
    difference = np.concatenate([np.full(5, np.sign(t)) * (np.arange(5) < abs(t)) for t in totals]).astype(float)
    p, name = no_difference(difference, np.repeat(np.arange(10), 5))
    signs = 1 - 2 * ((np.arange(1024)[:, None] >> np.arange(10)) & 1)
    assert p == pytest.approx(np.mean(np.abs(signs @ totals) >= abs(totals.sum())))
    assert name == "exact sign-flip over clusters"


def test_scores_that_are_not_whole_flip_at_random() -> None:
    rng = np.random.default_rng(0)
    p, name = no_difference(rng.normal(0.5, 1.0, 60), np.arange(60))
    assert p < 0.01
    assert name == "sign-flip over clusters, 9,999 flips"
    assert no_difference(np.array([0.25, -0.25] * 20), np.arange(40))[0] == 1.0


def test_holm() -> None:
    """Step-down: 4 x .01, 3 x .02 (kept up to .06), 2 x .03, 1 x .04; what was not tested does not count."""
    assert holm([0.04, None, 0.01, 0.03, 0.02]) == pytest.approx([0.06, None, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_one_point_claim_needs_this_many_items() -> None:
    """1.2 thousand at 2 % flips, 3.7 thousand at 6 %."""
    assert items_to_decide(0.02, 0.01) == 1237
    assert items_to_decide(0.06, 0.01) == 3710


def test_items_needed_of_scores() -> None:
    top, bottom = paired(10, 10, 800, 180)  # 2 % flips at 81 %
    needed = items_needed(top, bottom, np.arange(1000), 0.01)
    assert needed == math.ceil(6.1826 * 0.02 / 0.0081**2) or needed == pytest.approx(1885, abs=2)
    assert items_needed(*paired(0, 0, 81, 19), np.arange(100), 0.01) == pytest.approx(942, abs=1)
    assert items_needed(*paired(0, 0, 100, 0), np.arange(100), 0.01) == 619, "one of 100 may well differ next time"
    assert items_needed(top, bottom * 0, np.arange(1000), 0.01) is None


def test_one_cluster_says_nothing_of_others() -> None:
    """Ten items of one template: every test stays undecided, none divides by the clusters that are missing."""
    top, bottom = paired(1, 3, 6, 0)
    alone = np.zeros(10, dtype=np.int64)
    assert items_needed(top, bottom, alone, 0.01) is None
    assert non_inferiority(top, bottom, alone, 0.01) == "undecided"
    assert design_effect(top - bottom, alone) == 10.0
    assert items_needed(top[:1], bottom[:1] + 1, alone[:1], 0.01) is not None  # one item is no cluster of several


def test_clusters_need_more_items() -> None:
    top, bottom = paired(100, 100, 700, 100)
    alone = items_needed(top, bottom, np.arange(1000), 0.01)
    grouped = items_needed(top, bottom, np.arange(1000) // 10, 0.01)
    assert alone is not None
    assert grouped is not None
    assert grouped > 5 * alone


@pytest.mark.parametrize(
    ("gained", "lost", "both", "verdict"),
    [
        (100, 100, 16_000, "non-inferior"),  # of 20,000
        (100, 400, 16_000, "inferior"),
        (100, 260, 16_000, "undecided"),
        (0, 0, 50, "undecided"),  # equal, but too few
        (0, 0, 1000, "non-inferior"),
    ],
)
def test_non_inferiority(gained: int, lost: int, both: int, verdict: str) -> None:
    top, bottom = paired(gained, lost, both, both // 4)
    assert non_inferiority(top, bottom, np.arange(len(top)), 0.01) == verdict


def test_whole_numbers_of_any_size_are_tested_without_their_distribution() -> None:
    """Rewards may be points; an array of all their sums could be larger than memory."""
    points = np.array([3e9, 1e9, 2e9, -1e9, 5e9, 4e9, 1e90, 1e90])
    p, name = no_difference(points, np.arange(len(points)))
    assert 0.2 < p <= 1.0
    assert name.startswith("sign-flip")
    assert no_difference(points[:6] / 1e9, np.arange(6))[1] == "exact sign-flip over clusters"
