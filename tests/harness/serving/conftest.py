"""Streams with known times, and what else tests of serving share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from small_client import TinyDriver, WordTokenizer

from harness.serving.wire import Connection

Play = Callable[..., Connection]


def post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture(scope="session")
def play() -> Play:
    """One request at `start_s` and its events, (seconds after it, dict or string), as the tap records them.

    whole: the answer is closed as HTTP asks for; otherwise the connection ends after the last event.
    """

    def build(events: Sequence[tuple[float, Any]], *, start_s: float = 100.0, whole: bool = True, **body: Any) -> Connection:
        connection = Connection()
        asked = {"prompt": "p", "temperature": 0, "ignore_eos": True, "stream": True, **body}
        connection.sent.add(post(asked), start_s)
        connection.received.add(HEAD, start_s)
        last = start_s
        for after_s, event in events:
            last = start_s + after_s
            text = event if isinstance(event, str) else json.dumps(event)
            connection.received.add(chunked(f"data: {text}\n\n".encode()), last)
        if whole:
            connection.received.add(b"0\r\n\r\n", last)
        else:
            connection.ended_s = last
        return connection

    return build


@pytest.fixture
def tiny_driver() -> TinyDriver:
    return TinyDriver()


@pytest.fixture(scope="session")
def words() -> WordTokenizer:
    return WordTokenizer()
