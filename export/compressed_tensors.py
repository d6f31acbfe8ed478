"""Metadata of the compressed-tensors layout, format `nvfp4-pack-quantized`: one place, quantization_config of config.json.

The library's data classes refuse unknown keys inside a config group, so there is no room for a producer block. A key
that is left out has the library's default, which is 8-bit integers: all of them are written.
"""

from __future__ import annotations

from typing import Any

from export.layout import COMPRESSED_TENSORS
from export.scheme import Scheme
from qad.nvfp4 import BLOCK_SIZE

FORMAT = "nvfp4-pack-quantized"


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """`quantization_config` of config.json. W4A16 is the same without `input_activations`.

    dynamic: false for weights; "local" for activations: the global scale is stored, block scales are made on the fly.
    """
    four_bits = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK_SIZE, "symmetric": True,
    }  # fmt: skip
    eight_bits = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {
        "config_groups": {
            "group_0": {
                "format": FORMAT,
                "input_activations": {**four_bits, "dynamic": "local"} if scheme.quantizes_activations else None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {**four_bits, "dynamic": False},
            }
        },
        "format": FORMAT,
        "ignore": list(scheme.excluded),
        "kv_cache_scheme": eight_bits if scheme.kv_cache else None,
        "quant_method": COMPRESSED_TENSORS.name,
        "quantization_status": "compressed",
    }
