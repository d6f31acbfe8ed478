"""lm-eval's back-ends for an OpenAI server, with what they leave to chance made certain.

- Prompts are encoded as the in-memory back-end does (one BOS where the model wants one) and sent as ids; conversations go as
  they are, and the server's template wraps them.
- Nothing is cut on the left: the context length is asked from the server, and prompts that do not fit are refused.
- Every request carries a seed of its own, every answer its finish reason and the server's token count.
- A task's stop strings are not sent for reasoning models; they cut what is scored.
- A request that fails is tried again, then counted as failed: no answer, and no wrong one that nobody notices.
"""

from __future__ import annotations

import asyncio
import collections
import importlib.util
import json
import math
from collections.abc import Callable
from typing import Any

from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from harness.accuracy.journal import Answer
from harness.accuracy.resumed import request_seed
from harness.engines.answers import served_models
from harness.records.record import ERROR, LENGTH, SERVER, STOP, Engine
from harness.serving.observe import token_counts
from qad.errors import DataError, UsageError
from qad.untrusted import clean, count, is_number, mapping

TRIES = 3
_WAIT_S = 0.5  # doubled after every try
_FINAL = {400, 401, 403, 404, 405, 413, 422}  # of HTTP: the same request is refused again
_ABOVE_ZERO = 1e-3  # a log-probability may round to slightly above 0
# finish_reason of servers: cut off by the limit; no answer at all. Others are an end.
_CUT = {LENGTH, "max_tokens"}
_BROKEN = {ERROR, "abort", "aborted", "cancelled", "timeout", "content_filter", "load", "not_finished"}


def open_server(
    url: str,
    tokenizer: str,
    *,
    chat: bool,
    think_end: str | None,
    max_length: int | None = None,
    concurrency: int = 16,
    model: str | None = None,
) -> tuple[Any, Engine]:
    """A back-end for `harness.accuracy.scores.measure_suite`, and the record's engine.

    url: http://host:port, with or without /v1. tokenizer: the model's folder. chat: conversations instead of prompts. model: the
    served name; None: the only one. max_length: the context in tokens; None: what the server says of itself.
    Raises UsageError for a server that does not answer, serves several models, or does not tell its context length.
    """
    if importlib.util.find_spec("tenacity") is None or importlib.util.find_spec("aiohttp") is None:
        raise UsageError("asking a server needs two more packages: pip install nvfp4-qad[server]")
    root = url.rstrip("/").removesuffix("/v1")
    found = _served(root, model)
    length = max_length or count(found.get("max_model_len"))
    if not length:
        raise UsageError(f"{root} does not tell its context length: give --max-model-len")
    kind = _ChatServer if chat else _Server
    path = "chat/completions" if chat else "completions"
    backend = kind(
        base_url=f"{root}/v1/{path}",
        model=found["id"],
        tokenizer=tokenizer,
        tokenizer_backend="huggingface",
        max_length=length + 1,
        num_concurrent=max(2, concurrency),
        max_retries=1,
        batch_size=1,
        timeout=3600,
        **({"tokenized_requests": False} if chat else {}),
    )
    backend.think_end = think_end
    return backend, _engine(found, path)


def describe(url: str, model: str | None, path: str) -> tuple[str, Engine]:
    """The served name and the record's engine. Raises UsageError as `open_server`."""
    found = _served(url.rstrip("/").removesuffix("/v1"), model)
    return found["id"], _engine(found, path)


def _engine(found: dict[str, Any], path: str) -> Engine:
    version = str(found.get("owned_by") or "unknown")
    return Engine(SERVER, version, "", "", f"{version}, {path}", emulated=False)


