"""Linears that are given the same tensor under the same scale quantize it once: the bits and gradients of quantizing it each."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qad.numerics import linear as module
from qad.numerics.linear import QuantizedLinear, wrap_linears

SCALES = {"q": 0.004, "k": 0.004, "v": 0.004, "o": 0.001}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in SCALES:
            self.add_module(name, nn.Linear(32, 32, bias=name == "k"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o = self.children()
        return o(q(x) * k(x).sigmoid() + v(x))


@pytest.fixture(params=["NVFP4", "FP8"])
def block(request: pytest.FixtureRequest) -> Block:
    torch.manual_seed(0)
    found = Block()
    wrap_linears(found, {name: (torch.tensor(scale), request.param) for name, scale in SCALES.items()})
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    seen: list[Tensor] = []
    original = module.quantize_input

    def counting(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x)
        return original(x, *rest)

    monkeypatch.setattr(module, "quantize_input", counting)
    return seen


def alone(block: Block) -> Block:
    """The same block, whose Linears share nothing."""
    other = copy.deepcopy(block)
    for child in other.children():
        assert isinstance(child, QuantizedLinear)
        child.shared = None
    return other


def outputs(block: Block, x: Tensor, wrap: bool = False) -> list[Tensor]:
    """Output and every gradient."""
    x = x.clone().requires_grad_()
    block.zero_grad()
    y = checkpoint(block, x, use_reentrant=False) if wrap else block(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in block.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("wrap", [False, True])
def test_the_bits_are_those_of_quantizing_each_time(block: Block, wrap: bool) -> None:
    for size in (0.1, 3.0, 1e3):  # the last one saturates
        x = size * torch.randn(2, 5, 32)
        for ours, theirs in zip(outputs(block, x, wrap), outputs(alone(block), x), strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_a_common_input_is_quantized_once(block: Block, calls: list[Tensor]) -> None:
    x = torch.randn(4, 32)
    with torch.no_grad():
        block(x)
        assert len(calls) == 2
        block(x)  # nothing is kept behind a forward pass
        assert len(calls) == 4
        alone(block)(x)
        assert len(calls) == 8


def test_what_has_changed_or_has_another_scale_or_may_not_be_quantized_is_not_shared(block: Block, calls: list[Tensor]) -> None:
    q, k, v, o = block.children()
    x = torch.randn(4, 32)
    q(x), o(x)
    assert len(calls) == 2
    x.mul_(2)
    assert torch.equal(k(x), alone(block).k(x))
    with torch.no_grad():
        assert not v(x).requires_grad
    calls.clear()
    with torch.inference_mode():
        block(torch.randn(4, 32))
    assert len(calls) == 2
    for linear in (q, k, v):
        linear.quantizes_input = False  # type: ignore[assignment]
    calls.clear()
    q(x), k(x)
    assert calls == []


def test_nothing_outlives_its_input(block: Block) -> None:
    q = block.get_submodule("q")
    assert isinstance(q, QuantizedLinear)
    with torch.no_grad():
        q(torch.randn(4, 32))  # k and v never ask
    gc.collect()
    assert q.shared is not None
    assert q.shared._quantized is None
