"""Which Linears an engine fuses into one GEMM. Members of a scale group share one global scale and one input scale.

vLLM and TensorRT-LLM fuse q/k/v and gate/up; the fused GEMM has room for one global scale, so unequal ones are
either refused (TensorRT-LLM) or served wrong (vLLM takes the maximum). Source: `packed_modules_mapping` of vLLM's
model classes.
"""

from __future__ import annotations

from collections.abc import Iterable

FUSED_SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("to_q", "to_k", "to_v"),
)


def scale_groups(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """Partition module names into scale groups, in order of first appearance; most are groups of one.

    Siblings are members of one parent: `layers.0.self_attn.q_proj` pairs with `layers.0.self_attn.k_proj`.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in modules:
        parent, _, leaf = name.rpartition(".")
        family = next((siblings[0] for siblings in FUSED_SIBLINGS if leaf in siblings), leaf)
        groups.setdefault((parent, family), []).append(name)
    return [tuple(members) for members in groups.values()]


def siblings_of(module: str) -> tuple[str, ...]:
    """Full names of all modules that would share a scale group with `module`, itself included, existing or not."""
    parent, _, leaf = module.rpartition(".")
    prefix = f"{parent}." if parent else ""
    family = next((siblings for siblings in FUSED_SIBLINGS if leaf in siblings), (leaf,))
    return tuple(prefix + sibling for sibling in family)
