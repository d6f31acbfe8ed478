"""Find NaN and Inf in tensors of any size, a few elements at a time: one read, no copy of the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 18  # elements: what a core's cache holds


def first_not_finite(tensor: Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN or Inf of a floating-point tensor (BF16, FP16, FP32), in row-major order; None where there is
    none. Minimum and maximum of a chunk are not finite exactly where one of its elements is not."""
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if not all(torch.isfinite(extreme) for extreme in torch.aminmax(chunk)):
            at = torch.tensor(start + int((~torch.isfinite(chunk)).nonzero()[0]))
            return tuple(int(i) for i in torch.unravel_index(at, tensor.shape)) if tensor.dim() else ()
    return None
