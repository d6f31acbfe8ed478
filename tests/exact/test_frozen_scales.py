"""The bits of quantization with given block scales: ModelOpt's codes, the law, and what saturates."""

from __future__ import annotations

import pytest
import torch
from weight_cases import BITS, ONE, make_weight, needs_compiler

from qad.numerics import nvfp4
from qad.numerics.compiled import compilation
from qad.numerics.scale_search import STRATEGIES, search_scales

pytestmark = [pytest.mark.exact, pytest.mark.usefixtures("one_thread")]


def weights(name: str) -> torch.Tensor:
    return make_weight(name, (32, 96), seed=13)


NAMES = ["normal", "outliers", "tiny blocks", "zero blocks", "all zero"]
MOVES = {"as found": 1.0, "moved": None, "tripled": 3.0}


def moved(weight: torch.Tensor, how: str) -> torch.Tensor:
    """The weight after training: a little elsewhere, or far beyond its scales."""
    factor = MOVES[how]
    if factor is not None:
        return weight * factor
    return weight + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))


def scale_bytes(q: nvfp4.QuantizedTensor) -> torch.Tensor:
    return q.block_scale.view(torch.uint8)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_codes_equal_modelopt_given_the_same_scales(name: str, dtype: torch.dtype, how: str, strategy: str) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    frozen = search_scales({"m": weights(name)}, strategy)["m"]
    weight = moved(weights(name), how).to(dtype)
    q = nvfp4.quantize(weight, frozen.global_scale, frozen.block_scale)
    theirs, _, _ = NVFP4QTensor.quantize(weight.clone(), 16, frozen.block_scale, frozen.global_scale)
    assert torch.equal(q.packed, theirs._quantized_data)
    assert torch.equal(scale_bytes(q), frozen.block_scale.view(torch.uint8))


