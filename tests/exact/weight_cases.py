"""What the exact tests share: weights of every awkward kind, and comparison by bits."""

from __future__ import annotations

import pytest
import torch

from qad.numerics.compiled import compiler_available

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
ONE = torch.tensor(1.0)

needs_compiler = pytest.mark.skipif(not compiler_available("cpu"), reason="no C++ compiler to compare eager with")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.dtype == b.dtype
    return torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))


def make_weight(name: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """FP32 [N, K] (BF16 for "bf16") of at least 24 x 96, a pure function of its arguments."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g)
    match name:
        case "normal":
            return w
        case "bf16":
            return w.bfloat16()
        case "grid":  # global scale 1: every error is exact, and some are equal
            w = torch.randint(-12, 13, shape, generator=g) / 2.0
            w[0, 0] = 2688.0
            return w
        case "outliers":
            w[3, 5], w[10, 70] = 300.0, -2000.0
            return w
        case "tiny blocks":
            w[:, 16:64] *= 1e-7
            return w
        case "zero blocks":
            w[5], w[:, 32:48] = 0.0, 0.0
            return w
        case "all zero":
            return torch.zeros_like(w)
        case "huge":
            return w * 1e35
        case "small":
            return w * 1e-25  # squares of these are zero in FP32
        case "near-denormal":
            return w * 1e-34
        case "signed zeros":
            return torch.where(w > 0, 0.0, -0.0) + 0.001 * w
        case "lognormal":
            return torch.exp(3 * w) * torch.sign(torch.randn(shape, generator=g))
    raise AssertionError(name)
