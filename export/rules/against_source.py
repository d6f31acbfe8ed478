"""W3, continued: what the model is beside its weights, against the source's own: config.json, tokenizer, prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from export.folder import Folder
from export.layouts.config_files import CONFIG
from export.rules.findings import Finding, error, warning
from qad.errors import SourceError
from qad.model.bounds import OversizedError
from qad.model.built_config import built_config
from qad.model.loader import load_tokenizer
from qad.model.source import Checkpoint
from qad.text.processor import PROCESSOR_FILES, processor_digest
from qad.untrusted import mapping, strict_json

# Written by the library that saves, or about how rather than what is computed.
GENERATION = "generation_config.json"
_OWN_KEYS = {"quantization_config", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
_TEXT = "How deep is the river? 12,345 m\u00b2 \u2014 na\u00efve caf\u00e9\n\tdef f(x):\n        return x  # \u6cb3\u6d41"
_CHAT = [{"role": "user", "content": _TEXT}]


def against_source(folder: Folder, source: Checkpoint, expected: dict[str, object]) -> Iterator[Finding]:
    """The architecture is the source's (expected: its config.json, as the arm changed it), text becomes the same ids by the
    same vocabulary and merges, and a chat is rendered to the same prompt. A tokenizer that needs code of its own is not
    compared."""
    config, original = _with_defaults(folder.config), _with_defaults(expected)
    for key in sorted({*config, *original} - _OWN_KEYS):
        if config.get(key) != original.get(key):
            told = f"{key} is {config.get(key)!r}, the source model has {original.get(key)!r}"
            yield error("W3", CONFIG, told, f"copy it from {source.folder}")
    if processor_digest(folder.path) != processor_digest(source.folder):
        told = f"{' and '.join(PROCESSOR_FILES)} are not the source model's: an engine sees images otherwise, or stops at one"
        yield error("W3", "processor", told, f"copy them from {source.folder}")
    yield from _generation(folder.path / GENERATION, source.folder / GENERATION)
    if (folder.path / "adapter_config.json").is_file():
        told = "announces an adapter, whose weights transformers and engines would look for"
        yield warning("W3", "adapter_config.json", told, "remove it")
    try:
        theirs = load_tokenizer(source.folder)
    except SourceError as failure:
        yield warning("W3", "tokenizer", f"prompts were not compared: {failure}", "compare them where its code may run")
        return
    try:
        ours = load_tokenizer(folder.path)
    except SourceError as failure:
        yield error("W3", "tokenizer", str(failure), f"copy the tokenizer from {source.folder}")
        return
    checked = (("vocabulary or merges", _model), ("text", _ids), ("a chat", _prompt), ("chats by their template", _templates))
    for what, of in (*checked, ("special tokens", _special)):
        if of(ours) != of(theirs):
            told = f"{what} of the source model's tokenizer come out differently"
            yield error("W3", "tokenizer", told, f"copy tokenizer and chat template from {source.folder}")
            return


def _model(tokenizer: Any) -> dict[str, object]:
    """Everything tokenizer.json holds, as the library reads it, without settings that calls change; of a slow tokenizer, the
    vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return dict(tokenizer.get_vocab())
    return {key: value for key, value in json.loads(backend.to_str()).items() if key not in ("padding", "truncation")}


def _generation(ours: Path, theirs: Path) -> Iterator[Finding]:
    """Where answers end, and how they are drawn."""
    if not theirs.exists():
        return
    remedy = f"copy it from {theirs.parent}"
    if not ours.exists():
        yield error("W3", ours.name, "of the source model is missing: answers may not end, or are drawn otherwise", remedy)
        return
    mine, original = ({k: v for k, v in _json(path).items() if k not in _OWN_KEYS} for path in (ours, theirs))
    for key in sorted(key for key in {*mine, *original} if mine.get(key) != original.get(key)):
        told = f"{key} is {mine.get(key)!r}, the source model has {original.get(key)!r}"
        yield (error if key == "eos_token_id" else warning)("W3", ours.name, told, remedy)


def _json(path: Path) -> dict[str, object]:
    try:
        return dict(mapping(strict_json(path.read_bytes())))
    except (OSError, ValueError):
        return {}


def _templates(tokenizer: Any) -> object:
    return tokenizer.chat_template


def _special(tokenizer: Any) -> dict[str, str]:
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items()}


def _ids(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(_TEXT)["input_ids"]
    return ids


def _with_defaults(config: dict[str, object]) -> dict[str, object]:
    """As transformers reads it: defaults filled in, old spellings renamed; as it is where transformers cannot."""
    try:
        built = built_config(config)
    except OversizedError:
        built = None
    return config if built is None else dict(built.to_dict())


def _prompt(tokenizer: Any) -> str | None:
    """The rendered prompt; None where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        return None
    rendered: str = tokenizer.apply_chat_template(_CHAT, tokenize=False, add_generation_prompt=True)
    return rendered
