"""Sources: from `data:` of a recipe to the documents of a role.

Texts and conversations are read whole and split by content. Random tokens and a teacher's generations have no end, so as many
documents are made as the role needs, other ones for every role.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from qad.errors import DataError, UsageError
from qad.text.conversations import given_of, messages_of, without_nulls
from qad.text.data import Data, Generations, Hub, JsonLines, Prompts, PythonDocs, RandomTokens, Source, TextFile
from qad.text.documents import Document, Part, generator_of, split_of
from qad.text.pictures import take_pictures
from qad.text.python_docs import python_docs
from qad.untrusted import json_lines

_MINIMUM_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class Need:
    """What a role asks of its text. A document gives at most `longest` tokens, and none below `shortest`."""

    role: str
    tokens: int
    longest: int = sys.maxsize
    shortest: int = 1

    def useful(self, length: int) -> int:
        """Tokens that a document of `length` tokens gives."""
        return min(length, self.longest) if length >= self.shortest else 0


# (settings, prompts or None, what is needed, number of the source, keys not to be made again) -> documents
Generate = Callable[[Generations, list[Document] | None, Need, int, set[str]], list[Document]]


class Reader:
    """Reads the sources of all roles. `tokenizer` and `seed` serve random tokens, `generate` a teacher's generations."""

    def __init__(self, tokenizer: Any = None, seed: int = 0, generate: Generate | None = None) -> None:
        self._tokenizer, self._seed, self._generate = tokenizer, seed, generate
        self._taken: set[str] = set()

    def parts(self, data: Data, need: Need) -> list[Part]:
        """The documents of each source of a blend for a role, in a stable order; no document twice.

        Raises DataError for text that is missing, empty or undecodable, and where the role's share of a source is empty.
        """
        total = sum(source.weight for source in data.root)
        seen: set[str] = set()
        parts = []
        for number, (name, source) in enumerate(zip(data.names, data.root, strict=True)):
            share = dataclasses.replace(need, tokens=math.ceil(need.tokens * source.weight / total))
            found = [doc for doc in self._documents(source, share, number) if doc.key not in seen]
            seen.update(doc.key for doc in found)
            parts.append(Part(name, source.weight, found))
        self._taken |= seen
        return parts

    def _documents(self, source: Source, need: Need, number: int) -> list[Document]:
        if isinstance(source, RandomTokens):
            return list(_random(source, need, self._tokenizer, f"{self._seed} {number} {need.role}"))
        if not isinstance(source, Generations):
            return documents(source, need.role)
        if self._generate is None:
            raise UsageError("source teacher is for recipes only: give a file here")
        prompts = documents(source.prompts, need.role) if source.prompts else None
        return self._generate(source, prompts, need, number, self._taken)


def documents(source: Prompts, role: str) -> list[Document]:
    """The documents of a source of text that belong to a role, without repeats, in a stable order.

    Raises DataError for a missing, empty or undecodable source, and where the role's share is empty.
    """
    found = {d.key: d for d in _read(source) if d.text.strip()}
    if not found:
        raise DataError(f"{_where(source)} holds no text: give a file with documents")
    kept = [d for d in found.values() if source.split == "all" or split_of(d) == role]
    if not kept:
        raise DataError(
            f"{_where(source)}: none of its {len(found)} documents falls into the {role} split; give more text, "
            "or a file of its own with split: all"
        )
    return kept


def require_readable(data: Data, role: str) -> None:
    """Read what a teacher's generations, or their neighbours in a blend, are made from: before the teacher writes for hours,
    not after. Raises as `documents` does."""
    for source in data.root:
        given = source.prompts if isinstance(source, Generations) else source
        if given is not None and not isinstance(given, RandomTokens):
            shown = next((doc for doc in documents(given, role) if doc.pictures), None)
            if shown and isinstance(source, Generations):
                raise DataError(f"{shown.where}: the prompt shows images, and the teacher answers text alone: leave it out")


def _where(source: Prompts) -> str:
    return source.source if isinstance(source, PythonDocs) else source.path


