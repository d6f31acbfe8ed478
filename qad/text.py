"""Documents and their disjoint splits.

Splits are decided per document from the hash of its text, so the same document lands in the same split whatever
file or order it comes in, and a document can never be in two.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qad.artifact import digest_of
from qad.errors import DataError

if TYPE_CHECKING:
    from qad.config import DataSource

ROLES = ("calibration", "train", "validation", "test")
_SHARES = {"calibration": 10, "train": 70, "validation": 10, "test": 10}
_MINIMUM_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class Document:
    """One text. `key` is the sha256 of its words, so that a difference in white space is no difference."""

    text: str
    key: str

    @classmethod
    def of(cls, text: str) -> Document:
        return cls(text, hashlib.sha256(" ".join(text.split()).encode()).hexdigest())


def documents(source: DataSource, role: str) -> list[Document]:
    """The documents of a source that belong to a role, without repeats, in a stable order.

    Raises DataError for a missing, empty or undecodable file, and where the role's share is empty.
    """
    found = {d.key: d for d in map(Document.of, _texts(source)) if d.text.strip()}
    if not found:
        raise DataError(f"{_where(source)} holds no text: give a file with documents")
    kept = [d for d in found.values() if source.split == "all" or split_of(d) == role]
    if not kept:
        raise DataError(
            f"{_where(source)}: none of its {len(found)} documents falls into the {role} split; give more text, "
            "or a file of its own with split: all"
        )
    return kept


def split_of(document: Document) -> str:
    """calibration 10 %, train 70 %, validation 10 %, test 10 %, by the document's hash."""
    place = int(document.key[:8], 16) % 100
    for role in ROLES:
        place -= _SHARES[role]
        if place < 0:
            return role
    raise AssertionError("shares sum to 100")


def require_disjoint(splits: Mapping[str, Sequence[Document]]) -> None:
    """Raises DataError where two roles share a document: what is reported must not have been trained on."""
    seen: dict[str, str] = {}
    for role, docs in splits.items():
        for doc in docs:
            other = seen.setdefault(doc.key, role)
            if other != role:
                raise DataError(
                    f"the {other} and {role} text share a document ({doc.text[:40]!r}...): give each its own file, "
                    "or use split: auto"
                )


def digest_documents(docs: Sequence[Document]) -> str:
    """Identity of a list of documents."""
    return digest_of([doc.key for doc in docs])


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids as the tokenizer adds special tokens by default; long texts do not warn."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids


def shuffled(docs: Sequence[Document], seed: int) -> list[Document]:
    """The documents in an order that depends on `seed` alone."""
    order = torch.randperm(len(docs), generator=torch.Generator().manual_seed(seed))
    return [docs[i] for i in order.tolist()]


# --- sources -------------------------------------------------------------------------------------


def _where(source: DataSource) -> str:
    return source.path or source.source


def _texts(source: DataSource) -> Iterator[str]:
    if source.source == "python-docs":
        yield from _python_docs()
        return
    assert source.path is not None
    path = Path(source.path).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"text file {path} cannot be read as UTF-8 ({error}): check the path") from error
    yield from _json_lines(content, path, source.field) if source.source == "jsonl" else _paragraphs(content)


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


def _json_lines(content: str, path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)[field]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} line {number}: expected a JSON object with the text field {field!r}") from error
        if not isinstance(value, str):
            raise DataError(f"{path} line {number}: field {field!r} is {type(value).__name__}, expected text")
        yield value


@functools.cache
def _python_docs() -> tuple[str, ...]:
    """The language reference's topics and every docstring of the standard library, read without importing it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = library / "pydoc_data" / "topics.py"
    texts: list[str] = []
    if topics.is_file():
        tree = ast.parse(topics.read_text(encoding="utf-8"))
        texts += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "pydoc_data", "lib2to3", "__pycache__"}
    for file in sorted(library.rglob("*.py")):
        if not skipped & set(file.relative_to(library).parts[:-1]):
            texts += _docstrings(file)
    return tuple(text for text in texts if len(text) >= _MINIMUM_CHARACTERS)


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
