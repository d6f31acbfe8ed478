"""Prefill and decode speed in this process: tokens per second of fixed shapes, every repeat kept.

prefill  batch * input_tokens / time of one forward over the prompts; only the last token's logits are computed, as in
         generation. It yields the first output token.
decode   batch * (output_tokens - 1) / time of the remaining tokens, one forward each with the KV cache: the
         reciprocal of TPOT. Greedy, exactly output_tokens tokens, whatever token comes (an end token stops nothing).

Prompts are random tokens, other ones in every repeat; warm-up uses prompts of its own and is not counted. Models are
measured interleaved, forwards and backwards (A B C C B A ...), so that a drift of the machine hits them alike.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from harness.records.record import ThroughputData, ThroughputPoint
from qad.errors import UsageError

# transformers renamed the cache in 5.2x; state-space models had a name of their own before.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_argument(model: nn.Module) -> str:
    """Under which name a model takes, and returns, what it keeps of the tokens before."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_NAMES if name in accepted), _CACHE_NAMES[0])


def measure_throughput(
    models: Mapping[str, nn.Module],
    *,
    vocab_size: int,
    batch: int,
    input_tokens: int,
    output_tokens: int,
    repeats: int,
    seed: int,
    progress: Callable[[int], object] | None = None,
) -> dict[str, ThroughputData]:
    """All models in turn; in one repeat all get the same prompts. `progress` is called with 1 after each run.

    Raises UsageError for a shape that cannot be measured or exceeds a model's context.
    """
    _check(models, batch, input_tokens, output_tokens, repeats)
    generator = torch.Generator().manual_seed(seed)
    rates: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in models}
    warm_up_BT = torch.randint(vocab_size, (batch, input_tokens), generator=generator)
    for model in models.values():
        _run(model, warm_up_BT, min(output_tokens, 3))
    for repeat in range(repeats):
        prompt_BT = torch.randint(vocab_size, (batch, input_tokens), generator=generator)
        for name in list(models)[:: -1 if repeat % 2 else 1]:
            prefill_s, decode_s = _run(models[name], prompt_BT, output_tokens)
            rates[name][0].append(batch * input_tokens / prefill_s)
            rates[name][1].append(batch * (output_tokens - 1) / decode_s)
            if progress:
                progress(1)
    return {
        name: ThroughputData(
            [
                ThroughputPoint("prefill", batch, input_tokens, output_tokens, prefill),
                ThroughputPoint("decode", batch, input_tokens, output_tokens, decode),
            ]
        )
        for name, (prefill, decode) in rates.items()
    }


def _run(model: nn.Module, prompt_BT: Tensor, output_tokens: int) -> tuple[float, float]:
    """Seconds of the prefill and of the output_tokens - 1 decode steps."""
    device = next(model.parameters()).device
    accepted = inspect.signature(model.forward).parameters
    cache = cache_argument(model)
    fixed = {"use_cache": True, **({"logits_to_keep": 1} if "logits_to_keep" in accepted else {})}
    token_BT = prompt_BT.to(device)
    with torch.no_grad():
        started = _now(device)
        out = model(input_ids=token_BT, **fixed)
        token_BT = out.logits[:, -1:].argmax(-1)
        prefilled = _now(device)
        for _ in range(output_tokens - 1):
            out = model(input_ids=token_BT, **{cache: getattr(out, cache)}, **fixed)
            token_BT = out.logits[:, -1:].argmax(-1)
        finished = _now(device)
    return prefilled - started, finished - prefilled


def _now(device: torch.device) -> float:
    """Seconds, after everything queued on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _check(models: Mapping[str, nn.Module], batch: int, input_tokens: int, output_tokens: int, repeats: int) -> None:
    if min(batch, input_tokens, repeats) < 1:
        raise UsageError(f"batch {batch}, input_tokens {input_tokens}, repeats {repeats}: each must be at least 1")
    if output_tokens < 2:
        raise UsageError(f"output_tokens {output_tokens}: the first comes from the prefill, decoding needs at least 2")
    for name, model in models.items():
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if limit is not None and input_tokens + output_tokens > limit:
            raise UsageError(
                f"input_tokens {input_tokens} + output_tokens {output_tokens} exceed the context of {name}, {limit}: "
                "measure a shorter shape"
            )
