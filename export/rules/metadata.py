"""E1, E2: what the two metadata places say, each by itself and compared."""

from __future__ import annotations

from collections.abc import Iterator

from export.folder import FLOATING, Folder
from export.layouts.config_files import DTYPE_KEYS
from export.layouts.exclude import compressed_tensors_quantizes
from export.layouts.layout import COMPRESSED_TENSORS, MODELOPT
from export.rules.compressed_tensors import e1_scheme
from export.rules.findings import Finding, error, warning
from qad.numerics.formats import FORMATS, KV_FORMATS, MIXED, kv_format_of, quantizes_activations
from qad.untrusted import mapping, names

# Of modules of a mixed checkpoint, known to engines but not to this checker.
_OTHERS = (
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MXFP8",
    "NVFP4_AWQ",
    "NVFP4_SVD",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "INT4_AWQ",
)
_NESTED_KEYS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
_NESTED = "hf_quant_config.json"
_AGAIN = "export the arm again"


def checked() -> tuple[str, ...]:
    """Algorithms whose tensors this checker knows."""
    return (*FORMATS, MIXED)


def e1_places_agree(folder: Folder) -> Iterator[Finding]:
    """Both config places are present, well-formed and say the same; the nested one has the keys vLLM indexes."""
    outer, nested = folder.announced.outer, folder.announced.inner
    yield from _method(folder)
    if folder.layout is COMPRESSED_TENSORS:
        if folder.algorithm in checked():
            yield from e1_scheme(folder, outer or {})
        return
    if outer is None:
        told = "has no quantization_config: vLLM and transformers read the model as BF16"
        yield error("E1", "config.json", told, "copy it from hf_quant_config.json, or " + _AGAIN)
    else:
        yield from _outer(folder, outer)
    if not nested:
        told = "is missing or has no `quantization`: TensorRT-LLM reads the model as BF16"
        yield error("E1", _NESTED, told, "write it from config.json's quantization_config, or " + _AGAIN)
        return
    yield from _nested(nested)
    if outer is None:
        return
    yield from _same("quant_algo", outer.get("quant_algo"), nested.get("quant_algo"))
    if MIXED in (outer.get("quant_algo"), nested.get("quant_algo")):
        yield from _same_layers(mapping(outer.get("quantized_layers")), mapping(nested.get("quantized_layers")))
    for module in sorted({*names(outer.get("ignore"))} ^ {*names(nested.get("exclude_modules"))}):
        told = "is in only one of the two exclude lists: vLLM and TensorRT-LLM would load it differently"
        yield error("E1", module, told, "make config.json `ignore` and hf_quant_config.json `exclude_modules` equal")
    scheme, algorithm = outer.get("kv_cache_scheme"), nested.get("kv_cache_quant_algo")
    yield from _same("the KV cache's format", kv_format_of(scheme), kv_format_of(algorithm))


def e1_dtype(folder: Folder) -> Iterator[Finding]:
    """Engines compute in the dtype that config.json names, and cast what has another one."""
    found = {entry.dtype for name, (_, entry) in folder.tensors.items() if _plain_weight(folder, name, entry.dtype)}
    for part in (folder.config, mapping(folder.config.get("text_config"))):
        said = next((part[key] for key in DTYPE_KEYS if part.get(key)), None)
        stored = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(str(said))
        if stored and found and stored not in found:
            told = f"says dtype {said}, and its unquantized weights are {', '.join(sorted(found))}: engines compute in {said}"
            yield warning("E1", "config.json", told, f"set dtype to what the weights are, or {_AGAIN}")


def _plain_weight(folder: Folder, name: str, dtype: str) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and dtype in FLOATING and module not in folder.packed


def _method(folder: Folder) -> Iterator[Finding]:
    """quant_method is the one that reads the tensors' names."""
    if folder.announced.outer is None:
        return
    method, named = folder.announced.outer.get("quant_method"), folder.named_layouts
    wanted = named[0].name if len(named) == 1 else folder.layout.name
    known = (MODELOPT.name, "modelopt_fp4") if folder.layout is MODELOPT else (COMPRESSED_TENSORS.name,)
    if method not in known or wanted != folder.layout.name:
        told = f"quant_method is {method!r}: vLLM does not know what to do with these tensors"
        yield error("E1", "config.json", told, f'set it to "{wanted}"')


def _outer(folder: Folder, outer: dict[str, object]) -> Iterator[Finding]:
    yield from _list_of_names("config.json", "ignore", outer.get("ignore"), "ignore" in outer)
    if folder.algorithm not in checked():
        return
    groups = outer.get("config_groups")
    if groups is None:
        yield error("E1", "config.json", "has no config_groups: readers that go by it load the model as BF16", _AGAIN)
    elif not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        yield error("E1", "config.json", f"config_groups is {groups!r}, expected an object of objects", _AGAIN)
    wanted = _group_size(str(folder.algorithm)) or next(filter(None, map(_group_size, FORMATS)))
    yield from _size("config.json", outer.get("group_size"), "group_size" in outer, wanted)
    for name, group in mapping(groups).items():
        yield from _group(str(name), mapping(group), _format_of_group(folder, mapping(group)))
    if folder.algorithm == MIXED:
        yield from _layers("config.json", outer)
        yield from _targets(folder, mapping(groups))
    untargeted = [m for m in folder.packed if not compressed_tensors_quantizes(m, folder.announced.targets, [])]
    if untargeted and folder.announced.targets:
        told = f"no target of the config groups is or names {untargeted[0]}, which is packed ({len(untargeted)} modules)"
        yield error("E1", "config.json", told, 'set targets to ["Linear"]')


