"""Bytes with times -> exchanges: whatever way the bytes were cut up, the same events at the time of their last byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.serving.mock_server import mock_server
from harness.serving.tap import tap
from harness.serving.wire import Connection, exchanges
from qad.errors import UsageError

REQUEST = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}'
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"b\r\ndata: one\n\n\r\n15\r\ndata: two\r\n\r\n: ping\n\n\r\n5;x=y\r\ndata:\r\n7\r\n three\n\r\n1\r\n\n\r\n0\r\n\r\n"
)
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def record(sent: bytes, received: bytes, step: int) -> Connection:
    """Byte i of the answer arrives at time i (of its piece's last byte)."""
    connection = Connection()
    connection.sent.add(sent, -1.0)
    for at in range(0, len(received), step):
        piece = received[at : at + step]
        connection.received.add(piece, float(at + len(piece) - 1))
    return connection


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, 10_000])
def test_events_have_the_time_of_their_last_byte(step: int) -> None:
    (exchange,) = exchanges(record(REQUEST, STREAM, step))
    assert [event.data for event in exchange.events] == ["one", "two", "three"]
    assert (exchange.body, exchange.status, exchange.whole) == ({"prompt": "a"}, 200, True)
    ends = [STREAM.index(b"one\n\n") + 4, STREAM.index(b"two\r\n\r\n") + 6, STREAM.index(b"1\r\n\n") + 3]
    expected = [min(len(STREAM) - 1, (end // step + 1) * step - 1) for end in ends]
    assert [event.time_s for event in exchange.events] == [float(time) for time in expected]


@pytest.mark.parametrize("step", [1, 5, 10_000])
def test_requests_of_one_connection_get_their_own_answers(step: int) -> None:
    first, second, third = exchanges(record(GET + REQUEST + REQUEST, PLAIN + STREAM + STREAM, step))
    assert (first.method, first.path, first.events, first.text) == ("GET", "/health", [], "{}")
    assert [event.data for event in second.events] == [event.data for event in third.events] == ["one", "two", "three"]
    assert first.end_s <= second.events[0].time_s <= second.end_s <= third.events[0].time_s


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
def test_an_answer_that_is_cut_off_anywhere_is_not_whole(cut: int) -> None:
    connection = record(REQUEST, STREAM[:cut], 10_000)
    connection.ended_s = 5000.0
    (exchange,) = exchanges(connection)
    assert not exchange.whole
    assert exchange.end_s == 5000.0
    assert [event.data for event in exchange.events] == ["one", "two", "three"][: len(exchange.events)]


def test_an_answer_that_is_no_http_is_not_whole() -> None:
    damaged = STREAM.replace(b"15\r\n", b"zz\r\n")
    (exchange,) = exchanges(record(REQUEST, damaged, 10_000))
    assert not exchange.whole
    assert [event.data for event in exchange.events] == ["one"]


def test_a_body_until_the_end_of_the_connection_is_read() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: a\n\ndata: [DONE]\n\n"
    (exchange,) = exchanges(record(REQUEST, answer, 4))
    assert [event.data for event in exchange.events] == ["a", "[DONE]"]


def test_separators_inside_strings_do_not_cut_an_event() -> None:
    data = json.dumps({"a": "x\u2028y\x85z"}, ensure_ascii=False)
    body = f"data: {data}\n\n".encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    (exchange,) = exchanges(record(REQUEST, answer, 3))
    assert [json.loads(event.data) for event in exchange.events] == [{"a": "x\u2028y\x85z"}]


def test_the_tap_passes_on_what_it_hears(tiny_driver: Any) -> None:
    import urllib.request

    with mock_server() as mock, tap(mock.base_url + "/v1") as wire:
        direct = urllib.request.urlopen(f"{mock.base_url}/v1/models").read()
        assert urllib.request.urlopen(f"{wire.base_url}/v1/models").read() == direct
        (connection,) = wire.take()
        assert [e.text.encode() for e in exchanges(connection)] == [direct]
        assert wire.take() == []


def test_a_server_that_is_not_there_is_no_answer(tiny_driver: Any) -> None:
    from pathlib import Path

    from harness.serving.drivers import Load
    from harness.serving.observe import observe

    with mock_server() as mock:
        gone = mock.base_url
    with tap(gone) as wire:
        tiny_driver.run(Load(wire.base_url, "mock", Path(), ["a"], 4, 1))
        (observed,) = observe(wire.take())
    assert observed.request.failed
    assert "no answer" in observed.request.reason


@pytest.mark.parametrize("url", ["https://host:1", "host:80", "file:///tmp"])
def test_an_address_that_cannot_be_observed_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="cannot be observed"), tap(url):
        pass
