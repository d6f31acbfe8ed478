"""Bytes on disk of a checkpoint folder, by class of tensor, from safetensors headers alone. No torch, no tensor data.

A safetensors file is an 8-byte little-endian header length, that many bytes of JSON
({name: {dtype, shape, data_offsets}}, and `__metadata__`), then the data without gaps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any

from harness.memory.cache_cost import cache_cost
from harness.records.record import MemoryData
from qad.errors import BrokenCheckpointError, SourceError

CLASSES = ("fp4_codes", "block_scales", "global_scales", "fp8", "bf16", "other")

_INDEX = "model.safetensors.index.json"
_SCALES = (
    "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_scale", "input_global_scale",
    "k_scale", "v_scale", "q_scale", "pre_quant_scale",
)  # fmt: skip
_PARAMETER_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclasses.dataclass(frozen=True)
class _Stored:
    """One tensor as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def measure_memory(folder: Path) -> MemoryData:
    """Count the bytes of a BF16, ModelOpt-layout or compressed-tensors-layout folder.

    fp4_codes      U8 `X.weight` or `X.weight_packed` beside `X.weight_scale`; a byte is two parameters
    block_scales   scales of more than one element (per block of 16; also per row or per 2-D block of FP8)
    global_scales  scales of one element: weight_scale_2, input_scale, k_scale, v_scale, per-tensor FP8 scales
    fp8, bf16      other tensors of these types; `other` is the rest

    Scales are not parameters. A head that is tied by the config but stored all the same counts once.

    Raises SourceError for a folder without safetensors files, BrokenCheckpointError for a damaged file.
    """
    tensors, file_bytes = [], 0
    for path in _files(folder):
        stored, size = _read_header(path)
        tensors += stored
        file_bytes += size
    names = {tensor.name for tensor in tensors}
    by_class = dict.fromkeys(CLASSES, 0)
    parameters = quantized = 0
    tied = _tied_head(folder, tensors)
    for tensor in tensors:
        kind = _classify(tensor, names)
        by_class[kind] += tensor.bytes
        if tensor.name == tied:
            continue
        if kind == "fp4_codes":
            quantized += 2 * tensor.elements
        elif not _is_scale(tensor.name) and tensor.dtype in _PARAMETER_DTYPES:
            parameters += tensor.elements
    parameters += quantized
    if parameters == 0:
        raise SourceError(f"{folder} holds no weights: give a Hugging Face model folder")
    tensor_bytes = sum(by_class.values())
    cache = cache_cost(folder, tensor_bytes) if (folder / "config.json").is_file() else None
    return MemoryData(by_class, tensor_bytes, file_bytes, parameters, quantized, cache)


def _files(folder: Path) -> list[Path]:
    """The files a loader reads: those of the index, else the one file. A copy in another layout is not counted."""
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{index} is not a safetensors index ({error}): fetch the file again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise SourceError(f"{folder} lacks {missing[0]}, which its index lists: resume the download or the export")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise SourceError(f"{folder} has no *.safetensors files: give a Hugging Face model folder")
    return files


def _read_header(path: Path) -> tuple[list[_Stored], int]:
    """Tensors and size of one file. Raises BrokenCheckpointError unless header and data fill the file exactly."""
    size = path.stat().st_size
    broken = f"{path} is damaged: %s; fetch or export it again"
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise BrokenCheckpointError(broken % f"its {size} bytes end before its header does")
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = [
            _Stored(name, str(t["dtype"]), tuple(t["shape"]), t["data_offsets"][1] - t["data_offsets"][0])
            for name, t in header.items()
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BrokenCheckpointError(broken % f"its header cannot be read ({error})") from error
    expected = 8 + length + sum(tensor.bytes for tensor in tensors)
    if expected != size:
        raise BrokenCheckpointError(broken % f"it has {size} bytes, its header describes {expected}")
    return tensors, size


def _is_scale(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _SCALES


def _classify(tensor: _Stored, names: set[str]) -> str:
    module, _, leaf = tensor.name.rpartition(".")
    if tensor.dtype == "U8" and leaf in ("weight", "weight_packed") and f"{module}.weight_scale" in names:
        return "fp4_codes"
    if _is_scale(tensor.name) and leaf != "pre_quant_scale":
        return "global_scales" if tensor.elements == 1 else "block_scales"
    if tensor.dtype.startswith("F8_"):
        return "fp8"
    return "bf16" if tensor.dtype == "BF16" else "other"


def _tied_head(folder: Path, tensors: list[_Stored]) -> str | None:
    """Name of a stored head that the config ties to an embedding of the same shape, so that it is the same weight."""
    try:
        tied = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    head = next((t for t in tensors if t.name == "lm_head.weight"), None)
    if not tied or head is None:
        return None
    embedding = any(t.name.endswith("embed_tokens.weight") and t.shape == head.shape for t in tensors)
    return head.name if embedding else None
