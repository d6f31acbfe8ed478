"""E7, E8, E10: which modules are quantized, which excluded; which caches are scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch

from export.folder import Folder
from export.layouts.exclude import (
    TrtllmFormats,
    compressed_tensors_quantizes,
    matches_any,
    trtllm_excludes,
    vllm_compressed_tensors_quantizes,
    vllm_excludes,
    vllm_format,
    with_ancestors,
)
from export.layouts.layout import COMPRESSED_TENSORS, code_dtypes, scale_leaves
from export.rules.findings import Finding, error, warning
from qad.model.families import DEFAULT
from qad.numerics.formats import MIXED
from qad.untrusted import mapping

_AGAIN = "export the arm again"


Readers = list[tuple[str, Callable[[str], str | None]]]


def e7_exclusion(folder: Folder) -> Iterator[Finding]:
    """Every unquantized Linear is excluded under the rules of every engine that reads the layout, every packed one under
    none."""
    known = _known_modules(folder)
    for pattern in sorted(folder.announced.endless):
        yield error("E7", pattern, "takes without end to match: engines that match it hang", "list full module names")
    for pattern in folder.announced.excluded:
        if pattern != pattern.strip(".") or not pattern:
            told = "is empty, or starts or ends with a dot: it matches nothing, or everything"
            yield error("E7", pattern or "''", told, "use the full module name")
        elif not matches_any(pattern, known):
            yield warning("E7", pattern, "is excluded, but no module has a name like that: a misspelling?", "remove it")
    everything = {*folder.packed, *folder.linears}
    readers = readers_of(folder, everything)
    for module, packed in [*((m, True) for m in folder.packed), *((m, False) for m in folder.linears)]:
        for engine, format_for in readers:
            try:
                runs_as = format_for(module)
            except ValueError as refusal:
                yield error("E7", module, f"{refusal}: vLLM refuses to load", "exclude all fused members or none", engine)
                continue
            if packed and runs_as is None:
                told = "is packed but excluded, or missing in quantized_layers: the engine would read codes as BF16 weights"
                yield error("E7", module, told, "list it as what it is", engine)
            elif packed and runs_as != folder.format_of(module):
                told = (
                    f"is {folder.format_of(module)}, but the engine takes {runs_as} from another name in "
                    "quantized_layers, which it finds first"
                )
                yield error("E7", module, told, _AGAIN, engine)
            elif not packed and runs_as is not None:
                told = "has a BF16 weight but is not excluded: the engine would wait for its scales"
                yield error("E7", module, told, f"add {module} to the exclude lists", engine)
    if folder.head != DEFAULT.head and folder.head in folder.linears and dict(readers)["vllm"](DEFAULT.head) is not None:
        told = f"is what vLLM calls {folder.head}, which is BF16, and is not excluded: vLLM would wait for its scales"
        yield error("E7", DEFAULT.head, told, f"add {DEFAULT.head} to the exclude lists", "vllm")
    for module, reason in folder.family.in_mamba1(everything).items():
        if module in folder.packed:
            told = f"is packed, but lies {reason}: the engine would read codes as BF16 weights"
            yield error("E7", module, told, "exclude it and export again", "vllm")
    yield from _unbuilt(folder, readers)


def _unbuilt(folder: Folder, readers: Readers) -> Iterator[Finding]:
    """What transformers does not load may be built by an engine. E13 has what a head that is announced holds."""
    announced = folder.drafts.number > 0
    for module in folder.unbuilt:
        if announced and folder.drafts.holds(module):
            continue
        try:
            engine = next((engine for engine, format_for in readers if format_for(module) is not None), None)
        except ValueError:
            engine = "vllm"
        if engine:
            told = "has a BF16 weight that the architecture's class does not load, and is not excluded: an engine that builds it "
            yield warning("E7", module, told + "would wait for its scales", f"exclude {module}", engine)


def _known_modules(folder: Folder) -> set[str]:
    """Every module with tensors, what the architecture builds beside them, and their ancestors."""
    built = folder.skeleton.linears if folder.skeleton else ()
    return with_ancestors((*folder.leaves, *built, folder.head, DEFAULT.head, *(name for _, name in folder.draft_modules)))


def readers_of(folder: Folder, everything: set[str]) -> Readers:
    """Who reads the layout, and the format each runs a module in; None where it stays unquantized."""
    patterns, targets, own, family = (folder.announced.excluded, folder.announced.targets, folder.format_of, folder.family)
    if folder.layout is COMPRESSED_TENSORS:
        return [
            ("vllm", lambda m: own(m) if vllm_compressed_tensors_quantizes(m, targets, patterns, everything, family) else None),
            ("all", lambda m: own(m) if compressed_tensors_quantizes(m, targets, patterns) else None),
        ]
    if folder.algorithm == MIXED:
        layers, trtllm = folder.announced.listed, TrtllmFormats(folder.announced.listed, everything, family)
        return [
            ("vllm", lambda m: vllm_format(m, layers, patterns, everything, family)),
            ("trtllm", lambda m: None if trtllm_excludes(m, patterns, family) else trtllm.of(m)),
        ]
    return [
        ("vllm", lambda m: None if vllm_excludes(m, patterns, everything, family) else own(m)),
        ("trtllm", lambda m: None if trtllm_excludes(m, patterns, family) else own(m)),
    ]


def e8_excluded_modules(folder: Folder) -> Iterator[Finding]:
    """No scale tensors on excluded modules; a tied head has none and no packed weight."""
    excluded, scales, codes = set(folder.announced.excluded), scale_leaves(), code_dtypes()
    for name in folder.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf in scales and module in excluded:
            yield error("E8", module, f"is excluded but has {leaf}: the engine has no place for it", "remove the tensor")
        if folder.tied and name == f"{folder.head}.weight" and _differs_from_the_embedding(folder):
            told = "tie_word_embeddings says that it is the embedding, but another weight is stored: engines use the embedding"
            yield error("E8", module, told, f"set tie_word_embeddings to false, or remove {name}")
        if folder.tied and module == folder.head and (leaf in scales or folder.tensors[name][1].dtype in codes):
            told = f"shares the embedding's weight (tie_word_embeddings) but has {leaf}"
            yield error("E8", module, told, "keep head and embedding BF16, or untie them")


def _differs_from_the_embedding(folder: Folder) -> bool:
    embedding = next((f"{module}.weight" for module in folder.embeddings), None)
    if embedding is None or embedding == f"{folder.head}.weight":
        return False
    head, table = folder.get(f"{folder.head}.weight"), folder.get(embedding)
    return head.shape != table.shape or head.dtype != table.dtype or not torch.equal(head, table)


_KV_SCALES = 1e-8, 1e4  # of E4M3, whose largest is 448: K and V of any model lie well within


def e10_kv_scales(folder: Folder) -> Iterator[Finding]:
    """k_scale and v_scale come in pairs, are positive scalars, and exist exactly where a KV algorithm is announced."""
    announced = folder.announced.kv_cache
    scales = [name for name in folder.tensors if name.endswith((".k_scale", ".v_scale"))]
    if scales and not announced:
        told = "has KV scales but no KV cache algorithm is announced"
        yield error("E10", scales[0].rpartition(".")[0], told, "announce its format or remove the scales")
    if announced and not scales and folder.casts_kv_cache:
        told = f"announces an {announced} KV cache without scales, as its recipe asks (cast): the engine uses 1.0"
        yield warning("E10", "config.json", told, "set quantize.kv_cache to calibrated")
    elif announced and not scales:
        told = "announces a quantized KV cache but there are no scales: the engine uses 1.0"
        yield error("E10", "config.json", told, "calibrate KV scales, or announce no quantized KV cache")
    if announced == "NVFP4":
        yield from _nvfp4_cache(folder)
    attentions = {_attention(name): name for name in scales}
    for attention, name in attentions.items():
        for lost in (folder.layout.kv_scale(attention, cache) for cache in ("k", "v")):
            if lost not in folder.tensors:
                told = f"has {name.rpartition('.')[2]} but {lost} is missing"
                yield error("E10", name.rpartition(".")[0], told, "write both, under the names of the layout")
    if scales:
        yield from _layers_without_kv_scales(folder, attentions)
    for name in scales:
        module, leaf, entry = name.rpartition(".")[0], name.rpartition(".")[2], folder.tensors[name][1]
        if entry.shape not in ((), (1,)) or entry.dtype not in ("F32", "BF16", "F16"):
            yield error("E10", module, f"{leaf} is {entry.dtype} {list(entry.shape)}, expected an F32 scalar", _AGAIN)
        else:
            value = float(folder.get(name).float().reshape(()))
            if not (math.isfinite(value) and _KV_SCALES[0] < value < _KV_SCALES[1]):
                yield error("E10", module, f"{leaf} is {value}, which no K or V has", "calibrate again")


def _nvfp4_cache(folder: Folder) -> Iterator[Finding]:
    """What vLLM 0.32 does with an NVFP4 cache, read in its source: FlashInfer alone has kernels, and a mixed checkpoint gets no
    scales, as ModelOptQuantConfigBase.from_config knows 8-bit caches only."""
    if folder.algorithm == MIXED:
        told = "announces an NVFP4 KV cache in a mixed checkpoint: vLLM 0.32 quantizes the cache and reads no scales, it uses 1.0"
        remedy = "set quantize.kv_cache to at_least_one or cast, quantize.kv_format to FP8, or one format for all modules"
        yield warning("E10", "config.json", told, remedy, "vllm")
    config = mapping(folder.config.get("text_config")) or folder.config
    heads = config.get("num_attention_heads")
    width = config.get("head_dim") or (config["hidden_size"] // heads if heads and config.get("hidden_size") else None)
    if isinstance(width, int) and width % 16:
        yield error("E10", "config.json", f"an NVFP4 KV cache needs heads of a multiple of 16, not {width}", "announce FP8")
    elif width == 64:
        told = "heads of 64 in an NVFP4 KV cache: vLLM 0.32 reads them on B200 and GB200 alone and refuses elsewhere"
        yield warning("E10", "config.json", told, "announce FP8 where it is served elsewhere", "vllm")


def _layers_without_kv_scales(folder: Folder, attentions: Collection[str]) -> Iterator[Finding]:
    """Engines use 1.0 for an attention that has no scales while the others do."""
    for module in (*folder.packed, *folder.linears):
        parent, _, leaf = module.rpartition(".")
        if leaf == "k_proj" and parent not in attentions:
            yield error("E10", parent, "has no KV scales, which other layers have: the engine uses 1.0", "calibrate again")


def _attention(name: str) -> str:
    """The attention module of a KV scale, under the name of either layout."""
    module = name.rpartition(".")[0]
    return module.rpartition(".")[0] if module.endswith(("k_proj", "v_proj", "qkv_proj")) else module
