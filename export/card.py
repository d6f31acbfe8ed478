"""The exported folder's README.md: a model card by the hub's conventions, carried over from the source's."""

from __future__ import annotations

import re
from typing import Any

import yaml

from qad.arm import Arm

_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets", "inference")


def model_card(arm: Arm) -> str:
    """Front matter (base_model, licence, tags, name, quantization) and a paragraph that says what the weights are."""
    assert arm.selection is not None
    card, name = arm.source.card, arm.source.display_name
    front: dict[str, Any] = {"model_name": f"{name}, {arm.selection.format} ({arm.name.upper()})"}
    base = name if _is_hub_name(name) else card.get("base_model")
    if base:  # the hub refuses a base_model that is no hub name
        front |= {"base_model": base, "base_model_relation": "quantized"}
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= {key: card[key] for key in _CARRIED if key in card}
    own = ["nvfp4", "modelopt", "nvfp4-qad", arm.name]
    carried = [tag for tag in _list(card.get("tags")) if tag not in own]
    front["tags"] = [*carried, *own]
    front["quantization"] = {
        "algorithm": arm.selection.format,
        "method": "quantization-aware distillation" if arm.trained else "post-training quantization",
        "group_size": 16,
    }
    made = "distilled from its BF16 original (QAD)" if arm.trained else "quantized after training (PTQ)"
    parameters = sum(n * k for n, k in arm.selection.modules.values())
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {front['model_name']}\n\n"
        f"{name} {made} with nvfp4-qad: {len(arm.selection.modules)} Linears, {parameters:,} weights in 4 bits with an "
        "E4M3 scale for 16 and one FP32 scale per fused group; everything else is BF16.\n"
    )


def _is_hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def _list(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value] if isinstance(value, list) else []
