"""The configuration that transformers builds from a config.json: with what its class adds where the file says nothing.

Whoever asks what a model *is* asks here. What a file *says* (its quantization, say) is read from the file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qad.model.bounds import OversizedError, built_for, require_bounded

_NOT_ASKED = ("quantization_config", "auto_map")  # remote code is never run for a question


def built_config(config: Mapping[str, object]) -> Any | None:
    """The transformers configuration; None for what transformers does not know or does not understand. Raises OversizedError."""
    require_bounded(config)
    return _built(json.dumps({k: v for k, v in config.items() if k not in _NOT_ASKED}, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _built(config: str) -> Any | None:
    from transformers import CONFIG_MAPPING

    with quiet():
        try:
            plain = json.loads(config, object_hook=_special_float)
            return CONFIG_MAPPING[plain["model_type"]].from_dict(plain)
        except Exception:  # transformers raises anything for a config it does not understand
            return None


def _special_float(found: dict[str, Any]) -> Any:
    """transformers 5 writes an infinite number as {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def ties_embeddings(config: Mapping[str, object]) -> bool:
    """Whether head and embedding are one weight. Gemma, Cohere and others leave that to their class, which says yes."""
    try:
        built = built_config(config)
    except OversizedError:
        built = None
    if built is None:
        return bool(config.get("tie_word_embeddings", False))
    return bool(getattr(built, "tie_word_embeddings", False))


def embedding_name(config: Mapping[str, object], shapes: Iterable[tuple[int, ...]]) -> str | None:
    """Name of the input embedding's weight in the model that transformers builds; None where it cannot. shapes: of the tensors
    that are to fill it."""
    import torch
    from transformers import AutoModelForCausalLM

    built = built_config(config)
    if built is None:
        return None
    with quiet():
        try:
            with torch.device("meta"), built_for(shapes):
                model = AutoModelForCausalLM.from_config(built, trust_remote_code=False)
            embedding = model.get_input_embeddings()
        except Exception:  # as above
            return None
    return next((f"{name}.weight" for name, module in model.named_modules() if module is embedding), None)


@contextmanager
def quiet() -> Iterator[None]:
    """What transformers thinks of a broken config is told by whoever asked."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
