"""Steady state: how many requests were under way when, and which token events count.

One rule: the window is the longest interval in which at least 0.8 of the peak number of requests were active; the
tokens of successful requests count where start < time <= end (made inside), whichever request they are of. Warm-up, ramp
and drain fall outside, and a request that straddles an edge counts with the part inside. Between one answer and
the next request a client holds a place that is briefly empty: a dip shorter than a tenth of the median request does
not end the interval, and a number of requests that was reached for less time than that in all is no peak.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from harness.records.serving import Window
from harness.statistics.intervals import Floats, Ints

Span = tuple[float, float]  # start, end, s
TokenEvent = tuple[float, float]  # time s, tokens
SHARE = 0.8
TURNAROUND = 0.1


def active_requests(spans: Sequence[Span]) -> tuple[int, float]:
    """Peak and time-weighted mean of the requests under way between the first start and the last end."""
    times, active = _steps(spans)
    length = float(times[-1] - times[0])
    peak = int(active.max())
    return peak, float(active[:-1] @ np.diff(times)) / length if length > 0 else float(peak)


def steady_window(spans: Sequence[Span], events: Sequence[TokenEvent]) -> Window | None:
    """The window and its tokens; None where there is no interval of any length."""
    times, counts = _steps(spans)
    turnaround = TURNAROUND * statistics.median(end - start for start, end in spans)
    lasted, active = np.diff(times), counts[:-1]
    held = [count for count in np.unique(active) if lasted[active >= count].sum() >= turnaround]
    needed = SHARE * float(max(held, default=counts.max()))
    found: list[Span] = []
    for (start, end), active in zip(itertools.pairwise(times.tolist()), counts, strict=False):
        if active < needed:
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


def _steps(spans: Sequence[Span]) -> tuple[Floats, Ints]:
    """Times at which a request starts or ends, in order, and how many are active from then on."""
    starts, ends = np.sort(np.array(spans, dtype=np.float64), axis=0).T
    times = np.unique([starts, ends])
    return times, np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")
