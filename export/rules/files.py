"""E11: the index lists every tensor once, the shards agree, nothing is missing and nothing stale lies beside."""

from __future__ import annotations

import re
from collections.abc import Iterator

from export.files.json_files import json_faults, read_json
from export.folder import FLOATING, Folder
from export.layouts.config_files import INDEX
from export.layouts.layout import ROTARY
from export.rules.findings import Finding, error, warning
from export.rules.tensors import missing_siblings
from qad.untrusted import mapping

_AGAIN = "export again into an empty folder"
_OWN_JSON = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def e11_files(folder: Folder) -> Iterator[Finding]:
    for name, why in folder.unreadable.items():
        yield error("E11", name, f"cannot be read ({why})", "copy or export the file again")
    for name, fault in folder.faults:
        yield error("E11", name, f"{fault}: which value counts depends on the reader", "write the file again")
    for name in folder.duplicates:
        yield error("E11", name, "is in two files: which one is loaded depends on the engine", _AGAIN)
    if not folder.files:
        yield error("E11", "*.safetensors", "there are no weights", _AGAIN)
    if folder.index is not None or len(folder.files) > 1 or (folder.path / INDEX).exists():
        yield from _index(folder)
    if folder.files and not folder.unreadable:
        yield from _against_architecture(folder)
    yield from _own_files(folder)


