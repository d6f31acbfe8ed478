"""The bits of the scale searches: against a search of their own in NumPy with ml_dtypes' casts, in FP32 and in FP64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from weight_cases import make_weight, needs_compiler

from qad.errors import SourceError
from qad.numerics import nvfp4
from qad.numerics.compiled import compilation
from qad.numerics.scale_search import STRATEGIES, search_scales

pytestmark = [pytest.mark.exact, pytest.mark.usefixtures("one_thread")]


FP32 = np.float32
CANDIDATES = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(FP32)


def weights(name: str) -> torch.Tensor:
    return make_weight(name, (24, 96), seed=11)


NAMES = ["normal", "bf16", "grid", "outliers", "tiny blocks", "zero blocks", "all zero", "huge", "small"]


def byte_view(scale: torch.Tensor) -> np.ndarray:
    return scale.view(torch.uint8).numpy()


def fp32_scale_of_group(amax: float, largest: float) -> np.float32:
    return FP32(amax if amax else 1.0) / FP32(6.0 * largest)


def values_stored(w: np.ndarray, decode: np.ndarray) -> np.ndarray:
    """|values| of the codes, FP32: w [blocks, 16] or [blocks, 1, 16], decode broadcast against it."""
    in_units = np.minimum(np.abs(w) / decode, FP32(6.0))
    return in_units.astype(ml_dtypes.float4_e2m1fn).astype(FP32) * decode


def error_fp64(w: np.ndarray, decode: np.ndarray) -> np.ndarray:
    difference = np.abs(w).astype(np.float64) - values_stored(w, decode).astype(np.float64)
    return (difference**2).sum(-1)


def error_fp32(w: np.ndarray, decode: np.ndarray, global_scale: np.float32) -> np.ndarray:
    """In the documented order and unit."""
    unit = FP32(2.0) ** FP32(-np.floor(np.log2(np.float64(global_scale))))
    e = ((np.abs(w) - values_stored(w, decode)) * unit) ** 2
    for half in (8, 4, 2, 1):
        e = e[..., :half] + e[..., half : 2 * half]
    return e[..., 0]


def blocks_of(weight: torch.Tensor) -> np.ndarray:
    return weight.float().numpy().reshape(-1, 16)


# --- mse ---


@pytest.mark.parametrize("name", NAMES)
def test_mse_equals_a_brute_force_search_in_the_documented_order(name: str) -> None:
    weight = weights(name)
    w = blocks_of(weight)
    found = search_scales({"m": weight}, "mse")["m"]
    global_scale = fp32_scale_of_group(np.abs(w).max(), 448.0)
    assert found.global_scale.numpy() == global_scale
    errors = error_fp32(w[:, None, :], (CANDIDATES * global_scale)[None, :, None], global_scale)
    expected = errors.argmin(-1).astype(np.uint8) + 1  # the first, so the smallest scale of a tie
    expected[(w == 0).all(-1)] = 0x38
    assert np.array_equal(byte_view(found.block_scale).reshape(-1), expected)
    if name == "grid":
        assert ((errors == errors.min(-1, keepdims=True)).sum(-1) > 1).any()


@pytest.mark.parametrize("name", NAMES)
def test_mse_is_the_minimum_over_all_126_scales_in_fp64(name: str) -> None:
    weight = weights(name)
    w = blocks_of(weight)
    found = search_scales({"m": weight}, "mse")["m"]
    global_scale = found.global_scale.numpy()
    errors = error_fp64(w[:, None, :], (CANDIDATES * global_scale)[None, :, None])
    chosen = byte_view(found.block_scale).reshape(-1).astype(int) - 1
    zero = (w == 0).all(-1)
    assert (chosen[zero] == 0x37).all()
    own = np.take_along_axis(errors, chosen[:, None], -1)[:, 0]
    assert (own <= errors.min(-1) * (1 + 1e-6)).all()
    second = np.partition(errors, 1, axis=-1)[:, 1]
    clear = ~zero & (second > errors.min(-1) * (1 + 1e-5))  # not decided by rounding
    assert np.array_equal(chosen[clear], errors.argmin(-1)[clear])
    assert clear.sum() > 50 or name == "all zero"


def test_mse_takes_the_smaller_scale_of_a_tie() -> None:
    """Sixteen times 3.0 at global scale 1 is exact with block scales .5, .75, 1, 1.5, 2, 3 and 6: .5 is kept."""
    weight = torch.full((2, 16), 3.0)
    weight[1, 0] = 2688.0
    found = search_scales({"m": weight}, "mse")["m"]
    assert found.global_scale.item() == 1.0
    assert found.block_scale.float()[0, 0].item() == 0.5


def test_mse_never_loses_to_max_calibration() -> None:
    weight = weights("normal")
    w = blocks_of(weight)
    found, dynamic = search_scales({"m": weight}, "mse")["m"], nvfp4.quantize(weight)
    assert torch.equal(found.global_scale, dynamic.global_scale)
    ours, theirs = (
        error_fp64(w, scale.float().numpy().reshape(-1, 1) * found.global_scale.numpy())
        for scale in (found.block_scale, dynamic.block_scale)
    )
    assert (ours <= theirs * (1 + 1e-6)).all()
    assert ours.sum() < 0.8 * theirs.sum()


# --- four over six ---


@pytest.mark.parametrize("name", NAMES)
def test_four_over_six_equals_a_search_in_the_documented_order(name: str) -> None:
    weight = weights(name)
    w = blocks_of(weight)
    found = search_scales({"m": weight}, "four_over_six")["m"]
    global_scale = fp32_scale_of_group(np.abs(w).max(), 256.0)
    assert found.global_scale.numpy() == global_scale
    amax = np.abs(w).max(-1)
    six, four = (
        np.clip(amax / (FP32(m) * global_scale), FP32(2.0**-9), FP32(448.0)).astype(ml_dtypes.float8_e4m3fn) for m in (6.0, 4.0)
    )
    errors = [error_fp32(w, s.astype(FP32)[:, None] * global_scale, global_scale) for s in (six, four)]
    expected = np.where(errors[1] < errors[0], four.view(np.uint8), six.view(np.uint8))
    expected[amax == 0] = 0x38
    assert np.array_equal(byte_view(found.block_scale).reshape(-1), expected)
    if name in ("normal", "bf16", "outliers"):
        share = (errors[1] < errors[0]).mean()
        assert 0.2 < share < 0.8  # both are taken
    fp64 = [error_fp64(w, s.astype(FP32)[:, None] * global_scale) for s in (six, four)]
    clear = np.abs(fp64[1] - fp64[0]) > 1e-5 * fp64[0]
    better = np.where(fp64[1] < fp64[0], four.view(np.uint8), six.view(np.uint8))
    assert np.array_equal(expected[clear & (amax > 0)], better[clear & (amax > 0)])


def test_four_over_six_normalises_by_256_and_takes_six_of_a_tie() -> None:
    weight = torch.zeros(3, 16)
    weight[0, :2] = torch.tensor([1536.0, 1024.0])  # in units of amax / 6: 6 and 4, both exact. As 4 and 2.67: not
    weight[1, :2] = torch.tensor([1536.0, 1152.0])  # as 6 and 4.5: not exact. As 4 and 3: exact
    weight[2, 0] = 12.0  # exact both ways
    found = search_scales({"m": weight}, "four_over_six")["m"]
    assert found.global_scale.item() == 1.0  # 1536 / (6 * 256)
    assert found.block_scale.float().flatten().tolist() == [256.0, 384.0, 2.0]


# --- both ---


@needs_compiler
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [*NAMES, "near-denormal"])
def test_the_compiled_search_finds_the_same_bytes(name: str, strategy: str) -> None:
    weight = weights(name)
    with compilation(True):
        fast = search_scales({"m": weight}, strategy)["m"]
    with compilation(False):
        eager = search_scales({"m": weight}, strategy)["m"]
    assert torch.equal(fast.block_scale.view(torch.uint8), eager.block_scale.view(torch.uint8))
    assert torch.equal(fast.global_scale.view(torch.int32), eager.global_scale.view(torch.int32))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunks_and_shapes_do_not_matter(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights("outliers")
    whole = search_scales({"m": weight}, strategy)["m"]
    monkeypatch.setattr("qad.numerics.scale_search._CHUNK", 7)
    parts = search_scales({"m": weight.view(4, 6, 96)}, strategy)["m"]
    assert parts.block_scale.shape == (4, 6, 6)
    assert torch.equal(whole.block_scale.view(torch.uint8), parts.block_scale.view(24, 6).view(torch.uint8))
    transposed = search_scales({"m": weight.T.contiguous().T}, strategy)["m"]
    assert torch.equal(whole.block_scale.view(torch.uint8), transposed.block_scale.view(torch.uint8))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_members_of_a_group_share_the_global_scale_of_the_largest(strategy: str) -> None:
    members = {"q": weights("normal"), "k": 10 * weights("bf16").float(), "v": weights("all zero")}
    found = search_scales(members, strategy)
    largest = members["k"].abs().max()
    assert {s.global_scale.item() for s in found.values()} == {
        nvfp4.global_scale_from_amax(largest, 448.0 if strategy == "mse" else 256.0).item()
    }
    assert set(byte_view(found["v"].block_scale).flatten().tolist()) == {0x38}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("factor", [2.0**40, 2.0**-60])
def test_a_power_of_two_changes_the_global_scale_alone(strategy: str, factor: float) -> None:
    """Squares of tiny weights would vanish, and those of huge ones overflow, were they not taken in units of the scale."""
    a, b = (search_scales({"m": weights("normal") * f}, strategy)["m"] for f in (1.0, factor))
    assert torch.equal(a.block_scale.view(torch.uint8), b.block_scale.view(torch.uint8))
    assert b.global_scale.item() == a.global_scale.item() * factor


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(strategy: str, bad: float) -> None:
    weight = weights("normal")
    weight[2, 3] = bad
    with pytest.raises(SourceError, match=r"layers\.0\.up\.weight holds NaN or Inf"):
        search_scales({"gate": weights("normal"), "layers.0.up": weight}, strategy)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="mse, four_over_six"):
        search_scales({"m": weights("normal")}, "dynamic")
