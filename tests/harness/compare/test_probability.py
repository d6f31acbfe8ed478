"""Beside an open verdict stands the probability that the limit holds; a policy may ask for another confidence."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from harness.compare.gate import _holds, at_confidence, judge
from harness.compare.policy import Policy
from harness.records.comparison import Comparison, Estimate

Z = NormalDist().inv_cdf(0.975)


def estimate(value: float, error: float) -> Estimate:
    return Estimate(value, value - Z * error, value + Z * error, 100, 100, "normal", "")


@pytest.mark.parametrize("limit", [0.95, 0.985, 0.99, 1.02])
def test_the_probability_is_the_normal_one(limit: float) -> None:
    found = estimate(0.985, 0.01)
    expected = 1 - NormalDist(0.985, 0.01).cdf(limit)
    assert math.isclose(_holds(found, limit, at_most=False), expected, rel_tol=1e-9)
    assert math.isclose(_holds(found, limit, at_most=True), 1 - expected, rel_tol=1e-9)


def test_a_skewed_interval_counts_on_the_side_of_the_limit() -> None:
    found = Estimate(0.98, 0.94, 0.99, 100, 100, "skewed", "")
    above, below = _holds(found, 1.0, at_most=True), _holds(found, 0.96, at_most=False)
    assert math.isclose(above, NormalDist(0.98, 0.01 / Z).cdf(1.0), rel_tol=1e-9)
    assert math.isclose(below, 1 - NormalDist(0.98, 0.04 / Z).cdf(0.96), rel_tol=1e-9)


def test_a_policy_of_less_confidence_decides_with_less() -> None:
    found = estimate(0.995, 0.004)
    comparison = Comparison(["bf16", "ptq"], [], {"ptq": found}, {"ptq": ("a", found)}, {}, None, None, {}, [])
    sure, easy = (
        Policy.model_validate({"name": "p", "median_recovery": {"at_least": 0.99}, "confidence": c}) for c in (0.95, 0.7)
    )
    assert judge(comparison, sure).outcome == "INCONCLUSIVE"
    assert judge(comparison, easy).outcome == "PASS"
    narrow = at_confidence(comparison, 0.7).median_recovery["ptq"]
    assert narrow.low is not None
    assert math.isclose(narrow.low, 0.995 - NormalDist().inv_cdf(0.85) * 0.004, rel_tol=1e-9)
