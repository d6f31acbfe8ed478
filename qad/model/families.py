"""Which Linears an engine fuses into one GEMM. Members of a scale group share one global scale and one input scale.

vLLM and TensorRT-LLM fuse q/k/v and gate/up; the fused GEMM has room for one global scale, so unequal ones are
either refused (TensorRT-LLM) or served wrong (vLLM takes the maximum). Source: `packed_modules_mapping` of vLLM's
model classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

FUSED_SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("to_q", "to_k", "to_v"),
)
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


def scale_groups(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """Partition module names into scale groups, in order of first appearance; most are groups of one.

    Siblings are members of one parent: `layers.0.self_attn.q_proj` pairs with `layers.0.self_attn.k_proj`.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in modules:
        groups.setdefault(_family(name), []).append(name)
    return [tuple(members) for members in groups.values()]


def input_scale_groups(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """Partition module names into groups that share one input scale: a scale group, or the same projection (gate and up
    together) of all experts of a layer, as engines quantize the input of all experts at once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in modules:
        parent, family = _family(name)
        groups.setdefault((experts_of(name) or parent, family), []).append(name)
    return [tuple(members) for members in groups.values()]


def experts_of(name: str) -> str | None:
    """`model.layers.0.mlp.experts.7.up_proj` -> `model.layers.0.mlp.experts`; None outside of experts."""
    match = _EXPERT.match(name)
    return match[1] if match else None


def _family(module: str) -> tuple[str, str]:
    parent, _, leaf = module.rpartition(".")
    return parent, next((siblings[0] for siblings in FUSED_SIBLINGS if leaf in siblings), leaf)


def siblings_of(module: str) -> tuple[str, ...]:
    """Full names of all modules that would share a scale group with `module`, itself included, existing or not."""
    parent, _, leaf = module.rpartition(".")
    prefix = f"{parent}." if parent else ""
    family = next((siblings for siblings in FUSED_SIBLINGS if leaf in siblings), (leaf,))
    return tuple(prefix + sibling for sibling in family)


_NEVER = {
    "lm_head": "output head",
    "embed_out": "output head",
    "gate": "router",
    "router": "router",
    "shared_expert_gate": "router",
}


_TOWERS = ("vision_tower", "visual", "vision_model", "multi_modal_projector", "audio_tower", "mtp")


def never_quantized(module: str) -> str | None:
    """Why a module of this name is never quantized, whatever the recipe says."""
    parts = module.split(".")
    if parts[-1] in _NEVER:
        return _NEVER[parts[-1]]
    tower = next((part for part in parts if part in _TOWERS), None)
    return f"inside {tower}" if tower else None
