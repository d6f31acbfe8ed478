"""A load client that is as small as can be, and a tokenizer of words."""

from __future__ import annotations

import http.client
import itertools
import json
import string
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from harness.serving.drivers import ENDPOINTS, STREAM_OPTIONS, Load


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
        body = {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": load.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": STREAM_OPTIONS,
        }
        try:
            connection.request("POST", ENDPOINTS[load.endpoint], json.dumps(body))
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()


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
