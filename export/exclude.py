"""Which modules an exclude list takes out, by the rules of each engine, as pure functions of names.

Engines build fused modules (qkv_proj, gate_up_proj), and an entry that was meant for one Linear can match another: vLLM
also takes an entry as a substring, so `model.layers.1` drops layers 10-19 and `mlp.gate` drops `mlp.gate_up_proj`.
Sources: vLLM 0.32 ModelOptQuantConfigBase.is_layer_excluded; TensorRT-LLM QuantConfig.is_module_excluded_from_quantization.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch, fnmatchcase

from qad.fusion import siblings_of

_FUSED_LEAF = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "w1": "w13", "q_a_proj": "fused_qkv_a_proj"}


def vllm_excludes(module: str, patterns: Sequence[str]) -> bool:
    """True where vLLM runs the module unquantized. Raises ValueError where it refuses: part of a fused module excluded."""
    members = siblings_of(module)
    if len(members) > 1:
        exact = [name in patterns for name in members]
        if all(exact):
            return True
        fused = _fused_name(members)
        if _vllm_matches(fused, patterns):
            return True
        if any(exact):
            raise ValueError(f"only part of {fused} is excluded")
        return False
    return module in patterns or _vllm_matches(module, patterns)


def _vllm_matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name == p or p in name or fnmatch(name, p) for p in patterns if p)


def trtllm_excludes(module: str, patterns: Sequence[str]) -> bool:
    """True where TensorRT-LLM runs the module unquantized: a glob on the name or any ancestor, or `re:` on the whole
    name. Any excluded member of q/k/v or gate/up excludes all of them."""
    return any(_trtllm_matches(name, patterns) for name in siblings_of(module))


def _trtllm_matches(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split(".")
    ancestors = [".".join(parts[: i + 1]) for i in range(len(parts))]
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.fullmatch(pattern[3:], name):
                return True
        elif any(fnmatchcase(candidate, pattern) for candidate in ancestors):
            return True
    return False


def _fused_name(members: Sequence[str]) -> str:
    parent, _, leaf = members[0].rpartition(".")
    fused = _FUSED_LEAF.get(leaf, leaf)
    return f"{parent}.{fused}" if parent else fused
