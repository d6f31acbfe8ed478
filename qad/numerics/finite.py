"""The largest magnitude of a tensor of any size, and where it is NaN or Inf: one read, no copy of the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 18  # elements: what a core's cache holds


def amax(tensor: Tensor) -> Tensor:
    """Largest magnitude of a floating-point tensor, FP32 scalar; Inf or NaN exactly where the tensor holds one."""
    smallest, largest = torch.aminmax(tensor.detach().reshape(-1))
    return torch.maximum(smallest.abs(), largest.abs()).float()


def first_not_finite(tensor: Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN or Inf of a floating-point tensor (BF16, FP16, FP32), in row-major order; None where there is
    none."""
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if not torch.isfinite(amax(chunk)):
            at = torch.tensor(start + int((~torch.isfinite(chunk)).nonzero()[0]))
            return tuple(int(i) for i in torch.unravel_index(at, tensor.shape)) if tensor.dim() else ()
    return None
