"""One request and one run of a load tool's result file, in our definitions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from harness.records.serving import Arrival, Gaps, Repeat, Request, Window
from harness.serving.window import TokenEvent, active_requests, steady_window, tokens_inside
from qad.untrusted import clean

_EVENTS = 4_000_000  # of one run at most: a count that somebody wrote is no reason to run out of memory


def request(
    start_s: float,
    ttft_ms: float,
    e2e_ms: float,
    input_tokens: int | None,
    output_tokens: int | None,
    counted_by: str,
    gaps_ms: Sequence[float] = (),
    cached_tokens: int | None = None,
) -> Request:
    if gaps_ms and min(gaps_ms) < 0:
        return failed(start_s, "impossible: a chunk before the one before it")
    after_first = (output_tokens or 0) - 1
    found = Request(
        start_s=start_s,
        input_tokens=input_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        token_source=counted_by,
        ttft_ms=ttft_ms,
        tpot_ms=(e2e_ms - ttft_ms) / after_first if after_first > 0 else None,
        icl_ms=Gaps(statistics.fmean(gaps_ms), statistics.median(gaps_ms), max(gaps_ms)) if gaps_ms else None,
        e2e_ms=e2e_ms,
    )
    return failed(start_s, f"impossible: {found.impossible}") if found.impossible else found


def failed(start_s: float, reason: object) -> Request:
    return Request(start_s, failed=True, reason=clean(" ".join(str(reason).split())[-200:], 200) or "failed")


def run_of(requests: list[Request], seconds: float | None, arrival: Arrival | None = None) -> Repeat:
    """A run from its requests; token events are spread evenly from the first token to the last. Requests at a rate are a steady
    state from the first one's start to the last one's, whatever the server makes of them."""
    origin = min((r.start_s for r in requests), default=0.0)
    requests = [dataclasses.replace(r, start_s=r.start_s - origin) for r in sorted(requests, key=lambda r: r.start_s)]
    good = [r for r in requests if not r.failed]
    spans = [(r.start_s, r.start_s + (r.e2e_ms or 0.0) / 1000) for r in good]
    known = (bool(spans) and len({start for start, _ in spans}) > 1) or len(spans) == 1
    peak, mean = active_requests(spans) if known else (None, None)
    events = [event for r in good for event in _events(r, 1 + _EVENTS // len(good))]
    window = steady_window(spans, events) if known else None
    if known and arrival is not None and arrival.rate is not None:
        last = max(start for start, _ in spans)
        window = Window(0.0, last, tokens_inside(events, 0.0, last))
    return Repeat(
        seconds=seconds if seconds is not None else max((end for _, end in spans), default=None),
        requests=requests,
        window=window,
        peak_active=peak,
        mean_active=mean,
    )


def _events(request: Request, most: int) -> list[TokenEvent]:
    n, first, last = request.output_tokens or 0, request.ttft_ms or 0.0, request.e2e_ms or 0.0
    steps = min(n, most)
    step = (last - first) / (steps - 1) if steps > 1 else 0.0
    return [(request.start_s + (first + i * step) / 1000, n / steps) for i in range(steps)]