def _format_of_group(folder: Folder, group: dict[str, object]) -> str:
    """What a config group is to say: the algorithm of the folder, or of its first target where it is mixed."""
    first = next(iter(names(group.get("targets"))), "")
    listed = folder.announced_format(first)
    return listed if listed in FORMATS else folder.stored_format(first)


def _layers(place: str, outer: dict[str, object]) -> Iterator[Finding]:
    """quantized_layers is an object of objects whose blocks have 16 elements."""
    for module, layer in mapping(outer.get("quantized_layers")).items():
        if not isinstance(layer, dict) or not layer.get("quant_algo"):
            yield error("E1", str(module), f"quantized_layers of {place} gives it {layer!r}: vLLM fails on it", _AGAIN)
        elif wanted := _group_size(str(layer["quant_algo"])):
            yield from _size(f"{place} quantized_layers {module}", layer.get("group_size"), True, wanted)


def _group_size(algorithm: str) -> int | None:
    """Of a format's blocks; None where it has none, or is not known."""
    found = MODELOPT.of(algorithm).weights.get("group_size") if algorithm in FORMATS else None
    return found if isinstance(found, int) else None


def _targets(folder: Folder, groups: dict[str, object]) -> Iterator[Finding]:
    """Every module of a mixed folder is a target of one config group, beside others of its own algorithm."""
    seen: dict[str, str] = {}
    for name, group in groups.items():
        targets = names(mapping(group).get("targets"))
        for target in targets:
            if target in seen:
                yield error("E1", target, f"is a target of {seen[target]} and of {name}", _AGAIN)
            seen[target] = str(name)
        formats = {target: folder.announced_format(target) for target in targets}
        other = next((target for target in targets if formats[target] != formats[targets[0]]), None)
        if other:
            told = (
                f"is {formats[other]} by quantized_layers, but a target of {name} with {targets[0]}, which "
                f"is {formats[targets[0]]}"
            )
            yield error("E1", other, told, _AGAIN)


def _group(name: str, group: dict[str, object], format: str) -> Iterator[Finding]:
    """What a config group says about weights and activations is what its format is."""
    wanted_size = _group_size(format)
    bits = {key: value for key, value in MODELOPT.of(format).weights.items() if key != "group_size"}
    for what, wanted in (("weights", True), ("input_activations", quantizes_activations(format))):
        numbers = group.get(what)
        if (numbers is not None) != wanted:
            has = "has" if numbers is not None else "lacks"
            yield error("E1", "config.json", f"{name} {has} {what}, which contradicts quant_algo", _AGAIN)
        elif wanted and not isinstance(numbers, dict):
            yield error("E1", "config.json", f"{name}.{what} is {numbers!r}, expected an object", _AGAIN)
        elif wanted:
            size = mapping(numbers).get("group_size")
            if wanted_size:
                yield from _size(f"config.json {name}.{what}", size, True, wanted_size)
            elif size is not None:
                told = f"{name}.{what} has group_size {size!r}, {format} has one scale a tensor"
                yield error("E1", "config.json", told, _AGAIN)
            found = {key: value for key, value in mapping(numbers).items() if key in bits}
            if found != bits or found["dynamic"] is not False:
                yield error("E1", "config.json", f"{name}.{what} says {found}, {format} is {bits}", _AGAIN)
    targets = group.get("targets")
    if not names(targets) or names(targets) != targets:
        yield error("E1", "config.json", f"{name}.targets is {targets!r}, expected module types or names", '["Linear"]')


def _nested(nested: dict[str, object]) -> Iterator[Finding]:
    given = nested.get("quant_algo")
    algorithm = given if isinstance(given, str) else None
    for key in _NESTED_KEYS:
        sized = algorithm not in FORMATS or _group_size(str(algorithm))
        needless = algorithm == MIXED or (key == "group_size" and not sized)
        if key not in nested and not needless:
            yield error("E1", _NESTED, f"lacks {key}: vLLM fails on it", f"add {key}")
    yield from _list_of_names(_NESTED, "exclude_modules", nested.get("exclude_modules"), "exclude_modules" in nested)
    if wanted := _group_size(str(algorithm)):
        yield from _size(_NESTED, nested.get("group_size"), "group_size" in nested, wanted)
    known = (*KV_FORMATS, "INT8", None)
    if nested.get("kv_cache_quant_algo") not in known:
        told = f"kv_cache_quant_algo is {nested['kv_cache_quant_algo']!r}, which no engine knows"
        yield error("E1", _NESTED, told, f"set it to null or {' or '.join(KV_FORMATS)}")


