"""The record of a serving measurement, and what its numbers mean. No torch, no numpy: plain types.

ttft_ms          first chunk that carries a token (content or reasoning) - request start
first_answer_ms  first chunk that carries content (not reasoning) - request start
tpot_ms          per request: (e2e - ttft) / (output_tokens - tokens of the first chunk); that is output_tokens - 1
                 where the first chunk holds one token, which is also assumed where nobody says how many it holds
icl_ms           gaps between token-bearing chunks, whatever the number of tokens in them
e2e_ms           request start to last token
output_tokens    what the server's usage says; without usage a count by the tokenizer, marked as an estimate
window           the longest interval in which at least 0.8 of the peak number of requests were active; token
                 events count where window.start_s < time <= window.end_s, all others do not
failed           an error status or event, a stream without a token, one that breaks off: outside all of the above

Times of a request are milliseconds from its start, times of a repeat are seconds from its first request.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from harness.records.fidelity import LATER
from harness.records.rebuild import STRICT
from qad.untrusted import count, is_number

SERVER_USAGE, ESTIMATE = "server usage", "estimate"


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Gaps between the chunks of one request, ms. None where there are none."""

    mean: float | None
    p50: float | None
    longest: float | None


@dataclasses.dataclass(frozen=True)
class Request:
    """One request. None: the server or the tool did not say, or the request failed before.

    cached_tokens: prompt tokens taken from the server's prefix cache.
    first_chunk_tokens: tokens in the first token-bearing chunk.
    token_source: SERVER_USAGE, ESTIMATE, or the words of the tool that counted.
    """

    start_s: float
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    token_source: str = ""
    first_chunk_tokens: int | None = None
    ttft_ms: float | None = None
    first_answer_ms: float | None = None
    tpot_ms: float | None = None
    icl_ms: Gaps | None = None
    e2e_ms: float | None = None
    failed: bool = False
    reason: str = ""

    @property
    def impossible(self) -> str:
        """What of a success cannot be, "" where all can: counts, cached of sent tokens, times in their order."""
        counts = (("prompt", self.input_tokens), ("cached", self.cached_tokens), ("output", self.output_tokens))
        wrong = [f"{name} tokens {str(n)[:40]}" for name, n in counts if n is not None and count(n) is None]
        times = (("first token", self.ttft_ms), ("end", self.e2e_ms))
        wrong += [f"{name} after {str(ms)[:40]} ms" for name, ms in times if not is_number(ms) or ms <= 0]
        if wrong:
            return wrong[0]
        if self.ttft_ms is not None and self.e2e_ms is not None and self.ttft_ms > self.e2e_ms * (1 + 1e-9):
            return f"first token after {self.ttft_ms:g} ms, end after {self.e2e_ms:g} ms"
        if self.input_tokens is not None and (self.cached_tokens or 0) > self.input_tokens:
            return f"{self.cached_tokens} of {self.input_tokens} prompt tokens cached"
        return ""


@dataclasses.dataclass(frozen=True)
class Window:
    """The steady state. tokens: token events of successful requests inside."""

    start_s: float
    end_s: float
    tokens: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True)
class Repeat:
    """One run of one cell. None: not known (imported).

    seconds: from the first request to the end of the last.
    peak_active, mean_active: requests under way at once, the mean weighted by time.
    prompts_seen_before: requests whose prompt the server had met earlier in this measurement (warm-up, other cells and
        repeats, this one).
    not_greedy: requests without temperature 0 or without ignore_eos.
    energy_j: of the accelerators during the window, where they tell.
    printed: statistics of a tool that gave no single requests, metric -> mean, p50, p99 and so on; requests is empty then.
    """

    seconds: float | None
    requests: list[Request]
    window: Window | None = None
    peak_active: int | None = None
    mean_active: float | None = None
    prompts_seen_before: int | None = None
    not_greedy: int | None = None
    energy_j: float | None = None
    printed: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """How requests come where they do not wait for answers.

    rate: requests per second; None: all at once, or as `pattern` says.
    pattern: constant, Poisson, gamma with its shape, a ramp, ..., in words.
    """

    rate: float | None
    pattern: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """What was asked of the server, and its runs. Cells of another load or other lengths are never repeats of one.

    concurrency: requests under way at most.
    arrival: None where so many clients each send the next request when the last is answered. With concurrency None as well
        the load is unknown: an imported file does not say.
    input_tokens, output_tokens: None where not told.
    drawn: whether lengths were drawn at random, up to those given.
    """

    concurrency: int | None
    input_tokens: int | None
    output_tokens: int | None
    repeats: list[Repeat]
    arrival: Arrival | None = dataclasses.field(default=None, metadata=LATER)
    drawn: bool | None = dataclasses.field(default=None, metadata=LATER)

    @property
    def load(self) -> str:
        """In words that tell any two loads apart."""
        if self.arrival is None:
            return "load unknown" if self.concurrency is None else f"concurrency {self.concurrency}"
        rate = "" if self.arrival.rate is None else f"{self.arrival.rate:.12g} requests/s, "
        bound = "" if self.concurrency is None else f", at most {self.concurrency} under way"
        return f"{rate}{self.arrival.pattern}{bound}"

    @property
    def name(self) -> str:
        drawn = "up to " if self.drawn else ""
        if self.input_tokens is None and self.output_tokens is None:
            return self.load
        return f"{self.load}, {drawn}{_known(self.input_tokens)} + {_known(self.output_tokens)} tokens"


def _known(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)


@dataclasses.dataclass(frozen=True)
class Overhead:
    """What client and observer cost by themselves: the same load against a server that answers at once.

    ttft_ms, tpot_ms: medians.
    tokens_per_s: output tokens; no server can be seen to be faster than that.
    n: requests.
    """

    concurrency: int
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float | None
    n: int


@dataclasses.dataclass(frozen=True)
class ServingData:
    """What servers did under load.

    driver: the tool that made the load, and its version.
    order: arms in the order in which they were measured, repeat by repeat.
    overhead: one a concurrency.
    notes: what a reader has to know beside the numbers.
    """

    KIND: ClassVar[str] = "serving"
    __pydantic_config__ = STRICT
    driver: str
    endpoint: str
    cells: list[Cell]
    order: list[str] = dataclasses.field(default_factory=list)
    overhead: list[Overhead] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
