"""E11: the index lists every tensor once, the shards agree, nothing is missing and nothing stale lies beside."""

from __future__ import annotations

from collections.abc import Iterator

from export.findings import Finding, error
from export.folder import Folder
from export.rules.tensors import missing_siblings

INDEX = "model.safetensors.index.json"
_AGAIN = "export again into an empty folder"


def e11_files(folder: Folder) -> Iterator[Finding]:
    for name, why in folder.unreadable.items():
        yield error("E11", name, f"cannot be read ({why})", "copy or export the file again")
    for name in folder.duplicates:
        yield error("E11", name, "is in two files: which one is loaded depends on the engine", _AGAIN)
    if not folder.files:
        yield error("E11", "*.safetensors", "there are no weights", _AGAIN)
    if folder.index is not None or len(folder.files) > 1 or (folder.path / INDEX).exists():
        yield from _index(folder)
    yield from _against_architecture(folder)


def _index(folder: Folder) -> Iterator[Finding]:
    weight_map = (folder.index or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        yield error("E11", INDEX, "is missing or unreadable although there are several files", _AGAIN)
        return
    for name, file in weight_map.items():
        if name not in folder.tensors:
            yield error("E11", name, f"is listed in {file} but is not there", _AGAIN)
        elif folder.tensors[name][0] != file:
            yield error("E11", name, f"is listed in {file} but lies in {folder.tensors[name][0]}", _AGAIN)
    for name, (file, _) in folder.tensors.items():
        if name not in weight_map:
            yield error("E11", name, f"lies in {file} but the index does not list it: a stale shard?", _AGAIN)
    modules: dict[str, set[str]] = {}
    for name, (file, _) in folder.tensors.items():
        modules.setdefault(name.rpartition(".")[0], set()).add(file)
    total = (folder.index or {}).get("metadata", {}).get("total_size")
    stored = sum(entry.bytes for _, entry in folder.tensors.values())
    if total is not None and total != stored and not folder.unreadable:
        yield error("E11", INDEX, f"total_size is {total}, the tensors have {stored} bytes", "correct total_size")


def _against_architecture(folder: Folder) -> Iterator[Finding]:
    skeleton = folder.skeleton
    if skeleton is None:
        yield from missing_siblings(folder)
        return
    tied = bool(folder.config.get("tie_word_embeddings"))
    packed = set(folder.packed)
    known_modules = {name.rpartition(".")[0] for name in folder.tensors}
    for name, shape in skeleton["parameters"].items():
        module = name.rpartition(".")[0]
        entry = folder.entry(name)
        if entry is None:
            fused_experts = module.endswith(".experts") and any(m.startswith(module + ".") for m in known_modules)
            if not fused_experts and not (tied and module == "lm_head") and module not in packed:
                yield error("E11", module, f"{name} is missing: the architecture in config.json asks for it", _AGAIN)
        elif module not in packed and tuple(entry.shape) != tuple(shape):
            yield error(
                "E11", module, f"{name} has shape {list(entry.shape)}, config.json asks for {list(shape)}", _AGAIN
            )
