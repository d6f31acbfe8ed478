"""What the architecture in config.json asks for: names and shapes, built on the meta device without weights."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping

from qad.model.bounds import OversizedError, built_for
from qad.model.built_config import built_config, quiet
from qad.model.experts import split_experts
from qad.model.loader import auto_class
from qad.model.names import name_tensors


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """By the checkpoint's names; experts are split.

    linears: nn.Linear modules, name -> (N, K).
    embeddings: nn.Embedding modules.
    parameters: name -> shape.
    buffers: names, persistent or not.
    """

    linears: dict[str, tuple[int, int]]
    embeddings: frozenset[str]
    parameters: dict[str, tuple[int, ...]]
    buffers: frozenset[str]


def build_skeleton(config: dict[str, object], tensors: Mapping[str, tuple[int, ...]]) -> Skeleton | None:
    """None where transformers cannot build the model, and for remote code, which is never run. tensors: name -> shape of what is
    to fill it. Raises OversizedError where it asks for many more."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return _build(json.dumps(plain, sort_keys=True), tuple(tensors), tuple(tensors.values()))


@functools.lru_cache(maxsize=8)
def _build(config: str, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Skeleton | None:
    import torch
    from torch import nn

    built = built_config(json.loads(config))
    if built is None:
        return None
    with quiet():
        try:
            with torch.device("meta"), built_for(shapes):
                model = auto_class(built).from_config(built, trust_remote_code=False)
                called = name_tensors(model, names)
                split_experts(model)
        except OversizedError:
            raise
        except Exception:  # as above; then files alone are read
            return None
    modules = {called.module(inner): module for inner, module in model.named_modules()}
    return Skeleton(
        {n: (m.out_features, m.in_features) for n, m in modules.items() if isinstance(m, nn.Linear)},
        frozenset(n for n, m in modules.items() if isinstance(m, nn.Embedding)),
        {called.tensor(n): tuple(p.shape) for n, p in model.named_parameters()},
        frozenset(called.tensor(n) for n, _ in model.named_buffers()),
    )
