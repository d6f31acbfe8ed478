"""Write one safetensors file whose tensors arrive one by one: header first, then bytes at their offsets.

The format: 8 bytes little-endian header length, JSON header, tensor bytes. Tensors lie by falling element size, so
that each is aligned; the file is, to the byte, the one the reference implementation writes of the same tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from qad.artifact import sha256_file
from qad.untrusted.safetensors_header import Entry

# In the order of the reference implementation, which writes tensors from the last to the first.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_RANK = {name: rank for rank, name in enumerate(_DTYPES)}
_METADATA = {"format": "pt"}


def write_file(
    path: Path,
    entries: Iterable[Entry],
    tensors: Iterable[tuple[str, Tensor]],
    progress: Callable[[int], object] = lambda written: None,
    metadata: Mapping[str, str] = _METADATA,
) -> str:
    """Every entry must arrive exactly once with its dtype and shape; the file is on disk when this returns its sha256.

    Raises OSError (disk full), AssertionError where a tensor is not as announced.
    """
    header, starts = _header(list(entries), metadata)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        base = file.tell()
        announced = dict(starts)
        for name, tensor in tensors:
            start, entry = announced.pop(name)
            if tensor.dtype != _DTYPES[entry.dtype] or tuple(tensor.shape) != entry.shape:
                raise AssertionError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced {entry}")
            file.seek(base + start)
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            progress(entry.bytes)
            del tensor  # before the next one is made
        if announced:
            raise AssertionError(f"never written: {sorted(announced)[:3]}")
        file.flush()
        with ThreadPoolExecutor(1) as disk:  # the disk writes while the bytes, still in memory, are hashed
            on_disk = disk.submit(os.fsync, file.fileno())
            digest = sha256_file(path)
            on_disk.result()
    return digest


def _header(entries: list[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, Entry]]]:
    starts: dict[str, tuple[int, Entry]] = {}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in sorted(entries, key=lambda e: (-_RANK[e.dtype], e.name)):
        starts[entry.name] = (offset, entry)
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, offset + entry.bytes]}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8), starts
