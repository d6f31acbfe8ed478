"""Metadata of the ModelOpt layout: two places, which always agree.

config.json           quantization_config: what vLLM and transformers read
hf_quant_config.json  what TensorRT-LLM reads

One algorithm: everything has it but what is excluded. MIXED_PRECISION: what is not listed in quantized_layers stays BF16.
"""

from __future__ import annotations

from export.layouts.layout import MODELOPT
from export.layouts.scheme import Scheme
from qad.numerics.formats import KV_FORMATS, MIXED, quantizes_activations
from qad.provenance import producer


def quantization_config(scheme: Scheme) -> dict[str, object]:
    """`quantization_config` of config.json."""
    mixed = scheme.algorithm == MIXED
    groups = {format: sorted(modules) for format, modules in scheme.by_format.items()} if mixed else {}
    kv_cache = {"kv_cache_scheme": KV_FORMATS[scheme.kv_cache].schemes[MODELOPT.name]} if scheme.kv_cache else {}
    return {
        "config_groups": {
            f"group_{number}": _group(format, targets)
            for number, (format, targets) in enumerate((groups or {scheme.algorithm: ["Linear"]}).items())
        },
        **({"quantized_layers": quantized_layers(scheme)} if mixed else {}),
        "ignore": [] if mixed else list(scheme.excluded),
        "quant_algo": scheme.algorithm,
        **kv_cache,
        "producer": _producer(),
        "quant_method": "modelopt",
    }


def hf_quant_config(scheme: Scheme) -> dict[str, object]:
    """hf_quant_config.json."""
    quantization: dict[str, object] = {"quant_algo": scheme.algorithm, "kv_cache_quant_algo": scheme.kv_cache}
    if scheme.algorithm == MIXED:
        quantization |= {"quantized_layers": quantized_layers(scheme)}
    else:
        quantization |= _sized(scheme.algorithm)
        quantization |= {"exclude_modules": list(scheme.excluded)}
    return {"producer": _producer(), "quantization": quantization}


def quantized_layers(scheme: Scheme) -> dict[str, dict[str, object]]:
    """Module -> algorithm, of a mixed checkpoint."""
    return {module: {"quant_algo": MODELOPT.of(format).algorithm, **_sized(format)} for module, format in scheme.layers.items()}


def _sized(format: str) -> dict[str, object]:
    return {key: value for key, value in MODELOPT.of(format).weights.items() if key == "group_size"}


def _group(format: str, targets: list[str]) -> dict[str, object]:
    """A config group of one format."""
    own = MODELOPT.of(format)
    inputs = {"input_activations": dict(own.inputs)} if quantizes_activations(format) else {}
    return {**inputs, "weights": dict(own.weights), "targets": targets}


def _producer() -> dict[str, object]:
    own = producer()
    return {"name": own["name"], "version": own["version"]}
