"""E1, E2: what the two metadata places say, each by itself and compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from export.exclude import compressed_tensors_quantizes
from export.findings import Finding, error, warning
from export.folder import Folder, mapping, names
from export.layout import COMPRESSED_TENSORS, LAYOUTS, MODELOPT
from export.rules.compressed_tensors import e1_scheme

CHECKED = ("NVFP4", "W4A16_NVFP4")
_NESTED_KEYS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
_NESTED = "hf_quant_config.json"
_FOUR_BITS = {"num_bits": 4, "type": "float", "dynamic": False}
_AGAIN = "export the arm again"


def e1_places_agree(folder: Folder) -> Iterator[Finding]:
    """Both config places are present, well-formed and say the same; the nested one has the keys vLLM indexes."""
    outer, nested = folder.quantization, folder.nested_quantization
    yield from _method(folder)
    if folder.layout is COMPRESSED_TENSORS:
        yield from e1_scheme(folder, outer or {})
        return
    if outer is None:
        yield error("E1", "config.json", "has no quantization_config: vLLM and transformers read the model as BF16",
                    "copy it from hf_quant_config.json, or " + _AGAIN)  # fmt: skip
    else:
        yield from _outer(folder, outer)
    if not nested:
        yield error("E1", _NESTED, "is missing or has no `quantization`: TensorRT-LLM reads the model as BF16",
                    "write it from config.json's quantization_config, or " + _AGAIN)  # fmt: skip
        return
    yield from _nested(nested)
    if outer is None:
        return
    yield from _same("quant_algo", outer.get("quant_algo"), nested.get("quant_algo"))
    for module in sorted({*names(outer.get("ignore"))} ^ {*names(nested.get("exclude_modules"))}):
        yield error("E1", module, "is in only one of the two exclude lists: vLLM and TensorRT-LLM would load it differently",
                    "make config.json `ignore` and hf_quant_config.json `exclude_modules` equal")  # fmt: skip
    scheme, algorithm = outer.get("kv_cache_scheme"), nested.get("kv_cache_quant_algo")
    bits = mapping(scheme).get("num_bits") if isinstance(scheme, dict) else {"FP8": 8, "NVFP4": 4}.get(str(scheme))
    yield from _same("KV cache bits", bits, {"FP8": 8, "NVFP4": 4}.get(str(algorithm)))


def _method(folder: Folder) -> Iterator[Finding]:
    """quant_method is the one that reads the tensors' names."""
    if folder.quantization is None:
        return
    method, packed = folder.quantization.get("quant_method"), folder.packed
    named = [
        layout for layout in LAYOUTS.values() if any(f"{m}.{layout.global_scale}" in folder.tensors for m in packed)
    ]
    wanted = named[0].name if len(named) == 1 else folder.layout.name
    known = (MODELOPT.name, "modelopt_fp4") if folder.layout is MODELOPT else (COMPRESSED_TENSORS.name,)
    if method not in known or wanted != folder.layout.name:
        yield error("E1", "config.json", f"quant_method is {method!r}: vLLM does not know what to do with these tensors",
                    f'set it to "{wanted}"')  # fmt: skip


def _outer(folder: Folder, outer: dict[str, Any]) -> Iterator[Finding]:
    yield from _list_of_names("config.json", "ignore", outer.get("ignore"), "ignore" in outer)
    if folder.algorithm not in CHECKED:
        return
    groups = outer.get("config_groups")
    if groups is None:
        yield error("E1", "config.json", "has no config_groups: readers that go by it load the model as BF16", _AGAIN)
    elif not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        yield error("E1", "config.json", f"config_groups is {groups!r}, expected an object of objects", _AGAIN)
    yield from _sixteen("config.json", outer.get("group_size"), "group_size" in outer)
    for name, group in mapping(groups).items():
        yield from _group(str(name), mapping(group), folder.algorithm == "NVFP4")
    untargeted = [m for m in folder.packed if not compressed_tensors_quantizes(m, folder.targets, [])]
    if untargeted and folder.targets:
        yield error("E1", "config.json", f"no target of the config groups is or names {untargeted[0]}, which is packed "
                    f"({len(untargeted)} modules)", 'set targets to ["Linear"]')  # fmt: skip


