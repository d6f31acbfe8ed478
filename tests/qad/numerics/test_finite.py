"""NaN and Inf are found wherever they lie, and named by the index a user would use."""

from __future__ import annotations

import pytest
import torch

from qad.numerics import finite
from qad.numerics.finite import amax, first_not_finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [(0, 0, 0), (4, 6, 10), (2, 3, 1)])
def test_the_first_one_is_named_across_chunks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bad: float, index: tuple[int, ...]
) -> None:
    monkeypatch.setattr(finite, "_CHUNK", 16)
    tensor = torch.randn(5, 7, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert first_not_finite(tensor) is None
    tensor[4, 6, 10] = float("nan")
    tensor[index] = bad
    assert first_not_finite(tensor) == index


def test_scalars_empty_tensors_and_extreme_values() -> None:
    assert first_not_finite(torch.tensor(float("nan"))) == ()
    assert first_not_finite(torch.tensor(1.0)) is None
    assert first_not_finite(torch.empty(0, 4)) is None
    assert first_not_finite(torch.tensor([torch.finfo(torch.bfloat16).max, -0.0]).bfloat16()) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_magnitude_counts_both_signs_and_passes_on_what_is_not_finite(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.0, -3.0], [2.0, -0.0]], dtype=dtype)
    assert amax(tensor).item() == amax(-tensor.T).item() == 3.0
    assert amax(tensor).dtype == torch.float32
    assert amax(torch.tensor([-0.0], dtype=dtype)).view(torch.int32).item() == 0
    for bad in ("nan", "inf", "-inf"):
        tensor[1, 1] = float(bad)
        assert amax(tensor).isnan() if bad == "nan" else amax(tensor).isinf()