def _list_of_names(place: str, key: str, value: object, there: bool) -> Iterator[Finding]:
    if there and (not isinstance(value, list) or names(value) != value):
        yield error("E1", place, f"{key} is {value!r}, expected a list of module names", _AGAIN)


def _size(place: str, size: object, there: bool, wanted: int) -> Iterator[Finding]:
    if there and (size != wanted or isinstance(size, bool)):
        yield error("E1", place, f"group_size is {size!r}: NVFP4 blocks have {wanted}", f"set it to {wanted}")


def _same(what: str, outer: object, nested: object) -> Iterator[Finding]:
    if outer != nested:
        yield error(
            "E1", "config.json", f"{what} is {outer!r}, hf_quant_config.json says {nested!r}", "make the two places equal"
        )


def _same_layers(outer: dict[str, object], nested: dict[str, object]) -> Iterator[Finding]:
    """Listed the same in both places, and in one order, by which TensorRT-LLM finds a module."""
    for module in sorted({*outer, *nested}):
        if outer.get(module) != nested.get(module):
            told = (
                f"quantized_layers of config.json gives it {outer.get(module)!r}, hf_quant_config.json "
                f"{nested.get(module)!r}: vLLM and TensorRT-LLM would load it differently"
            )
            yield error("E1", module, told, "make the two places equal")


def e2_not_computed(folder: Folder) -> Iterator[Finding]:
    """Every key is one whose meaning is known here; an engine may compute more for another one."""
    unknown = folder.announced.not_computed
    if unknown:
        told = (
            f"asks for {', '.join(unknown[:4])}, which this checker does not know: not checked, "
            "and the tensors alone are not the model"
        )
        yield warning("E2", "config.json", told, "check it with the tool that made it")


def e2_algorithm(folder: Folder) -> Iterator[Finding]:
    """The algorithm is one this checker knows; others are unsupported here, not broken."""
    said = str((folder.announced.outer or {}).get("quant_algo"))
    if folder.algorithm is None:
        yield error("E2", "config.json", "names no quant_algo", f"set it to {_named()}, as the tensors are")
    elif folder.algorithm.startswith("FP8") and folder.layout is MODELOPT and folder.holds_blocks:
        told = f"quant_algo is {folder.algorithm}, but modules are packed in blocks: the engine reads codes as FP8 weights"
        yield error("E2", "config.json", told, f"set it to {_named(blocks=True)}, as the tensors are")
    elif folder.algorithm == MIXED and folder.layout is MODELOPT and not folder.announced.listed:
        told = "quant_algo is MIXED_PRECISION, but there are no quantized_layers: vLLM runs every layer unquantized"
        yield error("E2", "config.json", told, f"list them, or set {_named(blocks=True)}, as the tensors are")
    elif _unknown_algorithms(folder):
        module, algorithm = _unknown_algorithms(folder)[0]
        yield error("E2", module, f"quantized_layers gives it {algorithm!r}, which no engine knows", _AGAIN)
    elif unchecked_layers(folder):
        unknown = ", ".join(unchecked_layers(folder))
        told = f"quantized_layers has {unknown}, which this checker does not know: only files, index and metadata were checked"
        yield warning("E2", "config.json", told, "check it with the tool that made it")
    elif said in FORMATS and folder.algorithm in FORMATS and said != folder.algorithm:
        told = (
            f"quant_algo is {said}, but no config group has input_activations: vLLM runs it as "
            f"{folder.algorithm}, TensorRT-LLM waits for input scales"
        )
        yield warning("E2", "config.json", told, f"set quant_algo to {folder.algorithm}", "trtllm")
    elif folder.algorithm not in checked():
        told = f"quant_algo {folder.algorithm} is not one this checker knows: only files, index and metadata were checked"
        yield warning("E2", "config.json", told, "check it with the tool that made it")


def _named(blocks: bool = False) -> str:
    """The formats, or those with block scales."""
    return " or ".join(name for name, record in FORMATS.items() if record.block or not blocks)


def unchecked_layers(folder: Folder) -> list[str]:
    """Algorithms of a mixed folder that engines know and this checker does not."""
    return sorted({algorithm for _, algorithm in _listed(folder) if algorithm in _OTHERS})


def _unknown_algorithms(folder: Folder) -> list[tuple[str, str]]:
    return [(m, algorithm) for m, algorithm in _listed(folder) if algorithm not in (*FORMATS, *_OTHERS)]


def _listed(folder: Folder) -> list[tuple[str, str]]:
    if folder.algorithm != MIXED or folder.layout is not MODELOPT:
        return []
    layers = mapping((folder.announced.outer or {}).get("quantized_layers"))
    return [(module, str(mapping(layer).get("quant_algo"))) for module, layer in layers.items()]
