"""BF16 Linears through FP32, where a CPU has no BF16 units."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qad.numerics import widened
from qad.numerics.widened import widened_linears


@pytest.fixture
def without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "multiplies_bfloat16", lambda device: False)


def pair(dtype: torch.dtype) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(64, 32).to(dtype), torch.randn(3, 5, 64).to(dtype)


@pytest.mark.usefixtures("without_units")
def test_a_bf16_product_is_the_fp32_product_rounded_once() -> None:
    linear, x = pair(torch.bfloat16)
    assert linear.bias is not None
    expected = F.linear(x.float(), linear.weight.float(), linear.bias.float()).bfloat16()
    with torch.no_grad(), widened_linears("cpu"):
        found = linear(x)
        without_bias = F.linear(x, linear.weight, bias=None)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert torch.equal(without_bias, F.linear(x.float(), linear.weight.float()).bfloat16())


@pytest.mark.usefixtures("without_units")
def test_other_dtypes_and_other_functions_are_left_alone() -> None:
    linear, x = pair(torch.float32)
    with torch.no_grad(), widened_linears("cpu"):
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
        assert (x.bfloat16() * 2).dtype == torch.bfloat16


def test_hardware_with_bf16_units_multiplies_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = pair(torch.bfloat16)
    seen: list[torch.dtype] = []
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: seen.append(x.dtype) or real(x, w, b))  # type: ignore[func-returns-value]
    with torch.no_grad(), widened_linears("cuda"):
        linear(x)
    assert seen == [torch.bfloat16]
