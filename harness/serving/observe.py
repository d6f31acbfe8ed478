"""What the tap recorded -> requests and repeats of a serving record, by the definitions of `harness.records.serving`.

A chunk bears a token where it has text (content, reasoning, a tool call), token ids, or raises the server's running
token count; a chunk that only names the role, or is empty, does not. Where the server tells its running count, a
chunk holds the tokens by which it rose; else every token-bearing chunk holds an equal part of the output tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from harness.records.serving import ESTIMATE, SERVER_USAGE, Gaps, Repeat, Request
from harness.serving.window import TokenEvent, active_requests, steady_window
from harness.serving.wire import Connection, Exchange, exchanges
from qad.untrusted import clean, strict_json, utf8
from qad.untrusted import count as count_of

CountTokens = Callable[[str], int]
Kind = TypeVar("Kind")
_REASONING = ("reasoning_content", "reasoning")


@dataclasses.dataclass(frozen=True)
class Observed:
    """request: times from its own start. start_s, end_s: on the tap's clock. tokens: (time on that clock, tokens)."""

    request: Request
    start_s: float
    end_s: float
    tokens: list[TokenEvent]
    prompt: str
    greedy: bool


def observe(connections: Sequence[Connection], count_tokens: CountTokens | None = None) -> list[Observed]:
    """Every completion that was asked for, by start. count_tokens: counts where the server sends no usage."""
    asked = [e for c in connections for e in exchanges(c) if e.method == "POST" and e.path.endswith("completions")]
    return sorted((_observed(e, count_tokens) for e in asked), key=lambda o: o.start_s)


def repeat(observed: Sequence[Observed], seen: set[str]) -> Repeat:
    """One run as a record. seen: prompts the server has met so far; this run's are added to it."""
    if not observed:
        return Repeat(None, [], prompts_seen_before=0, not_greedy=0)
    origin = observed[0].start_s
    spans = [(o.start_s - origin, o.end_s - origin) for o in observed]
    good = [o for o in observed if not o.request.failed]
    events = [(time_s - origin, tokens) for o in good for time_s, tokens in o.tokens]
    before = 0
    for o in observed:
        before += o.prompt in seen
        seen.add(o.prompt)
    peak, mean = active_requests(spans)
    return Repeat(
        seconds=max(end for _, end in spans),
        requests=[dataclasses.replace(o.request, start_s=o.start_s - origin) for o in observed],
        window=steady_window(spans, events),
        peak_active=peak,
        mean_active=mean,
        prompts_seen_before=before,
        not_greedy=sum(not o.greedy for o in observed),
    )


# --- one request ---------------------------------------------------------------------------------


@dataclasses.dataclass
class _Reading:
    """What the events of a stream said so far."""

    times: list[float] = dataclasses.field(default_factory=list)  # of token-bearing chunks
    counts: list[int | None] = dataclasses.field(default_factory=list)  # running tokens after each of them
    texts: list[str] = dataclasses.field(default_factory=list)
    answer_s: float | None = None
    usage: dict[str, int] = dataclasses.field(default_factory=dict)
    finished: bool = False
    error: str = ""


def _observed(exchange: Exchange, count_tokens: CountTokens | None) -> Observed:
    body = exchange.body
    asked = json.dumps(body.get("prompt", body.get("messages")), sort_keys=True)
    prompt = hashlib.sha256(asked.encode()).hexdigest()
    greedy = body.get("temperature") == 0 and body.get("ignore_eos") is True
    reading = _read(exchange)
    reason = _failure(exchange, reading)
    if not reason:
        request, tokens = _success(exchange.start_s, reading, count_tokens)
        if not request.impossible:
            return Observed(request, exchange.start_s, exchange.end_s, tokens, prompt, greedy)
        reason = f"impossible: {request.impossible}"
    return Observed(Request(0.0, failed=True, reason=reason), exchange.start_s, exchange.end_s, [], prompt, greedy)


def _read(exchange: Exchange) -> _Reading:
    reading = _Reading()
    running = 0
    for event in exchange.events:
        if event.data.strip() == "[DONE]":
            reading.finished = True
            continue
        try:
            chunk = _chunk(event.data)
            if (chunk.usage.get("completion_tokens") or running) < running:
                raise ValueError(f"that counts {chunk.usage['completion_tokens']} tokens after {running}")
        except ValueError as error:
            reading.error = reading.error or f"an event {error}"
            continue
        reading.error = reading.error or chunk.error
        reading.usage |= chunk.usage
        reading.finished |= chunk.ends
        count = chunk.usage.get("completion_tokens")
        if chunk.choices and (chunk.text or chunk.ids or (count or 0) > running):
            reading.times.append(event.time_s)
            reading.texts.append(chunk.text)
            reading.counts.append(count)
            if chunk.answers and reading.answer_s is None:
                reading.answer_s = event.time_s
        running = max(running, count or 0)
    return reading


@dataclasses.dataclass
class _Chunk:
    """One event. error: what the server says went wrong. usage: the counts that it tells. answers: whether any of its text is
    answer, not reasoning. ids: whether it names token ids. ends: whether it gives a finish reason."""

    error: str = ""
    usage: dict[str, int] = dataclasses.field(default_factory=dict)
    choices: bool = False
    text: str = ""
    answers: bool = False
    ids: bool = False
    ends: bool = False


