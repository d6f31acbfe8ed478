"""Faults that load tools had, each as a test of its whole kind: what a stream may look like, and what it counts as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.records.serving import ESTIMATE, SERVER_USAGE, Cell, Repeat, Request
from harness.serving.drivers import Load
from harness.serving.mock_server import BREAK, chunk, mock_server
from harness.serving.observe import observe, repeat
from harness.serving.statistics import goodput, quantile, summarize
from harness.serving.tap import tap
from harness.serving.window import steady_window, tokens_inside
from harness.serving.wire import Connection

Play = Callable[..., Connection]
DONE = "[DONE]"


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def text(words: str, usage: int | None = None, finish: str | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {"object": "text_completion", "choices": [{"text": words, "finish_reason": finish}]}
    return event if usage is None else {**event, "usage": {"prompt_tokens": 3, "completion_tokens": usage}}


def usage(count: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count, **more}}


def one(connection: Connection, count_tokens: Callable[[str], int] | None = None) -> Request:
    (observed,) = observe([connection], count_tokens)
    return observed.request


# --- E1: the first token --------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_first_token_is_neither_the_role_nor_the_first_of_the_answer(play: Play, field: str) -> None:
    stream = [
        (0.010, delta(role="assistant", content="")),
        (0.050, delta(**{field: "hm"})),
        (0.300, delta(content="42", finish="stop")),
        (0.301, usage(2)),
        (0.302, DONE),
    ]
    request = one(play(stream, messages=[]))
    assert request.ttft_ms == pytest.approx(50)
    assert request.first_answer_ms == pytest.approx(300)
    assert request.e2e_ms == pytest.approx(300), "usage and [DONE] bear no token"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_stream_of_reasoning_alone_has_a_first_token(play: Play, field: str) -> None:
    stream = [(0.01, delta(role="assistant", content=None)), (0.05, delta(**{field: "hm"}, finish="length")), (0.06, DONE)]
    request = one(play(stream))
    assert request.ttft_ms == pytest.approx(50)
    assert request.first_answer_ms is None
    assert not request.failed


@pytest.mark.parametrize("first", [text(""), delta(content=""), delta(role="assistant"), {"choices": []}])
def test_a_chunk_without_a_token_is_not_the_first(play: Play, first: dict[str, Any]) -> None:
    request = one(play([(0.01, first), (0.07, text("a", finish="length")), (0.08, usage(1)), (0.08, DONE)]))
    assert request.ttft_ms == pytest.approx(70)


def test_a_token_without_text_counts_where_the_server_counts_it(play: Play) -> None:
    request = one(play([(0.02, text("", 1)), (0.07, text("a", 2, "length")), (0.08, DONE)]))
    assert request.ttft_ms == pytest.approx(20)


# --- E2: several tokens in a chunk ----------------------------------------------------------------

BUNDLED = [(0.1, "a b c d e", 5)] + [(0.1 + 0.005 * i, " x", 5 + i) for i in range(1, 36)]


@pytest.mark.parametrize("running", [True, False], ids=["the server's running count", "the tokenizer"])
def test_tokens_bundled_in_the_first_chunk_do_not_make_the_others_faster(play: Play, running: bool) -> None:
    stream: list[tuple[float, Any]] = [(at, text(words, count if running else None)) for at, words, count in BUNDLED]
    request = one(play([*stream, (0.28, usage(40)), (0.28, DONE)]), lambda words: len(words.split()))
    assert request.first_chunk_tokens == 5
    assert request.tpot_ms == pytest.approx(5.0)
    assert request.tpot_ms != pytest.approx(175 / 39), "the naive quotient"
    assert request.icl_ms is not None
    assert request.icl_ms.mean == pytest.approx(5.0)


def test_bundles_of_equal_size_are_slower_per_chunk_than_per_token(play: Play) -> None:
    stream = [(0.1 + 0.02 * i, text("a b c d", 4 * (i + 1))) for i in range(11)]
    request = one(play([*stream, (0.31, usage(44)), (0.31, DONE)]))
    assert request.tpot_ms == pytest.approx(5.0)
    assert request.icl_ms is not None
    assert request.icl_ms.p50 == pytest.approx(20.0)


# --- E3: who counts -------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [True, False])
def test_output_tokens_are_the_servers_or_an_estimate(play: Play, sent: bool) -> None:
    asked: list[str] = []

    def count(words: str) -> int:
        asked.append(words)
        return 3

    stream = [(0.1, text("Hel")), (0.2, text("lo")), (0.3, text(" world", finish="stop"))]
    request = one(play([*stream, *([(0.3, usage(2))] if sent else []), (0.3, DONE)]), count)
    assert request.output_tokens == (2 if sent else 3)
    assert request.token_source == (SERVER_USAGE if sent else ESTIMATE)
    assert sent or "Hello world" in asked, "the joined text, not chunk by chunk"
    assert sent == (not summarize(cell([request])).warnings), "an estimate is said"


def test_without_usage_and_tokenizer_nothing_is_made_up(play: Play) -> None:
    request = one(play([(0.1, text("Hello", finish="stop")), (0.1, DONE)]))
    assert (request.output_tokens, request.tpot_ms) == (None, None)
    assert request.ttft_ms == pytest.approx(100)


# --- E4: failures ---------------------------------------------------------------------------------

TOKENS = [(0.1 * i, text(" a")) for i in range(1, 4)]
FAILURES = {
    "an error event": ([*TOKENS, (0.4, {"error": {"message": "engine died"}}), (0.4, DONE)], True, "engine died"),
    "an error event with usage": ([*TOKENS, (0.4, {"error": "x", "usage": {"completion_tokens": 3}}), (0.4, DONE)], True, "x"),
    "an error object": ([*TOKENS, (0.4, {"object": "error", "message": "no memory"}), (0.4, DONE)], True, "no memory"),
    "no token": ([(0.1, DONE)], True, "without a token"),
    "usage alone": ([(0.1, usage(0)), (0.1, DONE)], True, "without a token"),
    "empty": ([], True, "without a token"),
    "broken off": (TOKENS, False, "broke off"),
    "broken off, properly closed": (TOKENS, True, "broke off"),
    "broken off before the first token": ([], False, "broke off"),
    "no JSON": ([*TOKENS, (0.4, "Internal Server Error"), (0.4, DONE)], True, "no JSON"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_200_stream_that_fails_is_no_fast_success(play: Play, name: str) -> None:
    events, whole, reason = FAILURES[name]
    good = play([(0.1, text(" a")), (0.15, text(" b", finish="length")), (0.15, usage(2)), (0.15, DONE)])
    measured = repeat(observe([play(events, whole=whole), good]), set())
    summary = summarize(Cell(2, 3, 2, [measured]))
    assert (summary.requests, summary.failed, summary.failure_share) == (2, 1, 0.5)
    assert reason in summary.invalid
    assert "1 of 2 requests failed" in summary.invalid
    assert summary.ttft_ms == [pytest.approx(100)], "failures are outside latency"
    assert measured.window is not None
    assert measured.window.tokens <= 2, "and outside throughput"
    assert summary.goodput["llama2-70b server"].share == 0.5, "nor is a failure good"


def test_an_http_error_is_a_failure() -> None:
    connection = Connection()
    connection.sent.add(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 1.0)
    connection.received.add(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", 1.1)
    assert one(connection).reason == "HTTP 503: busy"
    silent = Connection()
    silent.sent.add(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 1.0)
    assert "no answer" in one(silent).reason


def test_few_failures_leave_a_run_valid_and_are_shown(play: Play) -> None:
    good = Request(0.0, 3, None, 4, SERVER_USAGE, 1, 100.0, 100.0, 10.0, None, 130.0)
    bad = Request(0.0, None, None, None, "", None, None, None, None, None, None, True, "x")
    summary = summarize(cell([good] * 199 + [bad]))
    assert summary.invalid == ""
    assert summary.failure_share == 1 / 200
    assert summarize(cell([good] * 97 + [bad] * 3)).invalid


def test_failures_on_the_wire(tiny_driver: Any) -> None:
    """A server breaks off, sends an error, or answers: the tap says what happened, whatever the client makes of it."""

    def script(body: dict[str, Any]) -> Any:
        yield 0.0, chunk(body, " a")
        if body["prompt"] == "break":
            yield 0.0, BREAK
        if body["prompt"] == "error":
            yield 0.0, {"error": {"message": "out of memory"}}
        yield 0.0, "[DONE]"

    with mock_server(script) as mock, tap(mock.base_url) as wire:
        tiny_driver.run(Load(wire.base_url, "mock", Path(), ["break", "error", "fine"], 4, 1))
        reasons = sorted(o.request.reason for o in observe(wire.take()))
    assert reasons == ["", "error inside the stream: out of memory", "the stream broke off"]


# --- nonsense: every reply that no server of this interface sends is a failed request with its reason -------------


def answered(
    status: bytes = b"HTTP/1.1 200 OK", body: bytes = b"", head: bytes = b"Content-Type: text/event-stream"
) -> Connection:
    connection = Connection()
    connection.sent.add(b'POST /v1/completions HTTP/1.1\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}', 1.0)
    connection.received.add(b"\r\n".join([status, head, b"", body]), 1.1)
    connection.ended_s = 1.2
    return connection


WORD = '{"choices": [{"text": " a"}]}'
END = '{"choices": [{"text": "", "finish_reason": "stop"}]}'
EVENTS = {
    "a choice that is a number": ('{"choices": [1]}', "a choice that is 1"),
    "choices that are a number": ('{"choices": 5}', "choices is 5"),
    "choices that are an object": ('{"choices": {"text": "a"}}', "choices is"),
    "a text that is a number": ('{"choices": [{"text": 5}]}', "text is 5"),
    "a delta that is a string": ('{"choices": [{"delta": "x"}]}', "delta is x"),
    "a content that is a list": ('{"choices": [{"delta": {"content": [1]}}]}', "content is"),
    "reasoning that is a number": ('{"choices": [{"delta": {"reasoning": 1}}]}', "reasoning is 1"),
    "tool calls that are a number": ('{"choices": [{"delta": {"tool_calls": 3}}]}', "tool_calls is 3"),
    "usage that is a string": ('{"usage": "x"}', "usage is x"),
    "usage that is a list": ('{"usage": [1]}', "usage is"),
    "-7 tokens": ('{"choices": [{"text": "b"}], "usage": {"completion_tokens": -7}}', "completion_tokens is -7"),
    "tokens as a string": ('{"usage": {"completion_tokens": "7"}}', "completion_tokens is 7"),
    "tokens as a truth": ('{"usage": {"prompt_tokens": true}}', "prompt_tokens is True"),
    "1.5 tokens": ('{"usage": {"prompt_tokens": 1.5}}', "prompt_tokens is 1.5"),
    "1e999 tokens": ('{"usage": {"completion_tokens": 1e999}}', "1e999 is too large"),
    "tokens of 5000 digits": ('{"usage": {"completion_tokens": ' + "9" * 5000 + "}}", "5,000 digits"),
    "details that are a string": ('{"usage": {"prompt_tokens_details": "x"}}', "prompt_tokens_details is x"),
    "more cached than sent": (
        '{"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}',
        "4 of 3 prompt tokens cached",
    ),
    "a count that falls": (
        '{"choices": [], "usage": {"completion_tokens": 5}}\n\ndata: {"choices": [], "usage": {"completion_tokens": 2}}',
        "2 tokens after 5",
    ),
    "deep JSON": ("[" * 100_000, "nested too deeply"),
    "a key twice": ('{"choices": [], "choices": []}', "occurs twice"),
    "a number": ("7", "no JSON object"),
    "half an object": ('{"choices": [', "no JSON"),
    "null as an error that is an object": ('{"error": {"message": null}}', "message"),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_that_is_nonsense_is_a_failure_with_its_reason(name: str) -> None:
    event, reason = EVENTS[name]
    body = "".join(f"data: {data}\n\n" for data in (WORD, event, END, "[DONE]")).encode()
    request = one(answered(body=body), lambda words: len(words))
    assert request.failed
    assert reason in request.reason
    assert len(request.reason) < 300
    good = "".join(f"data: {data}\n\n" for data in (WORD, END, "[DONE]")).encode()
    assert not one(answered(body=good), lambda words: len(words)).failed


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (b"HTTP/1.1 abc", b"A: b"),
        (b"HTTP/1.1", b"A: b"),
        (b"", b"A: b"),
        (b"HTTP/1.1 99999 OK", b"A: b"),
        (b"HTTP/1.1 -1 x", b"A: b"),
        (b"garbage \xff\xfe", b"A: b"),
        (b"HTTP/1.1 200 OK", b"Content-Length: x"),
        (b"HTTP/1.1 200 OK", b"Content-Length: -5"),
        (b"HTTP/1.1 200 OK", b"Content-Length: " + b"9" * 30),
        (b"HTTP/1.1 200 OK", b"Content-Length: 500"),
        (b"HTTP/1.1 200 OK", b"Transfer-Encoding: chunked"),
        (b"HTTP/1.1 500 No", b"Content-Length: 9"),
    ],
)
@pytest.mark.parametrize("body", [b"", b"-5\r\nabc\r\n0\r\n\r\n", b"0x5\r\nabcde\r\n", b"f_f\r\nabc", b"\xff" * 40])
def test_an_answer_that_is_no_http_is_a_failure(status: bytes, head: bytes, body: bytes) -> None:
    request = one(answered(status, body, head))
    assert request.failed
    assert request.reason


def test_half_a_surrogate_is_counted_as_a_character() -> None:
    body = b'data: {"choices": [{"text": "\\ud800 a", "finish_reason": "stop"}]}\n\n'
    request = one(answered(body=body), lambda words: len(words.encode()))
    assert request.output_tokens == 3


def test_a_server_that_answers_nonsense_costs_its_own_requests_alone(tiny_driver: Any) -> None:
    def script(body: dict[str, Any]) -> Any:
        number = int(body["prompt"])
        yield 0.0, chunk(body, " a")
        if number < len(EVENTS):
            yield 0.0, [event for event, _ in EVENTS.values()][number]
        yield 0.0, chunk(body, "", finish="stop")
        yield 0.0, "[DONE]"

    with mock_server(script) as mock, tap(mock.base_url) as wire:
        tiny_driver.run(Load(wire.base_url, "mock", Path(), [str(n) for n in range(len(EVENTS) + 6)], 4, 2))
        measured = repeat(observe(wire.take(), lambda words: len(words)), set())
    summary = summarize(Cell(2, None, None, [measured]))
    assert (summary.requests, summary.failed) == (len(EVENTS) + 6, len(EVENTS))


# --- what the server counts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "warned"),
    [
        ([64] * 4, ""),
        ([72] * 4, "counted 72 prompt tokens in 4 of 4 requests, 64 were sent"),
        ([64, 65, 72, 64], "counted 65 to 72 prompt tokens in 2 of 4"),
        ([None] * 4, ""),
    ],
)
def test_the_servers_count_of_prompt_tokens_is_used_and_a_difference_is_said(told: list[int | None], warned: str) -> None:
    requests = [Request(0.0, n, None, 4, SERVER_USAGE, 1, 100.0, 100.0, 10.0, None, 130.0) for n in told]
    summary = summarize(Cell(2, 64, 4, [Repeat(1.0, requests, None, None, None, 0, 0)]))
    known = [n for n in told if n is not None]
    assert summary.input_tokens == (sum(known) / len(known) if known else None)
    assert len(summary.warnings) == bool(warned)
    assert not warned or warned in summary.warnings[0]
    drawn = summarize(Cell(2, 64, 4, [Repeat(1.0, requests, None, None, None, 0, 0)], drawn=True))
    assert not drawn.warnings


# --- E6: no success -------------------------------------------------------------------------------


def test_without_a_success_everything_is_null_with_its_reason() -> None:
    bad = Request(0.0, None, None, None, "", None, None, None, None, None, None, True, "refused")
    for requests in ([bad] * 3, []):
        summary = summarize(cell(requests))
        assert summary.invalid
        for quantiles in summary.quantiles.values():
            assert all(q.value is None and q.n == 0 and q.note for q in quantiles.values())
        assert summary.tokens_per_s == [None]
        assert summary.ttft_ms == summary.tpot_ms == [None]
        assert (summary.output_tokens, summary.cached_share, summary.joules_per_token) == (None, None, None)
    assert repeat([], set()).requests == []


def test_answers_of_no_or_one_token_have_no_time_per_token(play: Play) -> None:
    request = one(play([(0.1, text("a", 1, "stop")), (0.1, DONE)]))
    assert request.tpot_ms is None
    assert request.icl_ms is not None
    assert request.icl_ms.mean is None
    assert goodput([cell([request]).repeats[0]], 200, 1).share == 1.0


@pytest.mark.parametrize(
    ("n", "q", "there"),
    [(99, 0.99, False), (100, 0.99, True), (3, 0.99, False), (9, 0.9, False), (10, 0.9, True), (1, 0.5, False), (2, 0.5, True)],
)
def test_a_percentile_needs_requests_and_says_how_many(n: int, q: float, there: bool) -> None:
    found = quantile([float(i) for i in range(n)], q)
    assert found.n == n
    assert (found.value is not None) == there
    if there:
        assert found.value == pytest.approx(q * (n - 1))
    else:
        assert f"n is {n}" in found.note


# --- E12: the window ------------------------------------------------------------------------------


def test_throughput_counts_the_tokens_inside_the_window_alone() -> None:
    """Two clients; one request straddles each edge of the 10 s in which both are busy."""
    spans = [(5.0, 13.0), (10.0, 18.0), (13.0, 25.0), (18.0, 20.0)]
    events = [(start + 0.5 + i, 1.0) for start, end in spans for i in range(int(end - start))]
    window = steady_window(spans, events)
    assert window is not None
    assert (window.start_s, window.end_s) == (10.0, 20.0)
    assert window.tokens == 3 + 8 + 7 + 2
    assert sum(tokens for _, tokens in events) == 30


def test_an_event_on_an_edge_counts_once() -> None:
    events = [(float(i), 1.0) for i in range(11)]
    assert tokens_inside(events, 0, 5) + tokens_inside(events, 5, 10) == 10


def test_the_turnaround_of_a_client_does_not_end_the_window() -> None:
    spans = [(10.0 * i, 10.0 * i + 9.9) for i in range(5)]
    window = steady_window(spans, [])
    assert window is not None
    assert (window.start_s, window.end_s) == (0.0, 49.9)
    broken = steady_window([(0.0, 10.0), (15.0, 25.0), (25.0, 35.0)], [])
    assert broken is not None
    assert (broken.start_s, broken.end_s) == (15.0, 35.0)


def cell(requests: list[Request]) -> Cell:
    return Cell(4, 3, None, [Repeat(1.0, requests, None, None, None, 0, 0)])


def test_waves_that_overlap_by_a_rounding_error_are_no_peak() -> None:
    """Three waves of 16 equal requests; each begins before the one in front has ended, by a last digit."""
    spans = [(wave * 1.0, wave * 1.0 + 1.0 + 1e-13) for wave in range(3) for _ in range(16)]
    events = [(start + 0.01 * k, 1.0) for start, _ in spans for k in range(1, 101)]
    window = steady_window(spans, events)
    assert window is not None
    assert window.seconds == pytest.approx(3.0)
    assert window.tokens / window.seconds == pytest.approx(1600)
