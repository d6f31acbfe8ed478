"""One safetensors file of whole tensors, written by ranks that hold rows of them.

A header, written first, and bytes at their places: no rank ever holds a whole tensor, and any number of ranks can read their rows
again. A process alone holds all of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qad.training.ranks.group import Ranks

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.float64: "F64",
}


def write_rows(path: Path, tensors: Mapping[str, Tensor], lengths: Mapping[str, int], ranks: Ranks) -> None:
    """Called on all ranks with the same names; whole and on disk when it returns.

    tensors: this rank's rows of each; of what `lengths` does not name all of it, equal on all ranks.
    lengths: rows of the whole tensors, by name.
    Raises OSError.
    """
    header: dict[str, object] = {}
    places: dict[str, tuple[int, int]] = {}  # first byte, bytes of a row
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        shape = [lengths.get(name, len(tensor)), *tensor.shape[1:]] if tensor.dim() else []
        places[name] = end, tensor.shape[1:].numel() * tensor.element_size()
        start, end = end, end + math.prod(shape) * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    if ranks.first:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(base + end)
    ranks.wait()
    with path.open("r+b") as file:
        for name, tensor in tensors.items():
            if name in lengths or ranks.first:
                start, row = places[name]
                file.seek(base + start + (ranks.rows(lengths[name]).start * row if name in lengths else 0))
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    ranks.wait()
