"""What a safetensors file holds, by its header alone: no tensor is read, no torch is needed.

The format: 8 bytes little-endian header length, that many bytes of JSON ({name: {dtype, shape, data_offsets}} and
`__metadata__`), then the tensors' bytes without gaps. A file is refused that the safetensors library would not open, and
one that its readers would take for different things.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from qad.untrusted import LARGEST, count, json_with_faults, open_regular

# Bits of an element. https://github.com/huggingface/safetensors, safetensors/src/tensor.rs
_DTYPES = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("C64", "F64", "I64", "U64"),
}
_BITS = {dtype: bits for bits, dtypes in _DTYPES.items() for dtype in dtypes}
_LARGEST_SIZE = 1 << 63


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file. dtype: in safetensors' words."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * _BITS[self.dtype] // 8


@dataclasses.dataclass(frozen=True)
class Header:
    """A file's header.

    tensors: by name, in the order of their names.
    metadata: its `__metadata__`, empty where it has none.
    file_bytes: size of the whole file.
    """

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    file_bytes: int


def read_header(path: Path) -> Header:
    """Raises OSError where the file cannot be read, ValueError in one line for anything that is no whole safetensors file: a pipe
    or a folder, a header larger than 100 MB or than the file, a name twice, tensors that do not fill the file exactly."""
    with open_regular(path) as (file, size):
        length = int.from_bytes(file.read(8), "little") if size >= 8 else size
        if length > LARGEST:
            raise ValueError(f"its header has {length:,} bytes, {LARGEST:,} at the most are read")
        if length > size - 8:
            raise ValueError(f"its {size:,} bytes end before its header does")
        header, faults = json_with_faults(file.read(length))
    if faults:
        raise ValueError(faults[0])
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is no object of strings")
    places = {name: _entry(name, facts) for name, facts in sorted(header.items())}
    _require_filled(places, size - 8 - length)
    return Header({name: entry for name, (entry, _, _) in places.items()}, metadata, size)


def _entry(name: str, facts: Any) -> tuple[Entry, int, int]:
    """The tensor, and where its bytes begin and end."""
    try:
        dtype, shape, (begin, end) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name[:100]} lacks dtype, shape or data_offsets") from None
    numbers = [*shape, begin, end]
    if any(count(number) is None or number >= _LARGEST_SIZE for number in numbers):
        raise ValueError(f"{name[:100]} has a shape or an offset that is no size")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{name[:100]} has the unknown dtype {str(dtype)[:20]!r}")
    entry = Entry(name, dtype, shape)
    if entry.elements * _BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"{name[:100]} has {end - begin:,} bytes, which {dtype} {list(shape)} does not fill")
    return entry, begin, end


def _require_filled(places: dict[str, tuple[Entry, int, int]], size: int) -> None:
    at = 0
    for name, (_, begin, end) in sorted(places.items(), key=lambda place: place[1][1:]):
        if begin != at:
            raise ValueError(f"{name[:100]} begins at byte {begin:,}, the tensor before it ends at {at:,}")
        at = end
    if at != size:
        raise ValueError(f"its tensors have {at:,} bytes, behind the header there are {size:,}")