def _group(name: str, group: dict[str, Any], activations: bool) -> Iterator[Finding]:
    """What a config group says about weights and activations is what NVFP4 is."""
    for what, wanted in (("weights", True), ("input_activations", activations)):
        numbers = group.get(what)
        if (numbers is not None) != wanted:
            has = "has" if numbers is not None else "lacks"
            yield error("E1", "config.json", f"{name} {has} {what}, which contradicts quant_algo", _AGAIN)
        elif wanted and not isinstance(numbers, dict):
            yield error("E1", "config.json", f"{name}.{what} is {numbers!r}, expected an object", _AGAIN)
        elif wanted:
            yield from _sixteen(f"config.json {name}.{what}", mapping(numbers).get("group_size"), True)
            found = {key: value for key, value in mapping(numbers).items() if key in _FOUR_BITS}
            if found != _FOUR_BITS or found["dynamic"] is not False:
                yield error("E1", "config.json", f"{name}.{what} says {found}, NVFP4 is {_FOUR_BITS}", _AGAIN)
    targets = group.get("targets")
    if not names(targets) or names(targets) != targets:
        yield error("E1", "config.json", f"{name}.targets is {targets!r}, expected module types or names", '["Linear"]')


def _nested(nested: dict[str, Any]) -> Iterator[Finding]:
    mixed = nested.get("quant_algo") == "MIXED_PRECISION"
    for key in _NESTED_KEYS:
        if key not in nested and not mixed:
            yield error("E1", _NESTED, f"lacks {key}: vLLM fails on it", f"add {key}")
    yield from _list_of_names(_NESTED, "exclude_modules", nested.get("exclude_modules"), "exclude_modules" in nested)
    if nested.get("quant_algo") in CHECKED:
        yield from _sixteen(_NESTED, nested.get("group_size"), "group_size" in nested)
    known = ("FP8", "NVFP4", "INT8", None)
    if nested.get("kv_cache_quant_algo") not in known:
        yield error("E1", _NESTED, f"kv_cache_quant_algo is {nested['kv_cache_quant_algo']!r}, which no engine knows",
                    "set it to null or FP8")  # fmt: skip


def _list_of_names(place: str, key: str, value: object, there: bool) -> Iterator[Finding]:
    if there and (not isinstance(value, list) or names(value) != value):
        yield error("E1", place, f"{key} is {value!r}, expected a list of module names", _AGAIN)


def _sixteen(place: str, size: object, there: bool) -> Iterator[Finding]:
    if there and (size != 16 or isinstance(size, bool)):
        yield error("E1", place, f"group_size is {size!r}: NVFP4 blocks have 16", "set it to 16")


def _same(what: str, outer: object, nested: object) -> Iterator[Finding]:
    if outer != nested:
        yield error(
            "E1",
            "config.json",
            f"{what} is {outer!r}, hf_quant_config.json says {nested!r}",
            "make the two places equal",
        )


def e2_algorithm(folder: Folder) -> Iterator[Finding]:
    """The algorithm is one this checker knows; others are unsupported here, not broken."""
    if folder.algorithm is None:
        yield error("E2", "config.json", "names no quant_algo", "set it to NVFP4 or W4A16_NVFP4, as the tensors are")
    elif folder.algorithm.startswith("FP8") and folder.layout is MODELOPT and folder.holds_nvfp4:
        yield error("E2", "config.json", f"quant_algo is {folder.algorithm}, but modules are packed in 4 bits: the engine reads "
                    "codes as FP8 weights", "set it to NVFP4 or W4A16_NVFP4, as the tensors are")  # fmt: skip
    elif folder.algorithm == "MIXED_PRECISION" and not mapping((folder.quantization or {}).get("quantized_layers")):
        yield error("E2", "config.json", "quant_algo is MIXED_PRECISION, but there are no quantized_layers: vLLM runs every "
                    "layer unquantized", "list them, or set NVFP4 or W4A16_NVFP4, as the tensors are")  # fmt: skip
    elif folder.algorithm not in CHECKED:
        yield warning("E2", "config.json", f"quant_algo {folder.algorithm} is not one this checker knows: only files, index and "
                      "metadata were checked", "check it with the tool that made it")  # fmt: skip
