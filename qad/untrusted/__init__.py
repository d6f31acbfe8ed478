"""What others wrote: one strict reader of JSON and of its lines, what each value is before it is used, and how any of it is
shown. YAML is read by qad.untrusted.yaml_text."""

from __future__ import annotations

import collections
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

NAME_LIMIT = 120
LARGEST = 100_000_000  # bytes of a JSON file, as of a safetensors header
_SHOWN = 80  # characters of a foreign key or number in a message
# Marks that reorder or hide the text around them, and what ends a line in some readers.
_INVISIBLE = {0x061C, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF}
_DIGITS = 300  # of a whole number; floats end at 308


def strict_json(text: str | bytes, *, nan_is_null: bool = False) -> Any:
    """The value of one JSON text, UTF-8 where it is bytes.

    nan_is_null: NaN and Infinity, which are no JSON but which Python's writer lets through, are null. Raises ValueError, in one
    line, for what is no JSON, an object that names a key twice, nesting that is too deep, and a number that no float holds.
    """
    try:
        content = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(
            content, object_pairs_hook=_object, parse_float=_float, parse_int=_int,
            parse_constant=_null if nan_is_null else _no_constant,
        )  # fmt: skip
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def regular_bytes(path: Path, limit: int = LARGEST) -> bytes:
    """The bytes of a regular file. Raises OSError where it cannot be read, ValueError for anything that has no end of its own
    (a pipe, a device, a socket, a folder) and for more than `limit` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would be waited for
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is no regular file")
        if facts.st_size > limit:
            raise ValueError(f"it has {facts.st_size:,} bytes, {limit:,} at the most are read")
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


def clean(text: object, limit: int = NAME_LIMIT, *, lines: bool = False) -> str:
    """Any string as one visible line: control and direction marks become U+FFFD, the rest is cut at `limit`.

    lines: keep line ends and tabs.
    """
    kept = "\n\t" if lines else ""
    shown = "".join(c if c in kept or _visible(c) else "\ufffd" for c in str(text).replace("\r\n", "\n")[: 4 * limit])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _visible(char: str) -> bool:
    code = ord(char)
    return not (code < 32 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in _INVISIBLE)
