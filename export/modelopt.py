"""The ModelOpt layout, as pure functions: tensors of a module, and the two metadata places, which always agree.

X.weight          U8       [N, K/2]    even element in the low nibble
X.weight_scale    F8_E4M3  [N, K/16]   row-major
X.weight_scale_2  F32      []          global scale (decode)
X.input_scale     F32      []          NVFP4 only; absent for W4A16_NVFP4

config.json           quantization_config: what vLLM and transformers read
hf_quant_config.json  what TensorRT-LLM reads
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from export.store import Entry
from qad.nvfp4 import BLOCK_SIZE, QuantizedTensor
from qad.provenance import producer
from qad.selection import Selection


class ModelOptLayout:
    """One quantized module -> the tensors above."""

    def entries(self, module: str, n: int, k: int, activations: bool) -> list[Entry]:
        stored = [
            Entry(f"{module}.weight", "U8", (n, k // 2)),
            Entry(f"{module}.weight_scale", "F8_E4M3", (n, k // BLOCK_SIZE)),
            Entry(f"{module}.weight_scale_2", "F32", ()),
        ]
        return [*stored, Entry(f"{module}.input_scale", "F32", ())] if activations else stored

    def tensors(self, module: str, q: QuantizedTensor, input_scale: Tensor | None) -> dict[str, Tensor]:
        stored = {
            f"{module}.weight": q.packed,
            f"{module}.weight_scale": q.block_scale,
            f"{module}.weight_scale_2": q.global_scale,
        }
        return stored if input_scale is None else {**stored, f"{module}.input_scale": input_scale.reshape(())}


def excluded_modules(selection: Selection, stored: set[str]) -> list[str]:
    """Full names of all Linears, routers and embeddings that stay BF16, sorted: no wildcard an engine could misread.

    A tied head has no tensor of its own and is listed all the same, as engines build the module.
    """
    listed = {name for name in selection.excluded if f"{name}.weight" in stored}
    return sorted(listed | {name for name, reason in selection.excluded.items() if reason == "output head"})


def quantization_config(selection: Selection, excluded: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
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
            "group_size": BLOCK_SIZE,
            "exclude_modules": excluded,
        },
    }


def _producer() -> dict[str, Any]:
    own = producer()
    return {"name": own["name"], "version": own["version"]}