@pytest.mark.parametrize("name", ["normal", "outliers", "zero blocks"])
def test_scale_bytes_equal_modelopts_static_export_but_for_zero_blocks(name: str) -> None:
    """Its exporter divides block amax by global amax; a zero block becomes 448 there and 1.0 here."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    frozen = search_scales({"m": weights(name)}, "mse")["m"]
    amax = frozen.block_scale.float() * frozen.global_scale * 6
    zero = (weights(name) == 0).view(32, 6, 16).all(-1)
    theirs = NVFP4QTensor._cast_per_block_scale_to_fp8(torch.where(zero, 1.0, amax / 6), frozen.global_scale * 2688 / 6).view(
        torch.uint8
    )
    ours = frozen.block_scale.view(torch.uint8)
    assert torch.equal(ours[~zero], theirs[~zero])
    assert (ours[zero] == 0x38).all()
    assert zero.any() == (name == "zero blocks")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fake_quantize_is_dequantize_of_quantize(name: str, dtype: torch.dtype, how: str, strategy: str) -> None:
    """Also after the weights moved."""
    frozen = search_scales({"m": weights(name)}, strategy)["m"]
    weight = moved(weights(name), how).to(dtype)
    fake = nvfp4.fake_quantize(weight, frozen.global_scale, frozen.block_scale)
    decoded = nvfp4.dequantize(nvfp4.quantize(weight, frozen.global_scale, frozen.block_scale), dtype)
    assert torch.equal(fake.view(BITS[dtype]), decoded.view(BITS[dtype]))


@needs_compiler
@pytest.mark.parametrize("how", MOVES)
def test_the_compiled_form_has_the_same_bits(how: str) -> None:
    frozen = search_scales({"m": weights("normal")}, "mse")["m"]
    weight = moved(weights("normal"), how)
    results = []
    for compile_ in (True, False):
        with compilation(compile_):
            q = nvfp4.quantize(weight, frozen.global_scale, frozen.block_scale)
            results.append((q.packed, nvfp4.fake_quantize(weight, frozen.global_scale, frozen.block_scale)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1].view(torch.int32), results[1][1].view(torch.int32))


def test_the_dynamic_scales_given_back_change_no_bit() -> None:
    for name in NAMES:
        q = nvfp4.quantize(weights(name))
        again = nvfp4.quantize(weights(name), q.global_scale, q.block_scale)
        assert torch.equal(q.packed, again.packed)


# --- saturation ---


def test_what_outgrows_its_scale_saturates_at_six() -> None:
    """Tripled, a block keeps its scale, its largest values stay where they were, and it is counted."""
    weight = weights("normal")
    frozen = search_scales({"m": weight}, "four_over_six")["m"]
    assert nvfp4.saturated_weight_blocks(weight, frozen).sum() == 0
    tripled = nvfp4.quantize(3 * weight, frozen.global_scale, frozen.block_scale)
    assert torch.equal(scale_bytes(tripled), frozen.block_scale.view(torch.uint8))
    limit = 6 * (frozen.block_scale.float() * frozen.global_scale)
    largest = nvfp4.dequantize(tripled).abs().view(32, 6, 16).amax(-1)
    assert torch.equal(largest, limit)
    saturated = nvfp4.saturated_weight_blocks(3 * weight, frozen)
    assert saturated.shape == (32, 6)
    assert saturated.all()


def test_the_count_begins_where_rounding_would_go_on_to_eight() -> None:
    weight = torch.zeros(4, 16)
    weight[:, 0] = torch.tensor([6.0, 6.99, -7.0, 12.0])
    frozen = nvfp4.FrozenScales(torch.ones(4, 1).to(torch.float8_e4m3fn), ONE)
    assert nvfp4.saturated_weight_blocks(weight, frozen).flatten().tolist() == [False, False, True, True]


def test_dynamic_scales_never_cut_off() -> None:
    for name in NAMES:
        q = nvfp4.quantize(weights(name))
        scales = nvfp4.FrozenScales(q.block_scale, q.global_scale)
        assert nvfp4.saturated_weight_blocks(weights(name), scales).sum() == 0


def test_a_global_scale_below_the_weights_saturates_without_nan_and_is_counted() -> None:
    """The stored global amax is .5, the weight's 1.0 (raw block scale 896)."""
    weight = torch.zeros(2, 32)
    weight[0] = torch.linspace(-1, 1, 32)
    q = nvfp4.quantize(weight, nvfp4.global_scale_from_amax(0.5))
    assert scale_bytes(q).tolist() == [[0x7E, 0x7E], [0x38, 0x38]]
    assert nvfp4.dequantize(q).abs().max().item() == pytest.approx(0.5)
    counted = nvfp4.saturated_weight_blocks(weight, nvfp4.FrozenScales(q.block_scale, q.global_scale))
    assert counted.tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_zero_block_stores_one_and_takes_what_training_brings(strategy: str) -> None:
    """No byte is NaN or zero, a zero block decodes to zero, and is not stuck there."""
    weight = weights("zero blocks")
    frozen = search_scales({"m": weight}, strategy)["m"]
    byte = frozen.block_scale.view(torch.uint8)
    assert byte[5].tolist() == [0x38] * 6
    assert byte[:, 2].tolist() == [0x38] * 32
    assert ((byte > 0) & (byte < 0x7F)).all()
    assert (nvfp4.fake_quantize(weight, frozen.global_scale, frozen.block_scale)[5] == 0).all()
    weight[5] = 3 * frozen.global_scale
    grown = nvfp4.fake_quantize(weight, frozen.global_scale, frozen.block_scale)
    assert torch.equal(grown[5], weight[5])


# --- refusals and gradients ---


@pytest.mark.parametrize("bound", [6.0, 60.0])
def test_the_gradient_is_the_identity_also_at_and_beyond_the_bound(bound: float) -> None:
    """Scale 1, both ends of -6..6, and beyond."""
    x = torch.linspace(-bound, bound, 16)[None].requires_grad_()
    nvfp4.fake_quantize(x, ONE, torch.ones(1, 1).to(torch.float8_e4m3fn)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(1, 16))


@pytest.mark.parametrize("fault", ["shape", "dtype", "no global scale", "zero", "nan", "negative"])
def test_scales_that_are_none_are_refused(fault: str) -> None:
    weight, scale = weights("normal"), torch.ones(32, 6).to(torch.float8_e4m3fn)
    global_scale: torch.Tensor | None = ONE
    match fault:
        case "shape":
            scale = scale[:, :5]
        case "dtype":
            scale = scale.float()
        case "no global scale":
            global_scale = None
        case _:
            scale.view(torch.uint8)[3, 4] = {"zero": 0x00, "nan": 0x7F, "negative": 0xB8}[fault]
    with pytest.raises(ValueError, match="scale"):
        nvfp4.quantize(weight, global_scale, scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_with_its_index(bad: float) -> None:
    frozen = search_scales({"m": weights("normal")}, "mse")["m"]
    weight = weights("normal")
    weight[7, 33] = bad
    with pytest.raises(ValueError, match=r"\(7, 33\)"):
        nvfp4.quantize(weight, frozen.global_scale, frozen.block_scale)
