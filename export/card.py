"""The exported folder's README.md: a model card by the hub's conventions, carried over from the source's."""

from __future__ import annotations

from typing import Any

import yaml

from qad.arm import Arm


def model_card(arm: Arm) -> str:
    """Front matter (base_model, licence, tags, name) and a paragraph that says what the weights are."""
    assert arm.selection is not None
    card = arm.source.card
    base = card.get("base_model") or arm.source.display_name
    front: dict[str, Any] = {
        "model_name": f"{arm.source.display_name}, {arm.selection.format} ({arm.name.upper()})",
        "base_model": base,
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["nvfp4", "modelopt", "nvfp4-qad", arm.name],
    }
    for key in ("license", "license_name", "license_link", "language"):
        if key in card:
            front[key] = card[key]
    made = "distilled from its BF16 original (QAD)" if arm.trained else "quantized after training (PTQ)"
    parameters = sum(n * k for n, k in arm.selection.modules.values())
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {front['model_name']}\n\n"
        f"{arm.source.display_name} {made} with nvfp4-qad: {len(arm.selection.modules)} Linears, {parameters:,} weights in "
        "4 bits with an E4M3 scale for 16 and one FP32 scale per fused group; everything else is BF16.\n"
    )
