"""What the architecture in config.json asks for: names and shapes, built on the meta device without weights."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """linears: nn.Linear modules, name -> (N, K). parameters: name -> shape. buffers: names, persistent or not."""

    linears: dict[str, tuple[int, int]]
    parameters: dict[str, tuple[int, ...]]
    buffers: frozenset[str]


def build_skeleton(config: dict[str, Any]) -> Skeleton | None:
    """None where transformers cannot build the model, and for remote code, which is never run."""
    import torch
    from torch import nn
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what transformers thinks of a broken config is told by the findings
    try:
        built = CONFIG_MAPPING[config["model_type"]].from_dict(plain)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(built, trust_remote_code=False)
    except Exception:  # transformers raises anything for a config it does not understand; then files alone are read
        return None
    finally:
        logging.set_verbosity(level)
    return Skeleton(
        {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)},
        {n: tuple(p.shape) for n, p in model.named_parameters()},
        frozenset(n for n, _ in model.named_buffers()),
    )
