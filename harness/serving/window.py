"""Steady state: how many requests were under way when, and which token events count.

One rule: the window is the longest interval in which at least 0.8 of the peak number of requests were active; the
tokens of successful requests count where start < time <= end (made inside), whichever request they are of. Warm-up, ramp
and drain fall outside, and a request that straddles an edge counts with the part inside. Between one answer and
the next request a client holds a place that is briefly empty: a dip shorter than a tenth of the median request does
not end the interval.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from harness.records.serving import Window

Span = tuple[float, float]  # start, end, s
TokenEvent = tuple[float, float]  # time s, tokens
SHARE = 0.8
TURNAROUND = 0.1


def active_requests(spans: Sequence[Span]) -> tuple[int, float]:
    """Peak and time-weighted mean of the requests under way between the first start and the last end."""
    steps = _steps(spans)
    peak = max(active for _, active in steps)
    total = sum(active * (b - a) for (a, active), (b, _) in itertools.pairwise(steps))
    length = steps[-1][0] - steps[0][0]
    return peak, total / length if length > 0 else float(peak)


def steady_window(spans: Sequence[Span], events: Sequence[TokenEvent]) -> Window | None:
    """The window and its tokens; None where there is no interval of any length."""
    steps = _steps(spans)
    needed = SHARE * max(active for _, active in steps)
    turnaround = TURNAROUND * statistics.median(end - start for start, end in spans)
    found: list[Span] = []
    for (start, active), (end, _) in itertools.pairwise(steps):
        if active < needed or end <= start:
            continue
        if found and start - found[-1][1] <= turnaround:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    if not found:
        return None
    start, end = max(found, key=lambda span: span[1] - span[0])
    return Window(start, end, tokens_inside(events, start, end))


def tokens_inside(events: Sequence[TokenEvent], start_s: float, end_s: float) -> float:
    """Tokens of the events with start_s < time <= end_s."""
    return sum(tokens for time_s, tokens in events if start_s < time_s <= end_s)


def _steps(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """(time, requests active from then on), by time; at equal times ends come first."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    steps: list[tuple[float, int]] = []
    active = 0
    for time_s, change in changes:
        active += change
        if steps and steps[-1][0] == time_s:
            steps[-1] = (time_s, active)
        else:
            steps.append((time_s, active))
    return steps
