"""Metadata of the ModelOpt layout: two places, which always agree.

config.json           quantization_config: what vLLM and transformers read
hf_quant_config.json  what TensorRT-LLM reads
"""

from __future__ import annotations

from typing import Any

from export.scheme import Scheme
from qad.nvfp4 import BLOCK_SIZE
from qad.provenance import producer


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
    group: dict[str, Any] = {"weights": four_bits, "targets": ["Linear"]}
    if scheme.quantizes_activations:
        group = {"input_activations": dict(four_bits), **group}
    kv_cache = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if scheme.kv_cache else {}
    return {
        "config_groups": {"group_0": group},
        "ignore": list(scheme.excluded),
        "quant_algo": scheme.algorithm,
        **kv_cache,
        "producer": _producer(),
        "quant_method": "modelopt",
    }


def hf_quant_config(scheme: Scheme) -> dict[str, Any]:
    """hf_quant_config.json."""
    return {
        "producer": _producer(),
        "quantization": {
            "quant_algo": scheme.algorithm,
            "kv_cache_quant_algo": scheme.kv_cache,
            "group_size": BLOCK_SIZE,
            "exclude_modules": list(scheme.excluded),
        },
    }


def _producer() -> dict[str, Any]:
    own = producer()
    return {"name": own["name"], "version": own["version"]}
