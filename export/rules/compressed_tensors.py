"""E1 for the compressed-tensors layout: quantization_config says what the tensors are, whole, in the words of the library's
data classes.

A key that is left out has the library's default (8-bit integers, one scale a tensor), and an unknown one inside a group
is refused by it, so both are errors here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from export.folder import Folder
from export.layouts.compressed_tensors import MIXED_FORMAT, format_name
from export.layouts.config_files import CONFIG, NESTED
from export.layouts.exclude import compressed_tensors_quantizes
from export.layouts.layout import COMPRESSED_TENSORS
from export.rules.findings import Finding, error
from qad.numerics.formats import FORMATS, weights_alone
from qad.untrusted import mapping, names

_AGAIN = "`qad check --fix` writes it anew, or export the arm again"
_DEFAULTS = {"symmetric": True, "dynamic": False}
_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
_NUMBER_KEYS = {
    "num_bits",
    "type",
    "strategy",
    "group_size",
    "symmetric",
    "dynamic",
    "block_structure",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
}
_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def e1_scheme(folder: Folder, outer: dict[str, object]) -> Iterator[Finding]:
    """outer: quantization_config."""
    if folder.nested is not None:
        told = "lies beside the compressed-tensors layout: TensorRT-LLM reads the folder as ModelOpt's"
        yield error("E1", NESTED, told, f"remove {NESTED}", "trtllm")
    stored = {folder.stored_format(module) for module in folder.packed}
    kinds = {format_name(format) for format in stored or {next(iter(FORMATS))}}
    wanted = kinds.pop() if len(kinds) == 1 else MIXED_FORMAT
    if outer.get("format") != wanted:
        yield _error(f"format is {outer.get('format')!r}, the tensors are {wanted}", f"set it to {wanted}")
    if outer.get("quantization_status") != "compressed":
        told = f"quantization_status is {outer.get('quantization_status')!r}: transformers looks for unpacked weights and makes "
        yield _error(told + "them up", 'set it to "compressed"')
    if not isinstance(outer.get("ignore"), list) or names(outer["ignore"]) != outer["ignore"]:
        yield _error(f"ignore is {outer.get('ignore')!r}, expected a list of module names", _AGAIN)
    groups = outer.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        yield _error(f"config_groups is {groups!r}, expected an object of objects: nothing is quantized", _AGAIN)
        return
    seen: set[str] = set()
    for name, group in groups.items():
        targets = names(group.get("targets"))
        for target in seen.intersection(targets):
            yield _error(f"{target} is a target of two config groups: which one counts depends on the reader", _AGAIN)
        seen.update(targets)
        stores = (m for m in folder.packed if compressed_tensors_quantizes(m, targets, []))
        yield from _group(str(name), group, folder.stored_format(next(stores, "")), wanted == MIXED_FORMAT)
    yield from _kv_cache(outer.get("kv_cache_scheme"))


def _group(name: str, group: dict[str, object], stored: str, mixed: bool) -> Iterator[Finding]:
    """stored: format of the tensors of its first target. mixed: each group has to say its own format."""
    format = format_name(stored)
    for key in sorted({*group} - _GROUP_KEYS):
        yield _error(f"{name}.{key} is no key of a config group: the library refuses it", f"remove {key}")
    if group.get("format") not in ((format,) if mixed else (None, format)):
        yield _error(f"{name}.format is {group.get('format')!r}, the tensors are {format}", f"set it to {format}")
    targets = group.get("targets")
    if not names(targets) or names(targets) != targets:
        yield _error(f"{name}.targets is {targets!r}, expected module types or names", '["Linear"]')
    own = COMPRESSED_TENSORS.of(stored)
    yield from _numbers(f"{name}.weights", group.get("weights"), own.weights)
    if not weights_alone(FORMATS[stored]) or group.get("input_activations") is not None:
        yield from _numbers(f"{name}.input_activations", group.get("input_activations"), own.inputs)
    if group.get("output_activations") is not None:
        yield _error(f"{name}.output_activations is not null: no format here quantizes outputs", "set it to null")


def _numbers(where: str, given: object, wanted: Mapping[str, object]) -> Iterator[Finding]:
    if not isinstance(given, dict):
        yield _error(f"{where} is {given!r}, expected an object", _AGAIN)
        return
    for key in sorted({*given} - _NUMBER_KEYS):
        yield _error(f"{where}.{key} is no key the library knows: it refuses the model", f"remove {key}")
    for key, value in wanted.items():
        found = given.get(key, _DEFAULTS.get(key))
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            yield _error(f"{where}.{key} is {found!r}, expected {value!r}", f"set it to {value!r}")


def _kv_cache(scheme: object) -> Iterator[Finding]:
    if scheme is None:
        return
    found = {**_DEFAULTS, **{key: value for key, value in mapping(scheme).items() if key in _KV_CACHE}}
    if found != _KV_CACHE or mapping(scheme).get("strategy") not in ("tensor", "attn_head"):
        yield _error(f"kv_cache_scheme is {scheme!r}: vLLM knows 8-bit floats, symmetric, one scale a tensor or head", _AGAIN)


def _error(message: str, remedy: str) -> Finding:
    return error("E1", CONFIG, message, remedy)
