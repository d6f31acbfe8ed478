"""The experts of a mixture as modules with the names of the checkpoint.

transformers holds the experts of a layer in 3-D parameters; checkpoints, engines and exclude lists name each of them:

    checkpoint                                 transformers                          here, [N, K], views of it
    mlp.experts.E.gate_proj.weight  [I, H]     mlp.experts.gate_up_proj [E, 2I, H]   mlp.experts.E.gate_proj
    mlp.experts.E.up_proj.weight    [I, H]                                           mlp.experts.E.up_proj
    mlp.experts.E.down_proj.weight  [H, I]     mlp.experts.down_proj    [E, H, I]    mlp.experts.E.down_proj

Other layouts of the parameters, and checkpoints that hold such a parameter themselves: qad.model.stacked.

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

from qad.model.names import Stack, merges_experts, names_of
from qad.model.stacked import Layout, gating_of, layout_of


class Expert(nn.Module):
    """One expert: down(gating(gate(x), up(x))), or down(act(up(x))), under the checkpoint's names of its Linears.

    positions_t: which tokens of the layer's flattened input the expert was last given; what observes it needs them.
    """

    positions_t: Tensor | None = None

    def __init__(self, linears: dict[str, nn.Linear], layout: Layout, gating: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        self._names = tuple(linears)
        self._layout, self._gating = layout, gating

    def forward(self, x_tH: Tensor) -> Tensor:
        *first, down = (self.get_submodule(name) for name in self._names)
        return down(self._gating(self._layout.joined([linear(x_tH) for linear in first], -1)))


class Experts(nn.Module):
    """The experts of a layer by number. Computes what transformers' eager experts compute, expert after expert.

    fused: transformers' module that they came from, without its parameters.
    layout: of those.
    """

    fused: nn.Module

    def __init__(self, experts: list[Expert], fused: nn.Module, layout: Layout) -> None:
        super().__init__()
        object.__setattr__(self, "fused", fused)  # not a child: it has no parameters of its own
        self.layout = layout
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None) -> Tensor:
        """hidden_states [t, H], top_k_index and top_k_weights [t, k] -> [t, H]; without them the tokens of every expert,
        zero where another one computes, [E * t, H] -> [E * t, H]."""
        if top_k_index is None or top_k_weights is None:
            return torch.cat([self._given(n, x) for n, x in enumerate(hidden_states.chunk(len(self._modules)))])
        total_tH = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            slot_t, token_t = torch.where((top_k_index == number).T)
            output_tH = self._of(number, hidden_states, token_t) * top_k_weights[token_t, slot_t, None]
            total_tH.index_add_(0, token_t, output_tH.to(total_tH.dtype))
        return total_tH

    def _given(self, number: int, x_tH: Tensor) -> Tensor:
        token_t = x_tH.any(dim=-1).nonzero()[:, 0]
        if not len(token_t):
            return torch.zeros_like(x_tH)
        return torch.zeros_like(x_tH).index_copy(0, token_t, self._of(number, x_tH, token_t))

    def _of(self, number: int, x_tH: Tensor, token_t: Tensor) -> Tensor:
        expert = self.get_submodule(str(number))
        expert.positions_t = token_t
        return expert(x_tH[token_t])


def split_experts(model: nn.Module) -> None:
    """Replace, in place, the fused experts of a transformers model (meta device is enough) by `Experts`; nothing is copied.

    What is no `Stack` is left as it is, and `select` refuses it. A second call finds nothing to do.
    """
    for stack in names_of(model).stacks:
        block, _, leaf = stack.name.rpartition(".")
        fused = model.get_submodule(stack.name)
        if layout_of(fused) is not None:
            setattr(model.get_submodule(block), leaf, _split(fused, stack))


Projections = tuple[nn.Linear, ...]  # gate, where there is one, up and down of an expert


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
        for parameter in experts.layout.parameters:
            setattr(experts.fused, parameter, nn.Parameter(_stacked(linears, experts.layout, parameter), requires_grad=False))
        setattr(model.get_submodule(block), leaf, experts.fused)
        joined[name] = linears
    return joined


def conversions_of_split(conversions: list[object]) -> list[object]:
    """Of transformers' conversions between checkpoint and model, those that a model with split experts still needs."""
    return [conversion for conversion in conversions if not merges_experts(conversion)]


def _stacked(experts: list[Projections], layout: Layout, parameter: str) -> Tensor:
    """A parameter, made of its experts."""
    kind = "bias" if parameter.endswith("_bias") else "weight"
    chosen = slice(-1, None) if parameter.startswith("down_proj") else slice(None, -1)
    rows = [layout.joined([getattr(linear, kind) for linear in expert[chosen]]) for expert in experts]
    return torch.stack([layout.rows(one) if kind == "weight" else one for one in rows])


def _split(fused: Any, stack: Stack) -> Experts:
    parts: dict[str, Tensor] = {}
    for name, parameter in [*fused.named_parameters(recurse=False)]:
        parts |= stack.parts(name, parameter)
        delattr(fused, name)  # the bound gating keeps the module
    gating = gating_of(fused, stack.layout)
    experts = []
    for number in range(fused.num_experts):
        modules = dict(zip(stack.leaves, stack.modules(number), strict=True))
        linears = {leaf: _linear(parts[f"{name}.weight"], parts.get(f"{name}.bias")) for leaf, name in modules.items()}
        experts.append(Expert(linears, stack.layout, gating))
    return Experts(experts, fused, stack.layout)


def _linear(weight_NK: Tensor, bias_N: Tensor | None) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = weight_NK.shape
    linear.weight = nn.Parameter(weight_NK.detach(), requires_grad=False)
    if bias_N is not None:
        linear.bias = nn.Parameter(bias_N.detach(), requires_grad=False)
    return linear


def experts_a_layer(config: Any) -> int:
    """How many experts a layer has; 0 where there are none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)


def routed_share(config: Any) -> float:
    """The share of a layer's experts that a token meets; 1 where there are none."""
    each, count = getattr(config, "num_experts_per_tok", None), experts_a_layer(config)
    return float(each) / count if each and count else 1.0
