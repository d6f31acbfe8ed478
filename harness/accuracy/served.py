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
import importlib.util
import json
import urllib.error
import urllib.request
from typing import Any

from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from harness.accuracy.journal import Answer
from harness.accuracy.resumed import new_deque, request_seed
from harness.records.record import ERROR, LENGTH, SERVER, Engine
from qad.errors import DataError, UsageError

TRIES = 3
_WAIT_S = 0.5  # doubled after every try


def open_server(
    url: str, tokenizer: str, *, chat: bool, think_end: str | None, max_length: int | None = None, concurrency: int = 16,
    model: str | None = None,
) -> tuple[Any, Engine]:  # fmt: skip
    """A back-end for `harness.accuracy.scores.measure_suite`, and the record's engine.

    url: http://host:port, with or without /v1. tokenizer: the model's folder. chat: conversations instead of prompts. model: the
    served name; None: the only one. max_length: the context in tokens; None: what the server says of itself.
    Raises UsageError for a server that does not answer, serves several models, or does not tell its context length.
    """
    if importlib.util.find_spec("tenacity") is None or importlib.util.find_spec("aiohttp") is None:
        raise UsageError("asking a server needs two more packages: pip install nvfp4-qad[server]")
    root = url.rstrip("/").removesuffix("/v1")
    found = _served(root, model)
    length = max_length or found.get("max_model_len")
    if not isinstance(length, int):
        raise UsageError(f"{root} does not tell its context length: give --max-model-len")
    kind = _ChatServer if chat else _Server
    path = "chat/completions" if chat else "completions"
    backend = kind(
        base_url=f"{root}/v1/{path}", model=found["id"], tokenizer=tokenizer, tokenizer_backend="huggingface",
        max_length=length + 1, num_concurrent=max(2, concurrency), max_retries=1, batch_size=1, timeout=3600,
        **({"tokenized_requests": False} if chat else {}),
    )  # fmt: skip
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
        with urllib.request.urlopen(f"{root}/v1/models", timeout=30) as response:
            entries = json.load(response)["data"]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
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
        for attempt in range(TRIES):
            try:
                return await super().amodel_call(*args, **options)  # type: ignore[misc]
            except (DataError, asyncio.CancelledError):
                raise
            except Exception as error:
                if attempt + 1 < TRIES:
                    await asyncio.sleep(_WAIT_S * 2**attempt)
                elif not options.get("generate", True):
                    raise DataError(
                        f"the server failed {TRIES} times to score a prompt ({type(error).__name__}: {error}): look at its log"
                    ) from error
        for key in options["cache_keys"]:
            self.said.append(Answer("", None, ERROR))
            self.cache_hook.add_partial("generate_until", key, "")  # type: ignore[attr-defined]
        return ["" for _ in options["cache_keys"]]

    def _tell(self, choice: dict[str, Any], text: str, thinking: int | None, usage: dict[str, Any]) -> str:
        reason = choice.get("finish_reason")
        tokens = usage.get("completion_tokens")
        if thinking is None and self.think_end:
            thinking = tokens if reason == LENGTH and self.think_end not in text else None
        self.said.append(Answer(text, tokens, str(reason or ""), thinking))
        return text

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.said = new_deque()


class _Server(_Telling, LocalCompletionsAPI):
    def tok_encode(self, string: Any, *_: Any, **__: Any) -> Any:
        """As the in-memory back-end does: the tokenizer's own special tokens, but no second BOS."""
        if not isinstance(string, str):
            return [self.tok_encode(one) for one in string]
        bos = self.tokenizer.bos_token
        return self.tokenizer.encode(string, add_special_tokens=not (bos and string.startswith(bos)))

    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        return [self._tell(choice, choice["text"], None, outputs.get("usage") or {}) for choice in outputs["choices"]]


class _ChatServer(_Telling, LocalChatCompletion):
    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        usage = outputs.get("usage") or {}
        told = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        found = []
        for choice in outputs["choices"]:
            message = choice["message"]
            thought = message.get("reasoning_content") or message.get("reasoning")
            text = message.get("content") or ""
            if thought and self.think_end:  # a server that takes the thinking apart, put together again
                ended = text or choice.get("finish_reason") != LENGTH
                text = f"{thought}{self.think_end}{text}" if ended else thought
            found.append(self._tell(choice, text, told, usage))
        return found
