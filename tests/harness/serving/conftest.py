"""Streams with known times, a load client that is as small as can be, and a tokenizer of words."""

from __future__ import annotations

import http.client
import itertools
import json
import string
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.serving.drivers import ENDPOINTS, STREAM_OPTIONS, Load
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

    def build(
        events: Sequence[tuple[float, Any]], *, start_s: float = 100.0, whole: bool = True, **body: Any
    ) -> Connection:  # fmt: skip
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


class TinyDriver:
    """Sends every prompt once, `concurrency` at a time, and reads the answers without looking at them."""

    name = "tiny driver"

    def __init__(self, limit: int | None = None) -> None:
        self.loads: list[Load] = []
        self.limit = limit

    def run(self, load: Load) -> None:
        self.loads.append(load)
        workers = min(load.concurrency, self.limit or load.concurrency)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda prompt: self._one(load, prompt), load.prompts))

    def _one(self, load: Load, prompt: str) -> None:
        connection = http.client.HTTPConnection(urlsplit(load.base_url).netloc, timeout=120)
        body = {"model": load.model, "prompt": prompt, "max_tokens": load.output_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": STREAM_OPTIONS}  # fmt: skip
        try:
            connection.request("POST", ENDPOINTS[load.endpoint], json.dumps(body))
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()


@pytest.fixture
def tiny_driver() -> TinyDriver:
    return TinyDriver()


class WordTokenizer:
    """One word, one token."""

    def __init__(self) -> None:
        self.vocabulary = [f" {a}{b}" for a, b in itertools.product(string.ascii_lowercase, repeat=2)]

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=text.split())

    def __len__(self) -> int:
        return len(self.vocabulary)

    def batch_decode(self, ids: list[list[int]]) -> list[str]:
        return ["".join(self.vocabulary[i] for i in row) for row in ids]


@pytest.fixture(scope="session")
def words() -> WordTokenizer:
    return WordTokenizer()
