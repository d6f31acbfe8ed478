"""An interval and the value it belongs to, as one estimate of a comparison."""

from __future__ import annotations

import math

from harness.comparison import Estimate
from harness.intervals import Interval


def estimate(value: float, interval: Interval, n: int) -> Estimate:
    """n: items; the interval knows its clusters. Limits that are not finite are no limits."""
    low, high = interval.low, interval.high
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        low = high = None
    return Estimate(value, low, high, n, interval.clusters, interval.method, interval.note)
