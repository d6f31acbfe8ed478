"""E1, E2, E7, E8, E10: what the two metadata places say, and whether the tensors agree."""

from __future__ import annotations

from collections.abc import Iterator

from export.exclude import trtllm_excludes, vllm_excludes
from export.findings import Finding, error, warning
from export.folder import Folder

CHECKED = ("NVFP4", "W4A16_NVFP4")
KNOWN = (*CHECKED, "FP8", "MIXED_PRECISION")
_NESTED_KEYS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
_AGAIN = "export the arm again"


def e1_places_agree(folder: Folder) -> Iterator[Finding]:
    """Both config places are present and say the same; the nested one has the keys vLLM indexes."""
    outer, nested = folder.quantization, folder.nested_quantization
    if outer is None:
        yield error("E1", "config.json", "has no quantization_config: vLLM and transformers read the model as BF16",
                    "copy it from hf_quant_config.json, or " + _AGAIN)  # fmt: skip
    if not nested:
        yield error("E1", "hf_quant_config.json", "is missing or has no `quantization`: TensorRT-LLM reads the model as BF16",
                    "write it from config.json's quantization_config, or " + _AGAIN)  # fmt: skip
        return
    for key in _NESTED_KEYS:
        if key not in nested and nested.get("quant_algo") != "MIXED_PRECISION":
            yield error("E1", "hf_quant_config.json", f"lacks {key}: vLLM fails on it", f"add {key}")
    if nested.get("group_size", 16) != 16:
        yield error(
            "E1", "hf_quant_config.json", f"group_size is {nested['group_size']}: NVFP4 blocks have 16", "set it to 16"
        )
    if outer is None:
        return
    yield from _compare(folder, "quant_algo", outer.get("quant_algo"), nested.get("quant_algo"))
    yield from _compare(
        folder, "exclude list", sorted(outer.get("ignore") or []), sorted(nested.get("exclude_modules") or [])
    )
    kv_outer = (outer.get("kv_cache_scheme") or {}).get("num_bits")
    kv_nested = {"FP8": 8, "NVFP4": 4}.get(str(nested.get("kv_cache_quant_algo")))
    yield from _compare(folder, "KV cache algorithm", kv_outer, kv_nested)
    for name, group in (outer.get("config_groups") or {}).items():
        size = (group.get("weights") or {}).get("group_size", 16)
        if size != 16 and folder.algorithm in CHECKED:
            yield error("E1", "config.json", f"{name} has group_size {size}: NVFP4 blocks have 16", "set it to 16")
        has_input = group.get("input_activations") is not None
        if folder.algorithm in CHECKED and has_input != (folder.algorithm == "NVFP4"):
            yield error("E1", "config.json", f"{name} {'has' if has_input else 'lacks'} input_activations, the algorithm is "
                        f"{folder.algorithm}", _AGAIN)  # fmt: skip


def _compare(folder: Folder, what: str, outer: object, nested: object) -> Iterator[Finding]:
    if outer == nested:
        return
    if isinstance(outer, list) and isinstance(nested, list):
        differing = sorted(set(outer) ^ set(nested)) or sorted(outer)
        for module in differing:
            yield error("E1", module, f"is in only one of the two {what}s: vLLM and TensorRT-LLM would load it differently",
                        "make config.json `ignore` and hf_quant_config.json `exclude_modules` equal")  # fmt: skip
        return
    yield error(
        "E1", "config.json", f"{what} is {outer!r}, hf_quant_config.json says {nested!r}", "make the two places equal"
    )


def e2_algorithm(folder: Folder) -> Iterator[Finding]:
    """The algorithm is one the engines know; others are unsupported here, not broken."""
    if folder.algorithm is None:
        yield error("E2", "config.json", "names no quant_algo", "set it to NVFP4 or W4A16_NVFP4, as the tensors are")
    elif folder.algorithm not in KNOWN:
        yield warning("E2", "config.json", f"quant_algo {folder.algorithm} is not one this checker knows: only files and index "
                      "were checked", "check it with the tool that made it")  # fmt: skip


def e7_exclusion(folder: Folder) -> Iterator[Finding]:
    """Every unquantized Linear is excluded under both engines' rules, every packed one under neither."""
    patterns = folder.excluded
    for pattern in patterns:
        if pattern != pattern.strip(".") or not pattern:
            yield error("E7", pattern, "starts or ends with a dot, so it matches nothing", "use the full module name")
    for module, packed in [*((m, True) for m in folder.packed), *((m, False) for m in folder.linears)]:
        for engine, excludes in (("vllm", vllm_excludes), ("trtllm", trtllm_excludes)):
            try:
                excluded = excludes(module, patterns)
            except ValueError as refusal:
                yield error(
                    "E7", module, f"{refusal}: vLLM refuses to load", "exclude all fused members or none", engine
                )
                continue
            if packed and excluded:
                yield error("E7", module, "is packed but its name is excluded: the engine would read codes as BF16 weights",
                            "list full names of unquantized modules only", engine)  # fmt: skip
            elif not packed and not excluded:
                yield error("E7", module, "has a BF16 weight but is not excluded: the engine would wait for its scales",
                            f"add {module} to the exclude lists", engine)  # fmt: skip


def e8_excluded_modules(folder: Folder) -> Iterator[Finding]:
    """No scale tensors on excluded modules; a tied head has none and no packed weight."""
    excluded = set(folder.excluded)
    tied = bool(folder.config.get("tie_word_embeddings"))
    for name in folder.tensors:
        module, _, leaf = name.rpartition(".")
        scale = leaf in ("weight_scale", "weight_scale_2", "input_scale")
        if scale and module in excluded:
            yield error(
                "E8", module, f"is excluded but has {leaf}: the engine has no place for it", "remove the tensor"
            )
        if tied and module == "lm_head" and (scale or folder.tensors[name][1].dtype == "U8"):
            yield error("E8", module, f"shares the embedding's weight (tie_word_embeddings) but has {leaf}",
                        "keep head and embedding BF16, or untie them")  # fmt: skip


def e10_kv_scales(folder: Folder) -> Iterator[Finding]:
    """k_scale and v_scale come in pairs, are positive scalars, and exist exactly where a KV algorithm is announced."""
    algorithm = folder.nested_quantization.get("kv_cache_quant_algo") or (folder.quantization or {}).get(
        "kv_cache_scheme"
    )
    names = [name for name in folder.tensors if name.endswith((".k_scale", ".v_scale"))]
    if names and not algorithm:
        yield error("E10", names[0].rpartition(".")[0], "has KV scales but no KV cache algorithm is announced",
                    "announce FP8 in both places or remove the scales")  # fmt: skip
    if algorithm and not names:
        yield error("E10", "config.json", "announces a quantized KV cache but there are no scales: the engine uses 1.0",
                    "calibrate KV scales, or set kv_cache_quant_algo to null")  # fmt: skip
    for name in names:
        module = name.rpartition(".")[0]
        attention, leaf = module.rpartition(".")[0], name.rpartition(".")[2]
        other = f"{attention}.v_proj.v_scale" if leaf == "k_scale" else f"{attention}.k_proj.k_scale"
        if name.endswith(("k_proj.k_scale", "v_proj.v_scale")) and other not in folder.tensors:
            yield error("E10", module, f"has {leaf} but {other} is missing", "write both")
        if folder.tensors[name][1].shape not in ((), (1,)):
            yield error("E10", module, f"{leaf} has shape {folder.tensors[name][1].shape}, expected a scalar", _AGAIN)
        elif not float(folder.get(name).float()) > 0:
            yield error("E10", module, f"{leaf} is {float(folder.get(name).float())}", "calibrate again")
