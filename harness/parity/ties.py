"""Rounding decisions of quantized activations that lie on an edge, taken as an engine took them.

Quantizing turns the last bit of an activation into another FP4 code wherever it, or the scale of its block, lies on the edge
between two codes; from there on two right implementations of one model part. Such a tie is no error. So the reference is
computed once more: where its input to a quantizer and the engine's fall to different sides of an edge, and differ by rounding
alone (EDGE), it takes the engine's. What it computes between two quantizers stays its own, and errors of the engine add up as
they would without quantization: a wrong scale, a lost tensor, a wrong kernel put its inputs further away than EDGE, and then
nothing is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qad.model.families import Family, family_of
from qad.numerics.formats import FORMATS
from qad.numerics.linear import QuantizedLinear

EDGE = 1e-4  # of the largest value of the token's input; FP32 rounding over 30 layers is an eighth of it (LOG.md)


@dataclasses.dataclass
class Ties:
    """Blocks of 16 activations that were decided as the engine did, and of which Linear the first input was another one."""

    taken: int = 0
    apart: str | None = None


def quantizers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Every Linear that quantizes its input, by name."""
    modules = ((name, one) for name, one in model.named_modules() if isinstance(one, QuantizedLinear))
    return {name: one for name, one in modules if one.input_scale is not None}


def input_of(name: str, inputs: Mapping[str, Tensor], family: Family) -> Tensor | None:
    """What an engine gave a Linear, where that is known: by its own name or that of the first Linear that shares the input."""
    return inputs.get(family.siblings_of(name)[0], inputs.get(name))


@contextlib.contextmanager
def taken_from(model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[Ties]:
    """Inside the block the model breaks its ties as the engine did.

    inputs: what the engine gave each Linear, float [T, K] of the T tokens the model will see. A Linear without one decides
    alone.
    """
    ties, hooks = Ties(), []
    for name, module in quantizers(model).items():
        theirs = input_of(name, inputs, family_of(getattr(model, "config", None) or {}))
        if theirs is not None:
            hooks.append(module.register_forward_pre_hook(_taking(name, theirs, ties)))
    try:
        yield ties
    finally:
        for hook in hooks:
            hook.remove()


def _taking(name: str, theirs_TK: Tensor, ties: Ties) -> Any:
    def take(module: QuantizedLinear, args: tuple[Tensor]) -> tuple[Tensor]:
        x, theirs = args[0], theirs_TK.to(args[0]).view_as(args[0])
        block = FORMATS[module.format].input_block or 1
        other = module.quantize_input(x) != module.quantize_input(theirs)
        near = (x - theirs).abs() <= EDGE * x.abs().amax(-1, keepdim=True)
        other, near = other.unflatten(-1, (-1, block)).any(-1), near.unflatten(-1, (-1, block)).all(-1)
        if ties.apart is None and not near.all():
            ties.apart = name
        tie = other & near
        ties.taken += int(tie.sum())
        return (torch.where(tie.repeat_interleave(block, -1), theirs, x),)

    return take
