"""The ModelOpt layout's two metadata places, as pure functions of a selection. They always agree.

config.json           quantization_config: what vLLM and transformers read
hf_quant_config.json  what TensorRT-LLM reads
"""

from __future__ import annotations

from typing import Any

from qad.provenance import producer
from qad.selection import Selection


def excluded_modules(selection: Selection, stored: set[str]) -> list[str]:
    """Full names of all Linears, routers and embeddings that stay BF16, sorted: no wildcard an engine could misread.

    A tied head has no tensor of its own and is listed all the same, as engines build the module.
    """
    listed = {name for name in selection.excluded if f"{name}.weight" in stored}
    return sorted(listed | {name for name, reason in selection.excluded.items() if reason == "output head"})


def quantization_config(selection: Selection, excluded: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": four_bits, "targets": ["Linear"]}
    if selection.quantizes_activations:
        group = {"input_activations": dict(four_bits), **group}
    return {
        "config_groups": {"group_0": group},
        "ignore": excluded,
        "quant_algo": selection.format,
        "producer": _producer(),
        "quant_method": "modelopt",
    }


def hf_quant_config(selection: Selection, excluded: list[str]) -> dict[str, Any]:
    """hf_quant_config.json."""
    return {
        "producer": _producer(),
        "quantization": {
            "quant_algo": selection.format,
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": excluded,
        },
    }


def _producer() -> dict[str, Any]:
    own = producer()
    return {"name": own["name"], "version": own["version"]}
