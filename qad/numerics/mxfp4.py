"""MXFP4, in which gpt-oss is published, decoded to BF16 without loss.

A block of 32 E2M1 elements, two a byte, the first in the low nibble, and one E8M0 scale: value = element * 2**(scale - 127).
Source: OCP Microscaling Formats (MX) 1.0, 5.3 and 5.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qad.numerics.nvfp4 import E2M1_MAGNITUDES

BLOCK_SIZE = 32
_BIAS, _NAN = 127, 255


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> BF16 [..., 32 * G]. A scale of 255 is NaN, as E8M0 says; every other
    product is a BF16 number, but for those of 2**128 and more, which are infinite."""
    table = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], device=blocks.device)
    elements = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()]
    exponent = scales.int() - _BIAS
    values = torch.ldexp(torch.ldexp(elements, (exponent // 2)[..., None]), (exponent - exponent // 2)[..., None])
    values = torch.where((scales == _NAN)[..., None], torch.nan, values)
    return values.to(torch.bfloat16).flatten(-2)
