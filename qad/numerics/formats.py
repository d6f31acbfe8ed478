"""The formats a Linear can have, by the names that checkpoints use for them.

NVFP4         weights E2M1 with a block scale per 16, inputs the same (W4A4)      qad.numerics.nvfp4
W4A16_NVFP4   weights as NVFP4, inputs as they are
FP8           weights and inputs E4M3 with one scale per tensor (W8A8)            qad.numerics.fp8

A checkpoint whose modules have more than one of them is MIXED_PRECISION.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NVFP4, W4A16_NVFP4, FP8 = "NVFP4", "W4A16_NVFP4", "FP8"
FORMATS = (NVFP4, W4A16_NVFP4, FP8)
FOUR_BITS = (NVFP4, W4A16_NVFP4)
MIXED = "MIXED_PRECISION"


def quantizes_activations(format: str) -> bool:
    """True where the inputs of a module of this format are quantized too, so that it has an input scale."""
    return format != W4A16_NVFP4


def announced_algorithm(quantization: Mapping[str, Any]) -> str | None:
    """What a `quantization_config` of the ModelOpt layout means, upper case; None where it names nothing.

    NVFP4 whose config groups all have no `input_activations` is W4A16_NVFP4, as vLLM 0.32 reads it
    (ModelOptNvFp4Config._from_config).
    """
    algorithm = str(quantization.get("quant_algo") or "").upper()
    groups = quantization.get("config_groups")
    if algorithm == NVFP4 and isinstance(groups, dict) and groups:
        given = [group.get("input_activations") if isinstance(group, dict) else group for group in groups.values()]
        return W4A16_NVFP4 if all(numbers is None for numbers in given) else NVFP4
    return algorithm or None


def algorithm_of(formats: Iterable[str]) -> str:
    """What a checkpoint of modules of these formats is called: the one format, or MIXED_PRECISION."""
    found = set(formats)
    return found.pop() if len(found) == 1 else MIXED
