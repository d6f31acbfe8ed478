"""The transformers engine: opens a checkpoint folder in this process and says what computes its numbers.

NVFP4 folders are opened through `qad.hf`: weights are dequantized, activations of W4A4 are quantized and dequantized
as an engine would, the matmul itself runs in `dtype`. The values are those of NVFP4, the speed is not: `emulated`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.engines.folder_config import algorithm_of
from harness.records.record import Engine
from qad.errors import UsageError
from qad.model.attention import asked_attention
from qad.model.limits import require_ids
from qad.model.loader import DTYPES, load_model, load_tokenizer, resolve_dtype
from qad.model.source import open_checkpoint

FILES = Engine(name="files", version="", dtype="", device="", kernel_path="safetensors headers", emulated=False)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """model: in eval mode, without gradients. engine: for the record."""

    model: nn.Module
    tokenizer: Any
    engine: Engine


def load(folder: Path, dtype: str, device: str, attention: str | None = None) -> LoadedModel:
    """Open a BF16 or NVFP4 folder. dtype: float32, bfloat16 or auto. device: cpu, cuda, cuda:N. attention: sdpa, eager, ...;
    None is transformers' choice.

    Raises SourceError where the folder is not a loadable causal LM, UsageError for an unknown dtype or device, or one that the
    folder's layout cannot be computed in.
    """
    import qad.hf  # noqa: F401  registers the quantizer that opens our folders; takes a second

    if dtype not in (*DTYPES, "auto"):
        raise UsageError(f"dtype {dtype!r} is unknown: use one of {', '.join(DTYPES)}, auto")
    require_device(device)
    dtype = resolve_dtype(dtype, device)
    checkpoint = open_checkpoint(folder, allow_quantized=True)
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    if method == "compressed-tensors" and dtype != "bfloat16":
        raise UsageError(
            f"{folder} is opened by the compressed-tensors library, which computes in bfloat16 only, dtype is {dtype}: use "
            "dtype bfloat16, or `qad convert` it to the modelopt layout"
        )
    tokenizer = load_tokenizer(checkpoint.folder)
    model = load_model(checkpoint, dtype, device, attention)
    require_ids(model, tokenizer, folder)
    algorithm = algorithm_of(checkpoint.config)
    asked = attention or asked_attention(checkpoint.config)
    return LoadedModel(model, tokenizer, describe(model, dtype, device, algorithm, asked))


def require_device(device: str) -> None:
    """Raises UsageError for a device torch does not know or this machine does not have."""
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is unknown: use cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if kind.type == "cuda" and (kind.index or 0) >= count:
        raise UsageError(f"device {device} is not there: this machine has {count} CUDA devices; use cpu")


def describe(model: nn.Module, dtype: str, device: str, algorithm: str | None, asked: str | None = None) -> Engine:
    """The record's engine entry. transformers has no NVFP4 kernels, so a quantized folder is always emulated. asked: the kernel
    of attention that was asked for."""
    attention = getattr(model.config, "_attn_implementation", None) or "unknown"
    instead = f" (in place of {asked})" if asked not in (None, attention) else ""
    matmul = f"torch {dtype} matmul, {attention} attention{instead}"
    path = f"{algorithm} dequantized, then {matmul}" if algorithm else matmul
    return Engine(
        name="transformers",
        version=importlib.metadata.version("transformers"),
        dtype=dtype,
        device=f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device,
        kernel_path=path,
        emulated=algorithm is not None,
        native_fp4=False if algorithm else None,
    )
