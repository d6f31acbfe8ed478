"""lm-eval's back-end for a transformers model in this process, which also tells tokens, finish reason and thinking."""

from __future__ import annotations

import bisect
import collections
import functools
from collections.abc import Callable
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from harness.accuracy.journal import Answer
from harness.accuracy.quiet import quiet
from harness.accuracy.resumed import request_seed
from harness.records.record import LENGTH, STOP


class InMemory(HFLM):
    """think_end: a reasoning model's: a task's stop strings then do not end a generation, they cut what is scored.

    Sampled answers draw from a generator seeded by `seed` and the batch's first prompt; torch's own state is left as it was.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int, think_end: str | None) -> None:
        with quiet():
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self.think_end, self.seed, self.said = think_end, 0, collections.deque[Answer]()
        special = tokenizer.convert_tokens_to_ids(think_end) if think_end else None
        self._think_id = special if special in (tokenizer.all_special_ids or []) else None

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        prompt_len = context.shape[1]
        stops = [] if self.think_end else stop
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices, enabled=bool(settings.get("do_sample"))):
            if settings.get("do_sample"):
                torch.manual_seed(request_seed(self.seed, ",".join(map(str, context[0].tolist()))))
            out: Tensor = super()._model_generate(context, max_length, stops, **settings)
        for ids in out[:, prompt_len:].tolist():
            self.said.append(self._answer(ids, max_length - prompt_len, stops))
        return out

    def _answer(self, ids: list[int], room: int, stops: list[str]) -> Answer:
        """ids: generated, with whatever stands behind the end: a batch goes on until its last answer is whole."""
        ends = self._end_ids()
        end = next((i for i, token in enumerate(ids) if token in ends), None)
        body = ids if end is None else ids[:end]
        count = len(ids) if end is None else end + 1
        stopped = _first(len(body), lambda n: any(s and s in self._text(body[:n]) for s in stops))
        if stopped is not None:
            body, count = body[:stopped], stopped
        finish = STOP if end is not None or stopped is not None or len(ids) < room else LENGTH
        return Answer(self._text(body), count, finish, self._thinking(body, finish))

    def _thinking(self, ids: list[int], finish: str) -> int | None:
        mark = self.think_end
        if mark is None:
            return None
        found = _first(len(ids), lambda n: mark in self._text(ids[:n]))
        return found if found is not None else len(ids) if finish == LENGTH else 0

    def _text(self, ids: list[int]) -> str:
        """Without special tokens, but for the one that ends the thinking."""
        if self._think_id is None or self.think_end is None:
            return str(self.tok_decode(ids))
        parts: list[list[int]] = [[]]
        for token in ids:
            if token == self._think_id:
                parts.append([])
            else:
                parts[-1].append(token)
        return self.think_end.join(str(self.tok_decode(part)) for part in parts)

    @functools.cache  # noqa: B019 - one back-end lives as long as its measurement
    def _end_ids(self) -> frozenset[int]:
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        own = named if isinstance(named, list) else [named]
        return frozenset(token for token in (*own, self.tokenizer.eos_token_id) if token is not None)


def _first(count: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest n <= count for which a condition holds that holds for every larger one; None if for none."""
    found = bisect.bisect_left(range(count + 1), True, key=holds)
    return found if found <= count else None
