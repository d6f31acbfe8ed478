"""E7, E8, E9, E10: which modules are quantized, excluded, complete; which caches are scaled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from export.exclude import trtllm_excludes, vllm_excludes
from export.findings import Finding, error
from export.folder import SCALES, Folder, mapping

_AGAIN = "export the arm again"


def e7_exclusion(folder: Folder) -> Iterator[Finding]:
    """Every unquantized Linear is excluded under both engines' rules, every packed one under neither."""
    patterns = folder.excluded
    for pattern in patterns:
        if pattern != pattern.strip(".") or not pattern:
            yield error(
                "E7", pattern or "''", "is empty, or starts or ends with a dot: it matches nothing, or everything",
                "use the full module name",
            )  # fmt: skip
    everything = {*folder.packed, *folder.linears}
    for module, packed in [*((m, True) for m in folder.packed), *((m, False) for m in folder.linears)]:
        for engine in ("vllm", "trtllm"):
            try:
                excluded = (
                    vllm_excludes(module, patterns, everything)
                    if engine == "vllm"
                    else trtllm_excludes(module, patterns)
                )
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
    for name in folder.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf in SCALES and module in excluded:
            yield error(
                "E8", module, f"is excluded but has {leaf}: the engine has no place for it", "remove the tensor"
            )
        if folder.tied and module == "lm_head" and (leaf in SCALES or folder.tensors[name][1].dtype == "U8"):
            yield error("E8", module, f"shares the embedding's weight (tie_word_embeddings) but has {leaf}",
                        "keep head and embedding BF16, or untie them")  # fmt: skip


def e9_experts(folder: Folder) -> Iterator[Finding]:
    """Every expert of a layer is there, with the same projections as the others."""
    experts: dict[str, dict[int, set[str]]] = {}
    for name in folder.tensors:
        match = re.match(r"(.*\.experts)\.(\d+)\.(.+)$", name)
        if match:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    config = mapping(folder.config.get("text_config")) or folder.config
    counts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    wanted = next((count for count in counts if isinstance(count, int) and count > 0), None)
    for parent, by_number in experts.items():
        everything = set.union(*by_number.values())
        for number in range(wanted or max(by_number) + 1):
            missing = everything - by_number.get(number, set())
            if missing:
                yield error("E9", f"{parent}.{number}", f"lacks {sorted(missing)[0]} ({len(missing)} tensors), which other "
                            "experts have", _AGAIN)  # fmt: skip


def e10_kv_scales(folder: Folder) -> Iterator[Finding]:
    """k_scale and v_scale come in pairs, are positive scalars, and exist exactly where a KV algorithm is announced."""
    algorithm = folder.nested_quantization.get("kv_cache_quant_algo") or (folder.quantization or {}).get(
        "kv_cache_scheme"
    )
    scales = [name for name in folder.tensors if name.endswith((".k_scale", ".v_scale"))]
    if scales and not algorithm:
        yield error("E10", scales[0].rpartition(".")[0], "has KV scales but no KV cache algorithm is announced",
                    "announce FP8 in both places or remove the scales")  # fmt: skip
    if algorithm and not scales:
        yield error("E10", "config.json", "announces a quantized KV cache but there are no scales: the engine uses 1.0",
                    "calibrate KV scales, or set kv_cache_quant_algo to null")  # fmt: skip
    for name in scales:
        module, entry = name.rpartition(".")[0], folder.tensors[name][1]
        attention, leaf = module.rpartition(".")[0], name.rpartition(".")[2]
        other = f"{attention}.v_proj.v_scale" if leaf == "k_scale" else f"{attention}.k_proj.k_scale"
        if name.endswith(("k_proj.k_scale", "v_proj.v_scale")) and other not in folder.tensors:
            yield error("E10", module, f"has {leaf} but {other} is missing", "write both")
        if entry.shape not in ((), (1,)) or entry.dtype not in ("F32", "BF16", "F16"):
            yield error("E10", module, f"{leaf} is {entry.dtype} {list(entry.shape)}, expected an F32 scalar", _AGAIN)
        else:
            value = float(folder.get(name).float().reshape(()))
            if not (math.isfinite(value) and value > 0):
                yield error("E10", module, f"{leaf} is {value}", "calibrate again")
