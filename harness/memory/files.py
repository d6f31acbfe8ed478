"""Bytes on disk of a checkpoint folder, by class of tensor, from safetensors headers alone. No torch, no tensor data."""

from __future__ import annotations

import json
from pathlib import Path

from harness.memory.cache_cost import cache_cost
from harness.records.record import MemoryData
from qad.errors import BrokenCheckpointError, SourceError
from qad.untrusted.safetensors_header import Entry, read_header

CLASSES = ("fp4_codes", "block_scales", "global_scales", "fp8", "bf16", "other")

_INDEX = "model.safetensors.index.json"
_SCALES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "pre_quant_scale",
)
_PARAMETER_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def measure_memory(folder: Path) -> MemoryData:
    """Count the bytes of a BF16, ModelOpt-layout or compressed-tensors-layout folder.

    fp4_codes      U8 `X.weight` or `X.weight_packed` beside `X.weight_scale`; a byte is two parameters
    block_scales   scales of more than one element (per block of 16; also per row or per 2-D block of FP8)
    global_scales  scales of one element: weight_scale_2, input_scale, k_scale, v_scale, per-tensor FP8 scales
    fp8, bf16      other tensors of these types; `other` is the rest

    Scales are not parameters. A head that is tied by the config but stored all the same counts once.

    Raises SourceError for a folder without safetensors files, BrokenCheckpointError for a damaged file.
    """
    tensors: list[Entry] = []
    file_bytes = 0
    for path in _files(folder):
        try:
            header = read_header(path)
        except (OSError, ValueError) as error:
            raise BrokenCheckpointError(f"{path} is damaged: {error}; fetch or export it again") from error
        tensors += header.tensors.values()
        file_bytes += header.file_bytes
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


def _is_scale(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _SCALES


def _classify(tensor: Entry, names: set[str]) -> str:
    module, _, leaf = tensor.name.rpartition(".")
    if tensor.dtype == "U8" and leaf in ("weight", "weight_packed") and f"{module}.weight_scale" in names:
        return "fp4_codes"
    if _is_scale(tensor.name) and leaf != "pre_quant_scale":
        return "global_scales" if tensor.elements == 1 else "block_scales"
    if tensor.dtype.startswith("F8_"):
        return "fp8"
    return "bf16" if tensor.dtype == "BF16" else "other"


def _tied_head(folder: Path, tensors: list[Entry]) -> str | None:
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
