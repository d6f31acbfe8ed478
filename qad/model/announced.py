"""What a quantization config asks for that nothing here computes: rotations of inputs, scales per token, keys of later versions.

Such a key changes what an engine computes, so it is never dropped without a word: `qad check` warns of it, `qad convert` and
--fix do not write the config anew without it, and no such model is loaded to be measured. A key without a value (null, false,
empty) asks for nothing.

Sources: compressed-tensors 0.20 QuantizationConfig, QuantizationScheme, QuantizationArgs; ModelOpt 0.47
convert_hf_quant_config_format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qad.numerics.formats import FORMATS
from qad.untrusted import clean, mapping

_ANY = ("any",)  # whatever its value, nothing else is computed; or other rules read it
_E4M3 = ("torch.float8_e4m3fn", "float8_e4m3fn")
_TOP = (
    "quant_method",
    "quant_algo",
    "ignore",
    "exclude_modules",
    "config_groups",
    "quantized_layers",
    "group_size",
    "producer",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "format",
    "quantization_status",
    "global_compression_ratio",
    "version",
)
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_NUMBERS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "observer", "observer_kwargs"), _ANY),
    "zp_dtype": _ANY,  # of a zero point, which symmetric numbers have none of
    "scale_dtype": _E4M3,
    "actorder": ("weight", "static"),  # columns that are stored in their own order
}


def not_computed(*blocks: Mapping[str, object] | None) -> list[str]:
    """Keys of `quantization_config` and of hf_quant_config.json's `quantization` that ask for more than is computed here, each
    with its path, once."""
    return list(dict.fromkeys(path for block in blocks if block for path in _of_block(block)))


def per_token(group: Mapping[str, object]) -> bool:
    """Whether a config group of the compressed-tensors layout scales inputs as they come, where no format here does."""
    inputs = mapping(group.get("input_activations"))
    known = [own.inputs for format in FORMATS.values() if (own := format.layouts.get("compressed-tensors"))]
    return inputs.get("dynamic") is True and not any(own.get("dynamic") is True for own in known)


def _of_block(block: Mapping[str, object]) -> Iterator[str]:
    for key, value in block.items():
        dense = key == "sparsity_config" and mapping(value).get("format") == "dense"
        if key not in _TOP and _asks(value) and not dense:
            yield clean(key)
    refuses = block.get("quant_method") == "compressed-tensors"  # the library itself: an unknown key of a group is an error
    for name, group in mapping(block.get("config_groups")).items():
        at = f"config_groups.{clean(name)}"
        if not refuses:
            yield from (f"{at}.{clean(key)}" for key, value in mapping(group).items() if key not in _GROUP and _asks(value))
        if refuses and per_token(mapping(group)):
            yield f"{at}.input_activations.dynamic"
        for what in ("weights", "input_activations"):
            for key, value in mapping(mapping(group).get(what)).items():
                known = _NUMBERS.get(key, _ANY if refuses else ())
                if _asks(value) and known is not _ANY and value not in known:
                    yield f"{at}.{what}.{clean(key)}"


def _asks(value: object) -> bool:
    """False for null, false, 0, and what is empty, at any depth."""
    return any(map(_asks, value.values())) if isinstance(value, dict) else bool(value)
