"""The experts of a layer in one tensor, first index the expert, and each projection of each of them as a view of it.

                      gate and up                down                   biased adds
    plain             gate_up_proj [E, 2I, H]    down_proj [E, H, I]    gate_up_proj_bias [E, 2I], down_proj_bias [E, H]
    without a gate    up_proj      [E, I, H]     down_proj [E, H, I]
    transposed        gate_up_proj [E, H, 2I]    down_proj [E, I, H]
    interleaved       rows of gate and up take turns, g0 u0 g1 u1, else gate lies above up

`Layout` says which of these a tensor is, be it a parameter of transformers or a tensor of a checkpoint (`Stored`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

GATED = ("gate_proj", "up_proj", "down_proj")  # what engines call them, where the checkpoint has no names for single experts


@dataclasses.dataclass(frozen=True)
class Layout:
    """routed: the module is given tokens and where they go; else the tokens of every expert, already weighted, [E * t, H]."""

    gated: bool = True
    biased: bool = False
    transposed: bool = False
    interleaved: bool = False
    routed: bool = True

    @property
    def weights(self) -> tuple[str, str]:
        """transformers' names of the two weights."""
        return "gate_up_proj" if self.gated else "up_proj", "down_proj"

    @property
    def parameters(self) -> tuple[str, ...]:
        """transformers' names of all parameters."""
        return *self.weights, *(f"{name}_bias" for name in self.weights if self.biased)

    def rows(self, weight: Tensor) -> Tensor:
        """A weight as [..., N, K], a view."""
        return weight.mT if self.transposed else weight

    def parts(self, parameter: str, one: Tensor) -> tuple[Tensor, ...]:
        """The projections in one expert's part of a parameter: [N, K], of a bias [N], views."""
        rows = one if parameter.endswith("_bias") else self.rows(one)
        if not self.gated or parameter.startswith("down_proj"):
            return (rows,)
        return (rows[0::2], rows[1::2]) if self.interleaved else tuple(rows.chunk(2))

    def joined(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Rows of an expert's projections in the order of the parameter; dim: where the rows are, 0 or -1."""
        if len(parts) == 1:
            return parts[0]
        if not self.interleaved:
            return torch.cat(tuple(parts), dim)
        at = 1 if dim == 0 else -1
        return torch.stack(tuple(parts), at).flatten(at - 1, at)


PLAIN = Layout()
# Of modules that are no `use_experts_implementation` of transformers, which says the rest itself.
_OF_CLASS = {"Llama4TextExperts": Layout(transposed=True, routed=False)}


def layout_of(module: nn.Module) -> Layout | None:
    """How a module of transformers holds the experts of a layer; None for one that does not, or not in one of these ways."""
    found = _OF_CLASS.get(type(module).__name__)
    if found is None and hasattr(module, "is_transposed") and not getattr(module, "has_post_expert_norm", False):
        said: Any = module
        interleaved = said.has_gate and not said.is_concatenated
        found = Layout(said.has_gate, said.has_bias, said.is_transposed, interleaved)
    parameters = dict(module.named_parameters(recurse=False))
    if found is None or parameters.keys() != {*found.parameters}:
        return None
    return found if all(parameters[name].dim() == 3 for name in found.weights) else None


def gating_of(module: Any, layout: Layout) -> Callable[[Tensor], Tensor]:
    """What lies between the two GEMMs: [t, 2I], or [t, I] without a gate, -> [t, I]."""
    if not layout.gated:
        return module.act_fn
    if hasattr(module, "_apply_gate"):
        return module._apply_gate

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return up * module.act_fn(gate)

    return gated


@dataclasses.dataclass(frozen=True)
class Stored:
    """Tensors of a checkpoint that hold the experts of a layer, of a family that does not name them one by one.

    tensors: ends of the names of the two weights; a bias is called the same with `_bias`.
    block: end of the name that single experts are given, before their number.
    layout: of the tensors, which may differ from that of transformers' parameters.
    mxfp4: codes [..., K / 32, 16] beside scales [..., K / 32], whose names end in `_scales` instead of `_blocks`.
    """

    tensors: tuple[str, str]
    block: str
    layout: Layout
    mxfp4: bool = False

    def scales(self, name: str) -> str:
        """Of MXFP4 codes."""
        return f"{name.removesuffix('_blocks')}_scales"

    def find(self, name: str) -> tuple[str, str] | None:
        """Of a tensor's name: block of the experts, and what transformers calls the parameter; None for any other."""
        for parameter, end in zip(self.layout.parameters, self._ends, strict=True):
            if name.endswith(f".{end}"):
                return name.removesuffix(end) + self.block, parameter
        return None

    def name(self, block: str, parameter: str) -> str:
        """The reverse of `find`."""
        return block.removesuffix(self.block) + self._ends[self.layout.parameters.index(parameter)]

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of an expert's projections."""
        return GATED if self.layout.gated else GATED[1:]

    def parts(self, parameter: str) -> tuple[str, ...]:
        """Names of the projections' tensors in a parameter, behind the expert's number."""
        leaves = self.leaves[-1:] if parameter.startswith("down_proj") else self.leaves[:-1]
        return tuple(f"{leaf}.{'bias' if parameter.endswith('_bias') else 'weight'}" for leaf in leaves)

    @property
    def _ends(self) -> tuple[str, ...]:
        return *self.tensors, *(f"{end}_bias" for end in self.tensors if self.layout.biased)
