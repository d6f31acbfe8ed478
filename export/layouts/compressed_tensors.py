"""Metadata of the compressed-tensors layout: one place, quantization_config of config.json.

format  nvfp4-pack-quantized for 4 bits, float-quantized for FP8; of a checkpoint with both, mixed-precision, and each group
        says its own
targets `Linear` where everything has one format; names where not, and for an output head, which is no Linear to vLLM

The library's data classes refuse unknown keys inside a config group, so there is no room for a producer block. A key
that is left out has the library's default, which is 8-bit integers: all of them are written.
"""

from __future__ import annotations

from export.layouts.layout import COMPRESSED_TENSORS
from export.layouts.scheme import Scheme
from qad.model.families import DEFAULT
from qad.numerics.formats import FORMATS, KV_FORMATS, MIXED

MIXED_FORMAT = "mixed-precision"


def format_name(algorithm: str) -> str:
    """What the library calls the format of one of qad.numerics.formats, or of a mixed checkpoint."""
    return MIXED_FORMAT if algorithm == MIXED else COMPRESSED_TENSORS.of(algorithm).algorithm


def format_names() -> frozenset[str]:
    """Every name that `format_name` gives."""
    return frozenset(map(format_name, (*FORMATS, MIXED)))


def numbers(format: str) -> tuple[dict[str, object], dict[str, object] | None]:
    """`weights` and `input_activations` of a config group; None: inputs are left alone."""
    own = COMPRESSED_TENSORS.of(format)
    return dict(own.weights), dict(own.inputs) if FORMATS[format].quantizes_inputs else None


def quantization_config(scheme: Scheme) -> dict[str, object]:
    """`quantization_config` of config.json."""
    heads = [module for module in scheme.layers if DEFAULT.never.get(module.rpartition(".")[2]) == "output head"]
    groups = {scheme.algorithm: ["Linear", *heads]}
    if scheme.algorithm == MIXED:
        groups = {format: sorted(modules) for format, modules in scheme.by_format.items()}
    formats = {format_name(format) for format in groups}
    return {
        "config_groups": {f"group_{number}": _group(format, targets) for number, (format, targets) in enumerate(groups.items())},
        "format": formats.pop() if len(formats) == 1 else MIXED_FORMAT,
        "ignore": list(scheme.excluded),
        "kv_cache_scheme": KV_FORMATS[scheme.kv_cache].schemes[COMPRESSED_TENSORS.name] if scheme.kv_cache else None,
        "quant_method": COMPRESSED_TENSORS.name,
        "quantization_status": "compressed",
    }


def _group(format: str, targets: list[str]) -> dict[str, object]:
    weights, inputs = numbers(format)
    return {
        "format": format_name(format),
        "input_activations": inputs,
        "output_activations": None,
        "targets": targets,
        "weights": weights,
    }
