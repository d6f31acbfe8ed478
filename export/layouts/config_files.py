"""The JSON files of a checkpoint: config.json with its quantization block, and hf_quant_config.json where there is one."""

from __future__ import annotations

from pathlib import Path

from export.layouts import compressed_tensors, modelopt
from export.layouts.layout import COMPRESSED_TENSORS, Layout
from export.layouts.scheme import Scheme
from qad.place import write_whole_json

CONFIG = "config.json"
NESTED = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers' name since version 5, and before


def quantization_blocks(layout: Layout, scheme: Scheme) -> tuple[dict[str, object], dict[str, object] | None]:
    """`quantization_config` of config.json, and hf_quant_config.json (None: the layout has none)."""
    if layout is COMPRESSED_TENSORS:
        return compressed_tensors.quantization_config(scheme), None
    return modelopt.quantization_config(scheme), modelopt.hf_quant_config(scheme)


def write_config_files(folder: Path, config: dict[str, object], layout: Layout, scheme: Scheme) -> None:
    """config: the model's own config.json; a quantization block in it is replaced."""
    outer, nested = quantization_blocks(layout, scheme)
    write_json(folder / CONFIG, {**config, "quantization_config": outer})
    if nested is not None:
        write_json(folder / NESTED, nested)


def in_bfloat16(config: dict[str, object]) -> dict[str, object]:
    """The source's config.json for what was exported from it: engines compute in the dtype that it names, and the tensors are
    BF16 now, whatever they were."""
    said = {key: "bfloat16" for key in DTYPE_KEYS if config.get(key)}
    parts = {
        name: in_bfloat16(part) for name, part in config.items() if isinstance(part, dict) and any(map(part.get, DTYPE_KEYS))
    }
    return {**config, **(said or {"dtype": "bfloat16"}), **parts}


def write_index(folder: Path, weight_map: dict[str, str], total_size: int) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)


def write_json(path: Path, value: dict[str, object]) -> None:
    """On disk when this returns."""
    write_whole_json(path, value, indent=4)
