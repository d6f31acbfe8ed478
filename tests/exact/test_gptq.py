"""Codes decided by error feedback: what they make small, and what they leave as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qad.numerics import nvfp4
from qad.numerics.gptq import decide_codes
from qad.numerics.scale_search import search_scales


def correlated(t: int, k: int, seed: int) -> Tensor:
    """Inputs [t, K] with a common part and columns of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(k, generator=generator) * 3
    return torch.randn(t, k, generator=generator) * sizes + 2 * torch.randn(t, 1, generator=generator)


def weight_of(n: int, k: int, seed: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def lost(decoded: Tensor, weight: Tensor, x: Tensor) -> float:
    return float((x @ (decoded - weight.float()).T).square().sum())


@pytest.mark.parametrize("shape", [(24, 64), (5, 16), (8, 208)])
def test_outputs_lose_less_than_by_rounding_to_nearest(shape: tuple[int, int]) -> None:
    weight, x = weight_of(*shape, seed=1), correlated(512, shape[1], seed=2)
    scales = search_scales({"w": weight}, "mse")["w"]
    decided = decide_codes(weight, scales.global_scale, x.double().T @ x.double()).quantized
    assert torch.equal(decided.global_scale, scales.global_scale)
    nearest = nvfp4.fake_quantize(weight.float(), scales.global_scale, scales.block_scale)
    assert lost(decided.dequantize(), weight, x) < 0.75 * lost(nearest, weight, x)


def test_inputs_without_correlation_round_to_nearest() -> None:
    """Without correlation there is nothing to feed back; each block only has the better scale."""
    weight = weight_of(16, 64, seed=3)
    scales = search_scales({"w": weight}, "mse")["w"]
    found = decide_codes(weight, scales.global_scale, torch.eye(64, dtype=torch.float64) * 7).quantized
    nearest = nvfp4.quantize(weight, found.global_scale, found.block_scale)
    values = found.dequantize()
    assert torch.equal(values, nearest.dequantize())
    error = (values - weight.float()).square().sum()
    mse = nvfp4.fake_quantize(weight.float(), scales.global_scale, scales.block_scale) - weight.float()
    assert error <= mse.square().sum() * 1.001


def test_zero_weights_and_inputs_that_are_always_zero() -> None:
    weight = weight_of(4, 48, seed=4)
    weight[0] = 0
    x = correlated(64, 48, seed=5)
    x[:, 32:] = 0
    scales = search_scales({"w": weight}, "mse")["w"]
    found = decide_codes(weight, scales.global_scale, x.double().T @ x.double()).quantized
    values = found.dequantize()
    assert torch.equal(values[0], torch.zeros(48))
    assert found.block_scale.float()[0].tolist() == [1.0, 1.0, 1.0]
    unseen = decide_codes(weight, scales.global_scale, torch.zeros(48, 48, dtype=torch.float64)).quantized
    nearest = nvfp4.quantize(weight, unseen.global_scale, unseen.block_scale)
    assert torch.equal(unseen.dequantize(), nearest.dequantize())


def test_fewer_inputs_than_columns() -> None:
    weight, x = weight_of(8, 96, seed=6), correlated(5, 96, seed=7)
    scales = search_scales({"w": weight}, "mse")["w"]
    found = decide_codes(weight, scales.global_scale, x.double().T @ x.double()).quantized
    assert bool(torch.isfinite(found.dequantize()).all())
    nearest = nvfp4.fake_quantize(weight.float(), scales.global_scale, scales.block_scale)
    assert lost(found.dequantize(), weight, x) < 0.5 * lost(nearest, weight, x)


def test_a_weight_that_is_not_finite_is_refused() -> None:
    weight = weight_of(4, 32, seed=8)
    scales = search_scales({"w": weight}, "mse")["w"]
    weight[2, 5] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        decide_codes(weight, scales.global_scale, torch.eye(32, dtype=torch.float64))


def test_training_starts_where_each_weight_would_go_alone_in_the_cell_of_its_code() -> None:
    weight, x = weight_of(16, 64, seed=9), correlated(512, 64, seed=10)
    scales = search_scales({"w": weight}, "mse")["w"]
    found = decide_codes(weight, scales.global_scale, x.double().T @ x.double())
    codes, start = found.quantized, found.start_NK
    assert start.dtype == torch.bfloat16
    again = nvfp4.fake_quantize(start.float(), codes.global_scale, codes.block_scale)
    assert torch.equal(again, codes.dequantize()), "student = export at step 0"
    for row, column in [(0, 0), (3, 17), (15, 63)]:
        alone = codes.dequantize()
        alone[row, column] = start[row, column].float()
        assert lost(alone, weight, x) <= lost(codes.dequantize(), weight, x)
    off_centre = (start.float() - codes.dequantize()).abs() / (
        codes.block_scale.float().repeat_interleave(16, 1) * codes.global_scale
    )
    assert off_centre.mean() > 0.1, "not the middles of the cells"
