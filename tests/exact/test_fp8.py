"""FP8 bits: the weight rule against torch's own cast of a BF16 quotient, the input rule against vLLM's order of operations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from weight_cases import make_weight, needs_compiler

from qad.numerics import fp8
from qad.numerics.compiled import compilation

pytestmark = [pytest.mark.exact, pytest.mark.usefixtures("one_thread")]

CASES = [
    "normal",
    "bf16",
    "outliers",
    "tiny blocks",
    "zero blocks",
    "all zero",
    "huge",
    "near-denormal",
    "signed zeros",
    "lognormal",
]


def codes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def quotients() -> torch.Tensor:
    """Every E4M3 value, every midpoint, and both neighbours of each in BF16 and in FP32."""
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    near = [points]
    for bits, dtype in ((torch.int16, torch.bfloat16), (torch.int32, torch.float32)):
        exact = points.to(dtype)
        near += [(exact.view(bits) + step).view(dtype).float() for step in (-1, 1)]
    values = torch.cat(near)
    values = values[torch.isfinite(values) & (values.abs() <= 448)]
    return torch.cat((values, -values))[None]


def test_every_value_and_midpoint_rounds_as_torch_and_ml_dtypes_round() -> None:
    value = quotients()
    mine = codes(fp8.quantize(value, torch.tensor(1.0)).values)
    through_bf16 = value.bfloat16().float().clamp(-448, 448)
    assert torch.equal(mine, codes(through_bf16.to(torch.float8_e4m3fn)))
    theirs = through_bf16.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert torch.equal(mine, torch.from_numpy(theirs))
    direct = codes(value.clamp(-448, 448).to(torch.float8_e4m3fn))
    assert 0 < int((mine != direct).sum()) < value.numel()  # the BF16 step does matter, near midpoints


@pytest.mark.parametrize("name", CASES)
def test_weights_round_as_modelopt_rounds_a_bf16_model(name: str) -> None:
    weight = make_weight(name, (24, 96), 7).bfloat16()
    q = fp8.quantize(weight)
    theirs = (weight / q.scale).clamp(-448, 448)  # a scalar does not promote: BF16
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(codes(q.values), codes(theirs.to(torch.float8_e4m3fn)))
    assert torch.equal(codes(fp8.quantize(weight.float(), q.scale).values), codes(q.values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_fake_quantization_is_the_decoded_export(name: str, dtype: torch.dtype) -> None:
    weight = make_weight(name, (24, 96), 7).to(dtype)
    decoded, fake = fp8.dequantize(fp8.quantize(weight), dtype), fp8.fake_quantize(weight)
    assert fake.dtype == dtype
    assert torch.equal(codes(decoded), codes(fake))


def test_a_large_weight_is_quantized_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    whole = fp8.quantize(weight)
    monkeypatch.setattr(fp8, "_ELEMENTS", 100)
    parts = fp8.quantize(weight)
    assert torch.equal(codes(parts.values), codes(whole.values))
    assert parts.shape == weight.shape


def test_zero_negative_zero_and_saturation_have_these_bytes() -> None:
    q = fp8.quantize(torch.tensor([[0.0, -0.0, 1e-9, -1e-9, 1e9, -1e9]]), torch.tensor(1.0))
    assert codes(q.values).tolist() == [[0x00, 0x80, 0x00, 0x80, 0x7E, 0xFE]]
    zero = fp8.quantize(torch.zeros(2, 16))
    assert float(zero.scale) == float(torch.tensor(1.0) / 448)
    assert not codes(zero.values).any()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_refused_with_its_index(bad: float) -> None:
    weight = torch.ones(3, 16)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match=r"at index \(2, 5\)"):
        fp8.quantize(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_follow_vllms_order_of_operations(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    scale = torch.tensor(2.0) / 448  # larger inputs saturate
    quantized = (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes(fp8.fake_quantize_activation(x, scale)), codes((quantized.float() * scale).to(dtype)))
    assert bool((quantized.float().abs() == 448).any())


def test_gradients_pass_straight_through() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    (fp8.fake_quantize(x).sum() + 2 * fp8.fake_quantize_activation(x, torch.tensor(1e-4)).sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


@needs_compiler
@pytest.mark.slow
def test_compiled_equals_eager_to_the_bit() -> None:
    weight = torch.cat((quotients().expand(4, -1), torch.randn(4, quotients().shape[1])))
    eager = fp8.fake_quantize(weight), codes(fp8.quantize(weight).values)
    with compilation(True):
        compiled = fp8.fake_quantize(weight), codes(fp8.quantize(weight).values)
    assert torch.equal(codes(eager[0]), codes(compiled[0]))
    assert torch.equal(eager[1], compiled[1])
