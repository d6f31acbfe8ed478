"""Ties of quantized activations: taken where rounding alone decides them, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.parity import ties
from qad.numerics.formats import FP8, NVFP4
from qad.numerics.linear import QuantizedLinear

SCALE = torch.tensor(1 / 448)  # NVFP4: the block scale of a block whose largest value is 6 is 1 / SCALE, stored as 448


def model(format: str = NVFP4, scale: Tensor | None = SCALE) -> nn.Module:
    """q_proj and k_proj on one input of 32, then o_proj on q + k."""
    torch.manual_seed(0)

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("q_proj", "k_proj", "o_proj"):
                setattr(self, name, QuantizedLinear.wrap(nn.Linear(32, 32, bias=False), scale, format))

        def forward(self, x: Tensor) -> Tensor:
            return self.o_proj(self.q_proj(x) + self.k_proj(x))

    return Tiny()


def on_an_edge() -> tuple[Tensor, Tensor]:
    """Our input and the engine's, [1, 2, 32] and [2, 32]: one value of the second token lies on either side of 2.5, the edge
    between the codes 2 and 3."""
    ours = torch.full((1, 2, 32), 1.0)
    ours[..., 0] = ours[..., 16] = 6.0
    ours[0, 1, 20] = 2.5 - 1e-5
    theirs = ours[0].clone()
    theirs[1, 20] = 2.5 + 1e-5
    return ours, theirs


def inputs_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What a run gives to q_proj and o_proj."""
    seen = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0][0]}))
        for name in ("q_proj", "o_proj")
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture(autouse=True)
def no_grad() -> object:
    with torch.no_grad():
        yield


def test_a_tie_goes_to_the_engine_and_its_numbers_come_out() -> None:
    tiny, (ours, theirs) = model(), on_an_edge()
    engine = inputs_of(tiny, theirs[None])
    expected = tiny(theirs[None])
    assert (tiny(ours) - expected).abs().max() > 0.01
    with ties.taken_from(tiny, engine) as found:
        assert torch.equal(tiny(ours), expected)
    assert (found.taken, found.apart) == (2, None)  # one block, at q_proj and again at k_proj, which shares q_proj's input
    assert (tiny(ours) - expected).abs().max() > 0.01  # and no trace is left


def test_values_off_the_edge_stay_the_references_own() -> None:
    tiny, (ours, theirs) = model(), on_an_edge()
    theirs[0, 5] += 1e-4
    kept: list[Tensor] = []
    tiny.get_submodule("q_proj").register_forward_hook(lambda module, args, out: kept.append(args[0]))
    with ties.taken_from(tiny, {"q_proj": theirs}):
        tiny(ours)
    assert kept[0][0, 0, 5] == ours[0, 0, 5]  # same code on both sides
    assert kept[0][0, 1, 20] == theirs[1, 20]
    assert torch.equal(kept[0][0, 1, :16], ours[0, 1, :16])


def test_an_input_that_is_another_gets_nothing_and_is_named() -> None:
    tiny, (ours, theirs) = model(), on_an_edge()
    engine = inputs_of(tiny, theirs[None])
    engine["o_proj"] = engine["o_proj"] * 1.01
    with ties.taken_from(tiny, engine) as found:
        tiny(ours)
    assert (found.taken, found.apart) == (2, "o_proj")
    engine["q_proj"][1, 20] = 2.6
    with ties.taken_from(tiny, engine) as found:
        alone = tiny(ours)
    assert (found.taken, found.apart) == (0, "q_proj")
    assert torch.equal(alone, tiny(ours))


def test_not_a_number_is_never_taken() -> None:
    tiny, (ours, theirs) = model(), on_an_edge()
    theirs[1, 20] = float("nan")
    with ties.taken_from(tiny, {"q_proj": theirs}) as found:
        assert torch.isfinite(tiny(ours)).all()
    assert (found.taken, found.apart) == (0, "q_proj")


def test_fp8_decides_value_by_value_and_weights_alone_decide_nothing() -> None:
    ours, theirs = on_an_edge()
    ours[0, 1, 20], theirs[1, 20] = 2.125 - 1e-5, 2.125 + 1e-5  # between the FP8 values 2 and 2.25
    tiny = model(FP8, torch.tensor(1.0))
    with ties.taken_from(tiny, {"q_proj": theirs}) as found:
        tiny(ours)
    assert found.taken == 2
    assert ties.quantizers(model(scale=None)) == {}
    with ties.taken_from(model(scale=None), {"q_proj": theirs}) as found:
        pass
    assert found.taken == 0