def _served(root: str, model: str | None) -> dict[str, Any]:
    try:
        entries = served_models(root, timeout_s=30, proxied=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{root} does not answer as an OpenAI server ({error}): check --server") from error
    names = [entry["id"] for entry in entries]
    chosen = [entry for entry in entries if model in (None, entry["id"])]
    if len(chosen) != 1:
        raise UsageError(f"{root} serves {', '.join(names) or 'no model'}: give one of them with --served-model")
    entry: dict[str, Any] = chosen[0]
    return entry


class _Telling:
    """What both back-ends share. Answers are left in `said` right before lm-eval's hook is told of them."""

    seed = 0
    think_end: str | None = None
    broken = ""

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task does not say how many."""
        return int(self._max_gen_toks)  # type: ignore[attr-defined]

    def _create_payload(self, messages: Any, generate: bool = False, gen_kwargs: Any = None, **options: Any) -> Any:
        payload = super()._create_payload(messages, generate=generate, gen_kwargs=gen_kwargs, **options)  # type: ignore[misc]
        if generate:
            payload["seed"] = request_seed(self.seed, json.dumps(messages, ensure_ascii=False))
            stops = [stop for stop in payload.get("stop") or () if stop]
            payload.pop("stop", None)
            if stops and not self.think_end:
                payload["stop"] = stops[:4]
        return payload

    async def amodel_call(self, *args: Any, **options: Any) -> Any:
        generates = options.get("generate", True)
        unscored = [(math.nan, False) for _ in options["cache_keys"]]
        if self.broken and not generates:
            return unscored
        for attempt in range(TRIES):
            try:
                return await super().amodel_call(*args, **options)  # type: ignore[misc]
            except (DataError, asyncio.CancelledError):
                raise
            except Exception as error:
                reason = clean(f"{type(error).__name__}: {getattr(error, 'message', '') or error}", 120)
                status = getattr(error, "status", None)
                reason = reason if status is None else f"HTTP {status}, {reason}"
                if attempt + 1 < TRIES and status not in _FINAL:
                    await asyncio.sleep(_WAIT_S * 2**attempt)
                    continue
                if not generates:
                    self.broken = f"the server failed {attempt + 1} times to score a prompt ({reason}): look at its log"
                    return unscored
                break
        for key in options["cache_keys"]:
            self.said.append(Answer("", None, ERROR, reason=reason))
            self.cache_hook.add_partial("generate_until", key, "")  # type: ignore[attr-defined]
        return ["" for _ in options["cache_keys"]]

    def _loglikelihood_tokens(self, *args: Any, **options: Any) -> Any:
        """Raises DataError where a prompt cannot be scored; a task that raised by itself would be printed for every request."""
        self.broken = ""
        found = super()._loglikelihood_tokens(*args, **options)  # type: ignore[misc]
        if self.broken:
            raise DataError(self.broken)
        return found

    def _tell(self, outputs: Any, read: Callable[[dict[str, Any]], tuple[str, bool]]) -> list[str]:
        """Keep the one answer of a reply. read: the text of a choice, and whether it is thinking that was not over. Raises
        ValueError for a reply that is none."""
        reply = mapping(outputs)
        choices = reply.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise ValueError(f"a reply with {clean(choices, 40)} for one choice")
        reason = choices[0].get("finish_reason") or ""
        if not isinstance(reason, str) or reason in _BROKEN:
            raise ValueError(f"a reply that ended by {clean(reason, 40)}")
        said, cut = read(choices[0])
        finish = LENGTH if cut or reason in _CUT else STOP if reason else ""
        details = mapping(mapping(reply.get("usage")).get("completion_tokens_details"))
        tokens, thinking = token_counts(reply).get("completion_tokens"), count(details.get("reasoning_tokens"))
        if thinking is None and self.think_end:
            thinking = tokens if finish == LENGTH and self.think_end not in said else None
        self.said.append(Answer(said, tokens, finish, thinking))
        return [said]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.said = collections.deque[Answer]()


class _Server(_Telling, LocalCompletionsAPI):
    def tok_encode(self, string: Any, *_: Any, **__: Any) -> Any:
        """As the in-memory back-end does: the tokenizer's own special tokens, but no second BOS."""
        if not isinstance(string, str):
            return [self.tok_encode(one) for one in string]
        bos = self.tokenizer.bos_token
        return self.tokenizer.encode(string, add_special_tokens=not (bos and string.startswith(bos)))

    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        return self._tell(outputs, lambda choice: (_words(choice, "text"), False))

    def parse_logprobs(self, outputs: Any, tokens: Any = None, ctxlens: Any = None, **_: Any) -> list[tuple[float, bool]]:
        """Raises ValueError where not every token that was sent has a log-probability, and one was generated."""
        for choice, sent in zip(outputs["choices"], tokens, strict=True):
            told, top = choice["logprobs"]["token_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:]
            values = [*told, *(value for named in top for value in named.values())]
            if len(told) != len(sent) or len(top) != len(sent) or not all(is_number(v) and v < _ABOVE_ZERO for v in values):
                raise ValueError(f"{len(told) + 1} log-probabilities of {len(sent)} + 1 tokens, or some that are none")
        found: list[tuple[float, bool]] = super().parse_logprobs(outputs=outputs, tokens=tokens, ctxlens=ctxlens)
        return found


class _ChatServer(_Telling, LocalChatCompletion):
    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        def read(choice: dict[str, Any]) -> tuple[str, bool]:
            message = choice.get("message")
            if not isinstance(message, dict):
                raise ValueError(f"a reply whose message is {clean(message, 40)}")
            thought, said = (_words(message, "reasoning_content") or _words(message, "reasoning"), _words(message, "content"))
            if not thought or not self.think_end:
                return said, False
            # A server that takes the thinking apart: put together again. With nothing behind it, it was not over.
            return (f"{thought}{self.think_end}{said}", False) if said else (thought, True)

        return self._tell(outputs, read)


def _words(holder: dict[str, Any], name: str) -> str:
    """A text, "" for null. Raises ValueError for anything else."""
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"a reply whose {name} is {clean(value, 40)}")
    return value or ""
