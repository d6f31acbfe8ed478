"""Two 4-bit codes a byte, the even one in the low nibble."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """4-bit codes, uint8 [..., K] -> uint8 [..., K/2]; the even index goes to the low nibble."""
    pair = codes.contiguous().view(torch.int16)  # the even code in the low byte
    return (pair | (pair >> 4)).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> 4-bit codes, uint8 [..., K]."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