def _chunk(data: str) -> _Chunk:
    """Raises ValueError, in words that follow "an event", for what no server of this interface says."""
    try:
        raw = strict_json(data, nan_is_null=True)
    except ValueError as error:
        raise ValueError(f"that is no JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError("that is no JSON object")
    if raw.get("error") or raw.get("object") == "error":
        return _Chunk(error=_short(raw.get("error") or raw))
    chunk = _Chunk(usage=token_counts(raw))
    for choice in _list(raw, "choices"):
        chunk.choices = True
        if not isinstance(choice, dict):
            raise ValueError(f"with a choice that is {_short(choice)}")
        delta = _part(choice, "delta", dict) or {}
        answer = (_part(choice, "text", str) or "") + (_part(delta, "content", str) or "")
        answer += "".join(str(call) for call in _list(delta, "tool_calls"))
        thought = next((found for name in _REASONING if (found := _part(delta, name, str))), "")
        chunk.text += thought + answer
        chunk.answers |= bool(answer)
        chunk.ids |= bool(choice.get("token_ids"))
        chunk.ends |= choice.get("finish_reason") is not None
    return chunk


def token_counts(answer: Mapping[str, object]) -> dict[str, int]:
    """completion_tokens, prompt_tokens and cached_tokens, as far as an answer or event tells them. Raises ValueError, as
    `_chunk`, for what is no count."""
    usage = _part(answer, "usage", dict) or {}
    told = {name: usage.get(name) for name in ("completion_tokens", "prompt_tokens")}
    told["cached_tokens"] = (_part(usage, "prompt_tokens_details", dict) or {}).get("cached_tokens")
    wrong = next((name for name, value in told.items() if value is not None and count_of(value) is None), None)
    if wrong:
        raise ValueError(f"whose {wrong} is {_short(told[wrong])}")
    return {name: value for name, value in told.items() if value is not None}


def _part(holder: Mapping[str, object], name: str, kind: type[Kind]) -> Kind | None:
    value = holder.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"whose {name} is {_short(value)}")
    return value


def _list(holder: Mapping[str, object], name: str) -> list[object]:
    return _part(holder, name, list) or []


def _failure(exchange: Exchange, reading: _Reading) -> str:
    """Why a request counts as failed, "" for a success."""
    if exchange.status == 0:
        return "no answer: the connection ended"
    if exchange.status < 0:
        return "the answer is no HTTP"
    if exchange.status != 200:
        return f"HTTP {exchange.status}: {_short(exchange.text)}"
    if reading.error:
        return f"error inside the stream: {reading.error}"
    if exchange.text:
        return "the answer is no event stream"
    if not reading.finished:
        return "the stream broke off" if reading.times or not exchange.whole else "the stream ended without a token"
    return "" if reading.times else "the stream ended without a token"


def _success(start_s: float, reading: _Reading, count_tokens: CountTokens | None) -> tuple[Request, list[TokenEvent]]:
    usage, times = reading.usage, reading.times
    output, source = usage.get("completion_tokens"), SERVER_USAGE
    if output is None:
        output, source = (count_tokens(utf8("".join(reading.texts))), ESTIMATE) if count_tokens else (None, ESTIMATE)
    per_chunk = _tokens_per_chunk(reading, output)
    first = _first_chunk(reading, output, count_tokens)
    ttft, e2e = (1000 * (t - start_s) for t in (times[0], times[-1]))
    after_first = None if output is None else output - (first or 1)
    return Request(
        start_s=0.0,
        input_tokens=usage.get("prompt_tokens"),
        cached_tokens=usage.get("cached_tokens"),
        output_tokens=output,
        token_source=source,
        first_chunk_tokens=first,
        ttft_ms=ttft,
        first_answer_ms=None if reading.answer_s is None else 1000 * (reading.answer_s - start_s),
        tpot_ms=(e2e - ttft) / after_first if after_first and after_first > 0 else None,
        icl_ms=_gaps(times),
        e2e_ms=e2e,
    ), list(zip(times, per_chunk, strict=True))


def _tokens_per_chunk(reading: _Reading, output: int | None) -> list[float]:
    if all(count is not None for count in reading.counts):
        counts = [0, *(count or 0 for count in reading.counts)]
        return [float(b - a) for a, b in itertools.pairwise(counts)]
    return [(output or 0) / len(reading.times)] * len(reading.times)


def _first_chunk(reading: _Reading, output: int | None, count_tokens: CountTokens | None) -> int | None:
    """Tokens of the first chunk: by the running count; 1 where there are as many chunks as tokens; by the tokenizer
    where tokens came bundled. None: nobody says."""
    if reading.counts[0]:
        return reading.counts[0]
    if output == len(reading.times):
        return 1
    return max(1, count_tokens(utf8(reading.texts[0]))) if count_tokens else None


def _gaps(times: list[float]) -> Gaps:
    gaps = [1000 * (b - a) for a, b in itertools.pairwise(times)]
    if not gaps:
        return Gaps(None, None, None)
    return Gaps(statistics.fmean(gaps), statistics.median(gaps), max(gaps))


def _short(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("message") or json.dumps(value)
    return clean(" ".join(str(value).split()), 200)