def _read(source: Prompts) -> Iterator[Document]:
    if isinstance(source, PythonDocs):
        yield from map(Document.of, python_docs())
    elif isinstance(source, Hub):
        folder = Path(source.path).expanduser()
        yield from _rows(_hub_rows(source), source.field, source.name, "row", folder if folder.is_dir() else None)
    elif isinstance(source, JsonLines):
        folder = Path(source.path).expanduser().parent
        yield from _rows(_json_objects(source.path), source.field, source.path, "line", folder)
    else:
        assert isinstance(source, TextFile)
        yield from map(Document.of, _paragraphs(_content(source.path)))


def _content(path: str) -> str:
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        raise DataError(f"text file {file} cannot be read ({why}): check the path") from error


def _paragraphs(content: str) -> Iterator[str]:
    """Blank lines separate documents; short ones (headings) stay with what follows."""
    held = ""
    for part in re.split(r"\n\s*\n", content):
        held = f"{held}\n\n{part}" if held else part
        if len(held) >= _MINIMUM_CHARACTERS:
            yield held
            held = ""
    if held.strip():
        yield held


def _json_objects(path: str) -> Iterator[tuple[int, Any]]:
    try:
        yield from json_lines(Path(path).expanduser(), nan_is_null=True)
    except OSError as error:
        raise DataError(f"text file {path} cannot be read ({error.strerror}): check the path") from error
    except ValueError as error:
        raise DataError(f"{path} {error}: write one object a line") from error


def _hub_rows(source: Hub) -> Iterator[tuple[int, Any]]:
    """Rows of a data set, one at a time from its Arrow files. Only data files are read, never a loading script."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError("source hub needs the package datasets: pip install 'nvfp4-qad[data]', or give a jsonl file") from error
    datasets.disable_progress_bars()
    folder = Path(source.path).expanduser()
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():  # written by save_to_disk
            held = datasets.load_from_disk(str(folder))
            rows = held[source.hub_split] if isinstance(held, dict) else held
        else:
            rows = datasets.load_dataset(
                str(folder) if folder.is_dir() else source.path, source.config, split=source.hub_split, revision=source.revision
            )
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"data set {source.path} cannot be opened ({reason}): check path, config and hub_split, or give a local folder"
        ) from error
    for number, row in enumerate(rows, 1):
        yield number, without_nulls(row)


def _rows(rows: Iterable[tuple[int, Any]], field: str, path: str, what: str, folder: Path | None) -> Iterator[Document]:
    """folder: what paths of images are relative to; None: there is none."""
    for number, row in rows:
        where = f"{path} {what} {number}"
        if not isinstance(row, dict) or field not in row:
            hint = f": it has {', '.join(map(str, row))}; set field" if isinstance(row, dict) and row else ""
            hint = f", it is a list: write one object a line, as `jq -c .[] {path}` does" if isinstance(row, list) else hint
            raise DataError(f"{where}: expected an object with the field {field!r}{hint}")
        try:
            document = _document(row, field, where, folder)
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: its text holds half a character (a lone surrogate), which no tokenizer takes: mend it or leave it out"
            ) from error
        yield document


def _document(row: dict[str, object], field: str, where: str, folder: Path | None) -> Document:
    value = row[field]
    if isinstance(value, str):
        return Document.of(value, where)
    if isinstance(value, list):
        messages, pictures = take_pictures(messages_of(value, where, field), folder or Path(), where)
        return Document.of_messages(messages, where, given_of(row, where), pictures)
    raise DataError(f"{where}: field {field!r} is {type(value).__name__}, expected text or a list of messages")


def _random(source: RandomTokens, need: Need, tokenizer: Any, seed: str) -> Iterator[Document]:
    """Documents of uniformly drawn ids; a function of (seed, number of the document)."""
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    allowed = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    useful = need.useful(source.length)
    if useful == 0:
        raise DataError(f"random documents of {source.length} tokens are too short here: set length to {need.shortest}")
    for i in range(-(-need.tokens // useful)):
        drawn = torch.randint(len(allowed), (source.length,), generator=generator_of(f"{seed} {i}"))
        yield Document.of_ids(allowed[drawn].tolist())