def _index(folder: Folder) -> Iterator[Finding]:
    weight_map = (folder.index or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        yield error("E11", INDEX, "is missing or unreadable although there are several files", _AGAIN)
        return
    for file in sorted({str(f) for f in weight_map.values()} - {*folder.files}):
        yield error("E11", file, "is listed in the index but is not there: half a download?", "copy or export it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in folder.unreadable or file not in folder.files:
            continue
        if name not in folder.tensors:
            yield error("E11", name, f"is listed in {file} but is not there", _AGAIN)
        elif folder.tensors[name][0] != file:
            yield error("E11", name, f"is listed in {file} but lies in {folder.tensors[name][0]}", _AGAIN)
    for name, (file, _) in folder.tensors.items():
        if name not in weight_map:
            yield error("E11", name, f"lies in {file} but the index does not list it: a stale shard?", _AGAIN)
    total = mapping((folder.index or {}).get("metadata")).get("total_size")
    stored = sum(entry.bytes for _, entry in folder.tensors.values())
    if total is not None and total != stored and not folder.unreadable:
        yield error("E11", INDEX, f"total_size is {total}, the tensors have {stored} bytes", "correct total_size")
    yield from _split_modules(folder)


def _split_modules(folder: Folder) -> Iterator[Finding]:
    files: dict[str, set[str]] = {}
    for module in folder.packed:
        for leaf in folder.leaves_of(module):
            if f"{module}.{leaf}" in folder.tensors:
                files.setdefault(module, set()).add(folder.tensors[f"{module}.{leaf}"][0])
    split = [module for module, found in files.items() if len(found) > 1]
    if split:
        told = f"weight and scales lie in different files ({len(split)} modules): a loader that goes by file sees half a module"
        yield warning("E11", split[0], told, _AGAIN)


def _against_architecture(folder: Folder) -> Iterator[Finding]:
    skeleton = folder.skeleton
    if folder.oversized:
        told = f"asks for more than the {len(folder.tensors):,} tensors here fill: {folder.oversized}"
        yield error("E11", "config.json", told, "correct config.json")
        yield from missing_siblings(folder)
        return
    if skeleton is None:
        told = (
            "its architecture is not one transformers can build here, or has other names: "
            "completeness is judged from the files alone"
        )
        yield warning("E11", "config.json", told, "check with the engine that will serve it")
        yield from missing_siblings(folder)
        return
    packed = set(folder.packed)
    known_modules = {name.rpartition(".")[0] for name in folder.tensors}
    for name, shape in skeleton.parameters.items():
        module, _, leaf = name.rpartition(".")
        entry = folder.entry(name)
        if entry is None:
            fused_experts = module.endswith(".experts") and any(m.startswith(module + ".") for m in known_modules)
            tied_head = folder.tied and module == folder.head
            if not fused_experts and not tied_head and not (module in packed and leaf == "weight"):
                yield error("E11", module, f"{name} is missing: the architecture in config.json asks for it", _AGAIN)
        elif module in packed and leaf == "weight":
            continue
        elif entry.shape != shape:
            yield error("E11", module, f"{name} has shape {list(entry.shape)}, config.json asks for {list(shape)}", _AGAIN)
        elif entry.dtype not in FLOATING:
            yield error("E11", module, f"{name} is {entry.dtype} and has no scale, expected BF16", _AGAIN)
    places = {*skeleton.parameters, *skeleton.buffers, *(f"{m}.{leaf}" for m in packed for leaf in folder.leaves_of(m))}
    extra = [
        name
        for name in folder.tensors
        if name not in places and ".experts." not in name and not name.endswith((ROTARY, ".k_scale", ".v_scale"))
    ]
    extra = [name for name in extra if name.rpartition(".")[0] not in packed and not (folder.tied and folder.head in name)]
    extra = [name for name in extra if not (folder.drafts.number and folder.drafts.holds(name))]
    beyond = _beyond_the_last_layer(folder, extra)
    if beyond:
        told = (
            f"belongs to a layer that config.json does not have ({len(beyond)} tensors): engines stop, "
            "or serve the model without it"
        )
        yield error("E11", beyond[0], told, "correct num_hidden_layers")
    elif extra:
        told = f"has no place in config.json's architecture ({len(extra)} tensors): engines ignore it or stop"
        yield warning("E11", extra[0], told, "remove it, unless the engine is known to read it")


def _beyond_the_last_layer(folder: Folder, extra: list[str]) -> list[str]:
    """Tensors of layers that the config does not count; the layers of heads that draft tokens have a count of their own."""
    count = folder.drafts.layers
    numbers = ((name, re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)) for name in extra)
    return [name for name, number in numbers if number and int(number[1]) >= count]


def _own_files(folder: Folder) -> Iterator[Finding]:
    """What lies beside the weights can be read at all."""
    for name in _OWN_JSON:
        if (folder.path / name).exists() and read_json(folder.path / name) is None:
            yield error("E11", name, "is not readable JSON: the engine stops", "copy it from the source model again")
        for fault in json_faults(folder.path / name):
            yield warning("E11", name, f"{fault}: which value counts depends on the reader", "write the file again")
    if not any((folder.path / name).is_file() for name in _TOKENIZERS):
        yield warning("E11", "tokenizer", f"there is none ({', '.join(_TOKENIZERS)})", "copy it from the source model")
    yield from _of_transformers_5(folder)
    yield from _ids_without_row(folder)
    yield from _ends_of_text(folder)


def _of_transformers_5(folder: Folder) -> Iterator[Finding]:
    name = mapping(read_json(folder.path / "tokenizer_config.json")).get("tokenizer_class")
    if name == "TokenizersBackend":
        yield warning(
            "E11",
            "tokenizer_config.json",
            "tokenizer_class is TokenizersBackend, which transformers 4 does not know: an engine that uses it stops",
            f"where one is to use it: sed -i s/TokenizersBackend/PreTrainedTokenizerFast/ {folder.path}/tokenizer_config.json; "
            "both know that name, and exports take it over from the original",
        )


def _rows(folder: Folder) -> int:
    """Of the embedding, 0 where it has none of the usual names."""
    return max((entry.shape[0] for m in folder.embeddings if (entry := folder.entry(f"{m}.weight")) and entry.shape), default=0)


def _tokens(folder: Folder) -> list[tuple[int, str]]:
    """(id, token) of tokenizer.json."""
    tokenizer = mapping(read_json(folder.path / "tokenizer.json"))
    vocabulary = mapping(mapping(tokenizer.get("model")).get("vocab"))
    added = [mapping(token) for token in tokenizer.get("added_tokens") or [] if isinstance(token, dict)]
    ids = [(index, token) for token, index in vocabulary.items() if isinstance(index, int)]
    return ids + [(index, str(t.get("content"))) for t in added if isinstance(index := t.get("id"), int)]


def _ends_of_text(folder: Folder) -> Iterator[Finding]:
    """The end of text that generation_config.json stops at has a row, and is also the tokenizer's: engines go by the one, by the
    other, or by both."""
    said = mapping(read_json(folder.path / "generation_config.json")).get("eos_token_id")
    ends = [end for end in (said if isinstance(said, list) else [said]) if isinstance(end, int)]
    rows = _rows(folder)
    if rows and ends and not 0 <= min(ends) <= max(ends) < rows:
        told = f"eos_token_id is {said}, the embedding has {rows} rows: a text does not end there"
        yield warning("E11", "generation_config.json", told, "copy it from the source model")
    token = mapping(read_json(folder.path / "tokenizer_config.json")).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    own = next((index for index, text in _tokens(folder) if text == token), None)
    if ends and own is not None and own not in ends:
        told = (
            f"eos_token_id is {said}, the tokenizer's end of text {token!r} is {own}: "
            "engines that go by one of the two do not stop"
        )
        yield warning("E11", "generation_config.json", told, "give eos_token_id every end of text")


def _ids_without_row(folder: Folder) -> Iterator[Finding]:
    """Every id of tokenizer.json has a row in the embedding."""
    rows = _rows(folder)
    ids = [(index, token) for index, token in _tokens(folder) if index >= rows]
    if rows and ids:
        index, token = min(ids)
        told = f"id {index} ({token!r}) has no row in the embedding, which has {rows}: an engine stops or reads what lies behind"
        yield warning("E11", "tokenizer.json", told, "resize and train the embedding, or take the token out")
