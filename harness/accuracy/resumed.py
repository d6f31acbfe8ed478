"""Stands between lm-eval and one of its back-ends: answers what is known, asks for the rest, keeps each answer as it comes.

lm-eval tells its response cache of every answer (`cache_hook.add_partial`); that is where answers are taken from. A back-end of
this tool also leaves the whole `Answer` (tokens, finish reason, thinking) in `said` before it does; what is scored is cut
from that, alike for every engine.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from harness.accuracy.journal import Answer, Journal, as_ended, scored_text
from harness.records.record import ERROR
from qad.artifact import canonical
from qad.errors import DataError

GENERATE = "generate_until"
KINDS = ("loglikelihood", "loglikelihood_rolling", GENERATE)


def request_seed(seed: int, prompt: str) -> int:
    """The seed of one request, 0 .. 2**31 - 1: another one for every prompt and sample, the same for every arm."""
    return int.from_bytes(hashlib.sha256(f"{seed}\x1f{prompt}".encode("utf-8", "replace")).digest()[:4], "big") >> 1


class Asking:
    """Attaches to a back-end `lm`, which has `said` (deque of Answer) and `seed`.

    progress: called with (requests answered, requests of this kind in all). seed: of the pass that is running; set it before
    each. think_end: see `scored_text`.
    """

    def __init__(
        self, lm: Any, journal: Journal, think_end: str | None, progress: Callable[[int, int], object] | None = None
    ) -> None:
        self.lm, self.journal, self.think_end, self.progress = lm, journal, think_end, progress
        self.seed = 0
        self.failures: collections.Counter[str] = collections.Counter()
        self._settings: Any = None
        self._done = self._total = 0
        lm.set_cache_hook(self)
        for kind in KINDS:
            ask = functools.partial(getattr(type(lm), kind), lm)  # the back-end's own, whoever was attached before
            setattr(lm, kind, self._asked(kind, ask))

    def answer(self, arguments: Sequence[Any]) -> Answer:
        """What was said to a generation request with these arguments under the current seed."""
        return Answer(**self.journal[self._key(GENERATE, arguments)])

    def add_partial(self, kind: str, arguments: Sequence[Any], response: Any) -> None:
        """lm-eval's hook. It may name changed generation settings; the ones that were asked with count."""
        if kind == GENERATE:
            text = arguments[0] if isinstance(arguments[0], str) else ""  # a conversation's prompt is the server's
            most = int((self._settings or {}).get("max_gen_toks", self.lm.max_gen_toks))
            said = as_ended(self.lm.said.popleft(), text, self.think_end, most)
            self.failures.update([said.reason or "no reason told"] if said.finish == ERROR else [])
            key = self._key(kind, (arguments[0], self._settings))
            self.journal.put(key, dataclasses.asdict(said), keep=said.finish != ERROR)
        else:
            value = list(response) if isinstance(response, tuple) else response
            self.journal.put(self._key(kind, arguments), value)
        self._done += 1
        if self.progress:
            self.progress(self._done, self._total)

    def _key(self, kind: str, arguments: Sequence[Any]) -> str:
        prompt = getattr(arguments[0], "prompt", arguments[0])  # a chat request is JSON in a tuple of its own
        return self.journal.key(kind, [prompt, *arguments[1:], self.seed if kind == GENERATE else None])

    def _asked(self, kind: str, ask: Callable[..., Any]) -> Callable[..., list[Any]]:
        def run(requests: list[Any], *_: Any, **options: Any) -> list[Any]:
            keys = [self._key(kind, request.args) for request in requests]
            missing = [r for r, key in zip(requests, keys, strict=True) if key not in self.journal]
            self._total = len(requests)
            self._done = len(requests) - len(missing)
            if self.progress and self._done:
                self.progress(self._done, self._total)
            for settings, group in _by_settings(kind, missing):
                _require_fit(kind, self.lm, group)
                self._settings, self.lm.seed = settings, self.seed
                self.lm.said.clear()
                ask(group, **options)
            return [self._response(kind, r, key) for r, key in zip(requests, keys, strict=True)]

        return run

    def _response(self, kind: str, request: Any, key: str) -> Any:
        found = self.journal[key]
        if kind == GENERATE:
            return scored_text(Answer(**found), _stops(request.args[1]), self.think_end)
        return tuple(found) if isinstance(found, list) else found


def _stops(settings: dict[str, Any]) -> list[str]:
    until = settings.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def _by_settings(kind: str, requests: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Requests in groups of equal generation settings."""
    if kind != GENERATE:
        return [(None, requests)] if requests else []
    groups: dict[str, tuple[Any, list[Any]]] = {}
    for request in requests:
        groups.setdefault(canonical(request.args[1]), (request.args[1], []))[1].append(request)
    return list(groups.values())


def _require_fit(kind: str, lm: Any, requests: list[Any]) -> None:
    """Raises DataError for a prompt that a back-end would cut on the left, without a word, to make it fit."""
    if kind == "loglikelihood_rolling":
        return  # windows slide over a long text
    for request in requests:
        prompt = getattr(request.args[0], "prompt", request.args[0])
        text = prompt if kind == GENERATE else prompt + request.args[1]
        limit = lm.max_length
        new = int(request.args[1].get("max_gen_toks", lm.max_gen_toks)) if kind == GENERATE else 0
        if len(text.encode("utf-8", "replace")) + 2 <= limit - new:
            continue  # a token is at least one byte
        ids = lm.tok_encode(text)
        if isinstance(ids, list) and len(ids) > limit - new:
            generated = f" and up to {new:,} generated ones" if new else ""
            raise DataError(
                f"task {request.task_name}: a prompt has {len(ids):,} tokens{generated}, the model takes {limit:,}: lower "
                "n_shot or max_gen_toks, or give the engine a longer context"
            )
