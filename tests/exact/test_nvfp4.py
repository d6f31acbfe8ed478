"""The bits of the weight rule: every code, every scale byte, midpoints, extremes, against three oracles."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from weight_cases import BITS, ONE, make_weight, needs_compiler, same_bits

from qad.numerics import nvfp4
from qad.numerics.compiled import compilation
from qad.numerics.groups import is_degenerate
from qad.numerics.nibbles import pack, unpack

pytestmark = pytest.mark.exact


def codes_of(values: list[float], block_amax: float = 6.0) -> list[int]:
    """Codes of up to 15 values in a block whose scale is exactly block_amax / 6 at global scale 1."""
    row = torch.zeros(16)
    row[: len(values)] = torch.tensor(values)
    row[15] = block_amax
    return unpack(nvfp4.quantize(row[None], ONE).packed)[0, : len(values)].tolist()


def weights(name: str) -> torch.Tensor:
    return make_weight(name, (48, 160), seed=7)


NAMES = ["normal", "outliers", "tiny blocks", "zero blocks", "all zero", "huge", "signed zeros", "lognormal"]
CASES = [(n, d) for n in NAMES for d in BITS if (n, d) not in {("huge", torch.float16), ("lognormal", torch.float16)}]


def modelopt_quantize(weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    packed, scale, _ = NVFP4QTensor.quantize(weight.clone(), 16, None, global_scale)
    return packed._quantized_data, scale.view(torch.uint8)


# --- elements ---


def test_every_code_decodes_to_its_value() -> None:
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    packed = pack(torch.arange(16, dtype=torch.uint8)[None])
    q = nvfp4.QuantizedTensor(packed, torch.ones(1, 1).to(torch.float8_e4m3fn), ONE)
    assert same_bits(nvfp4.dequantize(q), torch.tensor([expected]))
    assert expected == np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32).tolist()


def test_every_code_encodes_to_itself() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert codes_of(values) == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]


def test_midpoints_round_to_even_and_their_neighbours_to_the_nearest() -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert codes_of(midpoints.tolist()) == [0, 2, 2, 4, 4, 6, 6]
    assert codes_of(torch.nextafter(midpoints, torch.zeros(7)).tolist()) == [0, 1, 2, 3, 4, 5, 6]
    assert codes_of(torch.nextafter(midpoints, torch.full((7,), 9.0)).tolist()) == [1, 2, 3, 4, 5, 6, 7]


def test_elements_agree_with_ml_dtypes_on_a_fine_grid() -> None:
    grid = torch.arange(-6, 6, 1 / 64)
    rows = torch.nn.functional.pad(grid.view(-1, 12), (0, 4), value=6.0)
    ours = nvfp4.dequantize(nvfp4.quantize(rows, ONE))[:, :12].flatten()
    theirs = grid.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(ours.numpy() + 0.0, theirs + 0.0)


def test_negative_values_that_round_to_zero_keep_their_sign_and_negative_zero_does_not() -> None:
    assert codes_of([-0.01, -0.0, 0.0, 0.01]) == [8, 0, 0, 0]
    value = nvfp4.fake_quantize(torch.tensor([[-0.01, -0.0] + [6.0] * 14]), ONE)
    assert value[0, :2].view(torch.int32).tolist() == [-(2**31), 0]
    assert (value[0, :2] == 0).all()


# --- block scales ---


def test_every_scale_byte_is_reached_and_is_the_cast_of_its_value() -> None:
    bytes_ = torch.arange(1, 127, dtype=torch.uint8)
    scales = bytes_.view(torch.float8_e4m3fn).float()
    rows = torch.zeros(126, 16)
    rows[:, 3] = scales * 6
    assert torch.equal(nvfp4.quantize(rows, ONE).block_scale.view(torch.uint8)[:, 0], bytes_)


def test_scales_round_to_nearest_even_like_ml_dtypes() -> None:
    exact = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    mid = (exact[1:] + exact[:-1]) / 2
    raw = np.concatenate([mid, np.nextafter(mid, np.float32(0)), np.nextafter(mid, np.float32(999)), exact])
    ours = nvfp4.round_to_e4m3(torch.from_numpy(raw))
    assert np.array_equal(ours.numpy(), raw.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("raw", [449.0, 464.0, 480.0, 1e6])
def test_a_scale_beyond_the_range_saturates_at_448(raw: float) -> None:
    """Clamped before the cast, whatever the cast does; for activations too."""
    row = torch.zeros(1, 16)
    row[0, 0] = raw * 6
    assert nvfp4.quantize(row, ONE).block_scale.view(torch.uint8).item() == 0x7E
    assert nvfp4.fake_quantize(row, ONE)[0, 0].item() == 448 * 6
    assert nvfp4.fake_quantize_activation(row, ONE)[0, 0].item() == 448 * 6


def test_elements_use_the_rounded_scale() -> None:
    """In units of the stored scale .42 is 2.44, in units of the raw one 2.52."""
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16], weight[0, 17] = 2688.0, 1.0, 0.42
    q = nvfp4.quantize(weight)
    assert q.global_scale.item() == 1.0
    assert q.block_scale.float()[0, 1].item() == 0.171875
    assert unpack(q.packed)[0, 17].item() == 4  # 2.0, not 3.0


def test_division_not_multiplication_by_a_reciprocal() -> None:
    """The reciprocal of 7 * 2**-9 moves this tie."""
    row = torch.zeros(1, 16)
    row[0, 0], row[0, 1] = 7 * 2**-9 * 6, 0.0239257794
    assert nvfp4.dequantize(nvfp4.quantize(row, ONE))[0, 1].item() == 1.5 * 7 * 2**-9


def test_a_tiny_block_keeps_the_smallest_scale() -> None:
    """A raw scale below 2**-10 is not flushed to zero."""
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16:] = 1.0, 1e-6
    q = nvfp4.quantize(weight)
    assert q.block_scale.view(torch.uint8)[0, 1].item() == 0x01
    assert set(unpack(q.packed)[0, 16:].tolist()) == {3}  # 1.5
    assert nvfp4.dequantize(q)[0, 16].item() == pytest.approx(1.09e-6, rel=1e-2)


def test_a_zero_block_has_scale_one_and_decodes_to_zero() -> None:
    """The stand-in scale of a zero block is stored as it is, and no byte is NaN."""
    weight = torch.zeros(2, 32)
    weight[0] = torch.linspace(-1, 1, 32)
    q = nvfp4.quantize(weight)
    scale_bytes = q.block_scale.view(torch.uint8)
    assert scale_bytes[1].tolist() == [0x38, 0x38]
    assert not ((scale_bytes & 0x7F) == 0x7F).any()
    assert (q.packed[1] == 0).all()
    assert same_bits(nvfp4.dequantize(q)[1], torch.zeros(32))


@pytest.mark.parametrize("amax", [0.0, 1e-36, 1e-39, 1e-45])
def test_a_vanishing_group_gets_a_normal_scale_with_a_finite_reciprocal(amax: float) -> None:
    """Zero, and an amax whose scale would vanish."""
    scale = nvfp4.global_scale_from_amax(amax)
    assert scale.item() == torch.tensor(1.0 / 2688).item()
    assert torch.isfinite(1 / scale)
    assert is_degenerate(amax, 2688) == (amax > 0)
    q = nvfp4.quantize(torch.full((1, 16), amax))
    assert (nvfp4.dequantize(q) == 0).all()


def test_the_smallest_regular_amax_is_not_degenerate() -> None:
    assert not is_degenerate(3.2e-35, 2688)
    assert is_degenerate(3.1e-35, 2688)


def test_the_largest_block_scale_of_a_group_is_448() -> None:
    assert nvfp4.quantize(weights("normal")).block_scale.float().max().item() == 448.0


# --- packing ---


def test_packing_order() -> None:
    """The even index in the low nibble."""
    row = torch.zeros(1, 16)
    row[0, 0], row[0, 1] = 0.5, -6.0
    assert nvfp4.quantize(row, ONE).packed[0, 0].item() == 0xF1
    assert pack(torch.tensor([0b0001, 0b1111], dtype=torch.uint8)).tolist() == [0b11110001]
    assert unpack(torch.tensor([0b11110001], dtype=torch.uint8)).tolist() == [0b0001, 0b1111]


def test_pack_and_unpack_invert_each_other_for_every_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack(unpack(every)), every)


# --- whole tensors against the oracles ---


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_bytes_equal_modelopt(name: str, dtype: torch.dtype) -> None:
    weight = weights(name).to(dtype)
    q = nvfp4.quantize(weight)
    packed, scale = modelopt_quantize(weight, q.global_scale)
    assert torch.equal(q.packed, packed)
    assert torch.equal(q.block_scale.view(torch.uint8), scale)


@pytest.mark.parametrize("name", ["normal", "outliers", "lognormal"])
def test_global_scale_equals_modelopt(name: str) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = weights(name)
    assert same_bits(nvfp4.quantize(weight).global_scale, NVFP4QTensor.get_weights_scaling_factor_2(weight))


@pytest.mark.parametrize("factor", [0.1, 1.0, 3.0])
def test_bytes_equal_modelopt_under_a_foreign_global_scale(factor: float) -> None:
    """A member of a scale group is quantized with a scale that is not its own; 0.1 saturates."""
    weight = weights("normal")
    scale = nvfp4.global_scale_from_amax(weight.abs().amax() * factor)
    q = nvfp4.quantize(weight, scale)
    packed, scale_bytes = modelopt_quantize(weight, scale)
    assert torch.equal(q.packed, packed)
    assert torch.equal(q.block_scale.view(torch.uint8), scale_bytes)


def test_codes_and_packing_equal_compressed_tensors() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    q = nvfp4.quantize(weights("normal"))
    ones = nvfp4.QuantizedTensor(q.packed, torch.ones_like(q.block_scale.float()).to(torch.float8_e4m3fn), ONE)
    assert torch.equal(q.packed, pack_fp4_to_uint8(nvfp4.dequantize(ones)))


# --- the law ---


@pytest.mark.parametrize(("name", "dtype"), [*CASES, ("near-denormal", torch.float32)], ids=str)
def test_fake_quantize_is_dequantize_of_quantize(name: str, dtype: torch.dtype) -> None:
    """What trains is what is exported, for every kind of tensor; tiny blocks and signed zeros too."""
    weight = weights(name).to(dtype)
    assert same_bits(nvfp4.fake_quantize(weight), nvfp4.dequantize(nvfp4.quantize(weight), dtype))


@needs_compiler
@pytest.mark.parametrize("name", [*NAMES, "near-denormal"])
def test_the_compiled_form_has_the_same_bits(name: str) -> None:
    weight = weights(name)
    with compilation(True):
        fake, q, x = (nvfp4.fake_quantize(weight), nvfp4.quantize(weight), nvfp4.fake_quantize_activation(weight, ONE * 1e-3))
    with compilation(False):
        assert same_bits(fake, nvfp4.fake_quantize(weight))
        assert same_bits(x, nvfp4.fake_quantize_activation(weight, ONE * 1e-3))
        eager = nvfp4.quantize(weight)
    assert torch.equal(q.packed, eager.packed)
    assert torch.equal(q.block_scale.view(torch.uint8), eager.block_scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compile_", [False, pytest.param(True, marks=needs_compiler)], ids=["eager", "compiled"])
def test_values_written_to_a_tensor_are_those_of_a_new_one(compile_: bool, dtype: torch.dtype) -> None:
    weight = weights("normal")
    q = nvfp4.quantize(weight)
    for scales in ((), (q.global_scale, q.block_scale)):
        out = torch.full_like(weight, torch.nan, dtype=dtype)
        with compilation(compile_):
            assert nvfp4.fake_quantize(weight, *scales, out=out) is out
        assert same_bits(out, nvfp4.dequantize(q).to(dtype))


@pytest.mark.parametrize("view", ["transposed", "strided", "sliced"])
def test_layout_in_memory_does_not_matter(view: str) -> None:
    base = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    tensor = {"transposed": base.T, "strided": base[::2], "sliced": base[:, 16:48]}[view]
    assert not tensor.is_contiguous()
    assert same_bits(nvfp4.fake_quantize(tensor), nvfp4.fake_quantize(tensor.contiguous()))
    assert torch.equal(nvfp4.quantize(tensor).packed, nvfp4.quantize(tensor.contiguous()).packed)


def test_three_dimensional_weights_are_rows_of_blocks() -> None:
    experts = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(2))
    q = nvfp4.quantize(experts)
    assert (q.packed.shape, q.block_scale.shape, q.shape) == ((4, 8, 16), (4, 8, 2), (4, 8, 32))
    flat = nvfp4.quantize(experts.view(32, 32))
    assert torch.equal(q.packed.view(32, 16), flat.packed)


# --- refusals and gradients ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_with_its_index(bad: float) -> None:
    weight = weights("normal")
    weight[7, 33] = bad
    with pytest.raises(ValueError, match=r"\(7, 33\)"):
        nvfp4.quantize(weight)


@pytest.mark.parametrize("shape", [(2, 40), (2, 8), ()])
def test_k_not_divisible_by_16_is_refused(shape: tuple[int, ...]) -> None:
    for function in (nvfp4.quantize, nvfp4.fake_quantize):
        with pytest.raises(ValueError, match="divisible by 16"):
            function(torch.ones(shape))


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype"):
        nvfp4.quantize(torch.ones(2, 16, dtype=torch.int32))


@pytest.mark.parametrize("bound", [6.0, 60.0])
def test_the_gradient_is_the_identity_also_at_and_beyond_the_bound(bound: float) -> None:
    """Ones everywhere, both ends of -6..6 included."""
    x = torch.linspace(-bound, bound, 16)[None].requires_grad_()
    nvfp4.fake_quantize(x, ONE / 448).sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 16))
    x.grad = None
    nvfp4.fake_quantize_activation(x, ONE / 448).sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 16))
