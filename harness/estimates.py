"""An interval and the value it belongs to, as one estimate of a comparison."""

from __future__ import annotations

from harness.comparison import Estimate
from harness.intervals import Interval


def estimate(value: float, interval: Interval, n: int) -> Estimate:
    """n: items; the interval knows its clusters."""
    return Estimate(value, interval.low, interval.high, n, interval.clusters, interval.method, interval.note)
