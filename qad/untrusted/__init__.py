"""What others wrote: one strict reader of JSON and of its lines, what each value is before it is used, and how any of it is
shown. YAML is read by qad.untrusted.yaml_text, a safetensors header by qad.untrusted.safetensors_header."""

from __future__ import annotations

import collections
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

NAME_LIMIT = 120
LARGEST = 100_000_000  # bytes of a JSON file, as of a safetensors header
_SHOWN = 80  # characters of a foreign key or number in a message
# Control characters, half characters, marks that reorder or hide the text around them, and what ends a line in some readers.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# Everything Markdown or HTML could take for markup.
_MARKUP = re.compile(r"([\\`*_\[\]<>#|&~$])")
_BLOCK_START = re.compile(r"^(\d*)([-+=.)])(?=\s|[-=]|$)")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # may be one: a pair of them is one character
_DIGITS = 300  # of a whole number; floats end at 308


def strict_json(text: str | bytes, *, nan_is_null: bool = False) -> Any:
    """The value of one JSON text, UTF-8 where it is bytes.

    nan_is_null: NaN and Infinity, which are no JSON but which Python's writer lets through, are null. Raises ValueError, in one
    line, for what is no JSON, an object that names a key twice, nesting that is too deep, and a number that no float holds.
    """
    try:
        content = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(
            content,
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=_int,
            parse_constant=_null if nan_is_null else _no_constant,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_with_faults(text: bytes) -> tuple[Any, list[str]]:
    """The value of one JSON text as Python and transformers read it, NaN and Infinity included, and in what other readers would
    differ: a key twice in one object, half a character. Raises ValueError as `strict_json` for the rest."""
    faults: list[str] = []

    def last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return _object(pairs)
        except ValueError as fault:
            faults.append(str(fault))
            return dict(pairs)

    try:
        content = text.decode("utf-8-sig")
        value = json.loads(content, object_pairs_hook=last, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _HALF.search(content) and not _is_text(json.dumps(value, ensure_ascii=False)):
        faults.append("it holds half a character (a lone surrogate)")
    return value, faults


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size in bytes. Raises OSError where it cannot be read, ValueError for anything that has no end of
    its own (a pipe, a device, a socket, a folder)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would be waited for
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            yield file, facts.st_size
    finally:
        os.close(descriptor)


def regular_bytes(path: Path, limit: int = LARGEST) -> bytes:
    """The bytes of a regular file. Raises as `open_regular`, and ValueError for more than `limit` bytes."""
    with open_regular(path) as (file, size):
        if size > limit:
            raise ValueError(f"it has {size:,} bytes, {limit:,} at the most are read")
        return file.read(limit)


def text_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that hold anything. A newline alone ends one: separators inside a JSON string do not."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def json_lines(path: Path, *, nan_is_null: bool = False) -> Iterator[tuple[int, Any]]:
    """(number, value) of each line. Raises ValueError as `strict_json`, naming the line, and OSError."""
    for number, line in text_lines(path):
        try:
            value = strict_json(line, nan_is_null=nan_is_null)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON ({error})") from error
        yield number, value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is too large a number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:_SHOWN]!r} occurs twice in one object")
    return found


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text):,} digits is too large")
    return int(text)


def _null(constant: str) -> None:
    return None


def _no_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def mapping(value: object) -> dict[str, Any]:
    """The value itself where it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def names(value: object) -> list[str]:
    """The strings of a list; empty for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number that a float holds; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def count(value: object) -> int | None:
    """A whole number of things, 0 or more; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def clean(text: object, limit: int | None = NAME_LIMIT, *, lines: bool = False) -> str:
    """Any string as one visible line: control and direction marks become U+FFFD, the rest is cut at `limit` characters.

    lines: keep line ends and tabs. This is what everything foreign is shown through, on a terminal, in a report and in a card.
    """
    whole = str(text)
    cut = whole if limit is None else whole[: 4 * limit]
    shown = _HIDDEN.sub(lambda found: found[0] if lines and found[0] in "\n\t" else "\ufffd", cut.replace("\r\n", "\n"))
    return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"


def utf8(text: str) -> str:
    """Without half characters, which JSON and tokenizers may leave and no file or tokenizer takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def markdown_text(text: str) -> str:
    """Plain text on one line, with nothing left that Markdown or HTML would interpret."""
    escaped = _MARKUP.sub(r"\\\1", " ".join(text.split()))
    return _BLOCK_START.sub(r"\1\\\2", escaped.replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;"))
