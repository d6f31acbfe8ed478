"""E1 for the compressed-tensors layout: quantization_config says NVFP4, whole, in the words of the library's data classes.

A key that is left out has the library's default (8-bit integers, one scale a tensor), and an unknown one inside a group
is refused by it, so both are errors here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from export.compressed_tensors import FORMAT
from export.config_files import CONFIG, NESTED
from export.findings import Finding, error
from export.folder import Folder, mapping, names

_AGAIN = "`qad check --fix` writes it anew, or export the arm again"
_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
            "dynamic": False}  # fmt: skip
_ACTIVATIONS = {**_WEIGHTS, "dynamic": "local"}
_DEFAULTS = {"symmetric": True, "dynamic": False}
_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
_NUMBER_KEYS = {*_WEIGHTS, "block_structure", "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"}
_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def e1_scheme(folder: Folder, outer: dict[str, Any]) -> Iterator[Finding]:
    """outer: quantization_config."""
    if folder.nested is not None:
        yield error("E1", NESTED, "lies beside the compressed-tensors layout: TensorRT-LLM reads the folder as ModelOpt's",
                    f"remove {NESTED}", "trtllm")  # fmt: skip
    if outer.get("format") != FORMAT:
        yield _error(f"format is {outer.get('format')!r}, the tensors are {FORMAT}", f"set it to {FORMAT}")
    if outer.get("quantization_status") != "compressed":
        status = outer.get("quantization_status")
        yield _error(f"quantization_status is {status!r}: transformers looks for unpacked weights and makes them up",
                     'set it to "compressed"')  # fmt: skip
    if not isinstance(outer.get("ignore"), list) or names(outer["ignore"]) != outer["ignore"]:
        yield _error(f"ignore is {outer.get('ignore')!r}, expected a list of module names", _AGAIN)
    groups = outer.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        yield _error(f"config_groups is {groups!r}, expected an object of objects: nothing is quantized", _AGAIN)
        return
    for name, group in groups.items():
        yield from _group(str(name), group)
    if len({bool(group.get("input_activations")) for group in groups.values()}) > 1:
        yield _error(
            "some config groups quantize activations and some do not: only one algorithm a folder is checked", _AGAIN
        )
    yield from _kv_cache(outer.get("kv_cache_scheme"))


def _group(name: str, group: dict[str, Any]) -> Iterator[Finding]:
    for key in sorted({*group} - _GROUP_KEYS):
        yield _error(f"{name}.{key} is no key of a config group: the library refuses it", f"remove {key}")
    if group.get("format") not in (None, FORMAT):
        yield _error(f"{name}.format is {group['format']!r}, the tensors are {FORMAT}", f"set it to {FORMAT}")
    targets = group.get("targets")
    if not names(targets) or names(targets) != targets:
        yield _error(f"{name}.targets is {targets!r}, expected module types or names", '["Linear"]')
    yield from _numbers(f"{name}.weights", group.get("weights"), _WEIGHTS)
    if group.get("input_activations") is not None:
        yield from _numbers(f"{name}.input_activations", group["input_activations"], _ACTIVATIONS)
    if group.get("output_activations") is not None:
        yield _error(f"{name}.output_activations is not null: NVFP4 does not quantize outputs", "set it to null")


def _numbers(where: str, numbers: object, wanted: dict[str, Any]) -> Iterator[Finding]:
    if not isinstance(numbers, dict):
        yield _error(f"{where} is {numbers!r}, expected an object", _AGAIN)
        return
    for key in sorted({*numbers} - _NUMBER_KEYS):
        yield _error(f"{where}.{key} is no key the library knows: it refuses the model", f"remove {key}")
    for key, value in wanted.items():
        found = numbers.get(key, _DEFAULTS.get(key))
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            yield _error(f"{where}.{key} is {found!r}, NVFP4 is {value!r}", f"set it to {value!r}")


def _kv_cache(scheme: object) -> Iterator[Finding]:
    if scheme is None:
        return
    found = {**_DEFAULTS, **{key: value for key, value in mapping(scheme).items() if key in _KV_CACHE}}
    if found != _KV_CACHE or mapping(scheme).get("strategy") not in ("tensor", "attn_head"):
        yield _error(
            f"kv_cache_scheme is {scheme!r}: vLLM knows 8-bit floats, symmetric, one scale a tensor or head", _AGAIN
        )


def _error(message: str, remedy: str) -> Finding:
    return error("E1", CONFIG, message, remedy)
