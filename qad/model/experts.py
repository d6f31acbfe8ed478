"""The experts of a mixture as modules with the names of the checkpoint.

transformers holds the experts of a layer in 3-D parameters; checkpoints, engines and exclude lists name each of them:

    checkpoint                                 transformers                          here, [N, K], views of it
    mlp.experts.E.gate_proj.weight  [I, H]     mlp.experts.gate_up_proj [E, 2I, H]   mlp.experts.E.gate_proj
    mlp.experts.E.up_proj.weight    [I, H]                                           mlp.experts.E.up_proj
    mlp.experts.E.down_proj.weight  [H, I]     mlp.experts.down_proj    [E, H, I]    mlp.experts.E.down_proj

Split (`split_experts`), every expert projection is a Linear like any other: selected by name, observed, loaded. What trains and
what is measured keeps transformers' parameters, or has them again (`join_experts`), and computes all experts of a layer at
once (qad.numerics.grouped). Which part of a parameter bears which name is asked of qad.model.names. The router is none of this
and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qad.model.names import is_fused, merges_experts, names_of


class Expert(nn.Module):
    """One gated expert: down(gating(gate(x), up(x))), under the checkpoint's names of the three Linears.

    positions_t: which tokens of the layer's flattened input the expert was last given; what observes it needs them.
    """

    positions_t: Tensor | None = None

    def __init__(self, linears: dict[str, nn.Linear], gating: Any) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        self._names = tuple(linears)
        self._gating = gating

    def forward(self, x_tH: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self._names)
        return down(self._gating(torch.cat((gate(x_tH), up(x_tH)), dim=-1)))


class Experts(nn.Module):
    """The experts of a layer by number. Computes what transformers' eager experts compute, expert after expert.

    fused: transformers' module that they came from, without its parameters.
    """

    fused: nn.Module

    def __init__(self, experts: list[Expert], fused: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "fused", fused)  # not a child: it has no parameters of its own
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [t, H], top_k_index and top_k_weights [t, k] -> [t, H]."""
        total_tH = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            expert = self.get_submodule(str(number))
            slot_t, token_t = torch.where((top_k_index == number).T)
            expert.positions_t = token_t
            output_tH = expert(hidden_states[token_t]) * top_k_weights[token_t, slot_t, None]
            total_tH.index_add_(0, token_t, output_tH.to(total_tH.dtype))
        return total_tH


def split_experts(model: nn.Module) -> None:
    """Replace, in place, the fused experts of a transformers model (meta device is enough) by `Experts`; nothing is copied.

    What is no `Stack` is left as it is, and `select` refuses it. A second call finds nothing to do.
    """
    for stack in names_of(model).stacks:
        block, _, leaf = stack.name.rpartition(".")
        fused = model.get_submodule(stack.name)
        if is_fused(fused):
            setattr(model.get_submodule(block), leaf, _split(fused, stack.leaves))


Projections = tuple[nn.Linear, nn.Linear, nn.Linear]  # gate, up and down of an expert


@torch.no_grad()
def join_experts(
    model: nn.Module, may_join: Callable[[list[Projections]], bool] = lambda experts: True
) -> dict[str, list[Projections]]:
    """The reverse of `split_experts`, a layer at a time: transformers' modules again, with the weights that the experts have now.

    may_join: of the experts of a layer; a layer stays split where it says no.
    Returns name of the layer's module -> its experts as they were.
    """
    joined: dict[str, list[Projections]] = {}
    for name, experts in [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]:
        block, _, leaf = name.rpartition(".")
        linears: Any = [tuple(expert.children()) for expert in experts.children()]
        if not may_join(linears):
            continue
        fused = experts.fused
        halves = torch.stack([torch.cat((gate.weight, up.weight)) for gate, up, _ in linears])
        fused.gate_up_proj = nn.Parameter(halves, requires_grad=False)
        fused.down_proj = nn.Parameter(torch.stack([down.weight for *_, down in linears]), requires_grad=False)
        setattr(model.get_submodule(block), leaf, fused)
        joined[name] = linears
    return joined


def conversions_of_split(conversions: list[Any]) -> list[Any]:
    """Of transformers' conversions between checkpoint and model, those that a model with split experts still needs."""
    return [conversion for conversion in conversions if not merges_experts(conversion)]


def _split(fused: Any, names: tuple[str, str, str]) -> Experts:
    halves_E2IH, down_EHI = fused.gate_up_proj, fused.down_proj
    inner = down_EHI.shape[2]
    weights = ((half[:inner], half[inner:], down) for half, down in zip(halves_E2IH, down_EHI, strict=True))
    gating = fused._apply_gate
    experts = [Expert({name: _linear(weight) for name, weight in zip(names, parts, strict=True)}, gating) for parts in weights]
    for name in [*dict(fused.named_parameters(recurse=False))]:  # the bound gating keeps the module
        delattr(fused, name)
    return Experts(experts, fused)


def _linear(weight_NK: Tensor) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = weight_NK.shape
    linear.weight = nn.Parameter(weight_NK.detach(), requires_grad=False)
    return linear


def experts_a_layer(config: Any) -> int:
    """How many experts a layer has; 0 where there are none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)


def routed_share(config: Any) -> float:
    """The share of a layer's experts that a token meets; 1 where there are none."""
    each, count = getattr(config, "num_experts_per_tok", None), experts_a_layer(config)
    return float(each) / count if each and count else 1.0
