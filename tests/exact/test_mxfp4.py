"""MXFP4 is decoded as transformers decodes it, to the bit, and NVFP4 holds what it held."""

from __future__ import annotations

import pytest
import torch
from tiny_families import to_mxfp4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qad.numerics import mxfp4
from qad.numerics.groups import fake_quantize_group, quantize_group
from qad.numerics.scale_search import search_scales


def every_code_under_every_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """blocks [1, 256, 16, 16], scales [1, 256, 16]: a row a scale, all 256 bytes in each."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    return codes.contiguous(), torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()


def test_every_code_under_every_scale_is_what_transformers_makes_of_it() -> None:
    """But for a scale of 255, which E8M0 calls NaN and transformers counts as 2**128."""
    blocks, scales = every_code_under_every_scale()
    ours = mxfp4.decode(blocks, scales)
    theirs = convert_moe_packed_tensors(blocks, scales).mT.contiguous()
    same = (ours.view(torch.int16) == theirs.view(torch.int16)).reshape(256, -1).all(dim=1)
    assert same[:255].all()
    assert ours[0, 255].isnan().all()


def test_every_product_is_a_bf16_number() -> None:
    blocks, scales = every_code_under_every_scale()
    low, high = (blocks & 15).int(), (blocks >> 4).int()
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.stack((low, high), -1).flatten(-2)
    exact = grid[values & 7] * (1 - 2 * (values >> 3)) * (scales.double() - 127)[..., None].exp2()
    kept = exact.abs().amax(dim=(0, 2, 3)) <= torch.finfo(torch.bfloat16).max
    decoded = mxfp4.decode(blocks, scales)[0].double().reshape(256, -1)
    assert torch.equal(decoded[kept], exact[0].reshape(256, -1)[kept])
    assert int(kept.sum()) == 253  # all but those that go beyond 2**128


@pytest.mark.parametrize("spread", ["normal", "heavy tails"])
def test_four_over_six_loses_nothing_of_mxfp4(spread: str) -> None:
    """Its largest block has scale 256 or 384, so that powers of two below stay E4M3 numbers; the codes are then those of MXFP4.
    ModelOpt's rule for maxima divides by 448 and by 6 and keeps some of the blocks only."""
    torch.manual_seed(0)
    weight = torch.randn(2, 128, 512) if spread == "normal" else torch.distributions.StudentT(4.0).sample((2, 128, 512))
    blocks, scales = to_mxfp4(weight * 0.02)
    group = dict(zip(("gate", "up"), mxfp4.decode(blocks, scales), strict=True))
    quantized = quantize_group(group, search_scales(group, "four_over_six"))
    for module, source in group.items():
        assert torch.equal(quantized[module].dequantize(torch.bfloat16), source)  # a zero may lose its sign
    lost = dict(fake_quantize_group(group))
    kept = torch.stack([(lost[m] == w).unflatten(-1, (-1, 16)).all(-1) for m, w in group.items()]).float().mean()
    assert kept < 0.7
