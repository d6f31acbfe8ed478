"""The experts of a mixture as modules with the names of the checkpoint.

transformers holds the experts of a layer in 3-D parameters; checkpoints, engines and exclude lists name each of them:

    checkpoint                                 transformers                          here, [N, K], views of it
    mlp.experts.E.gate_proj.weight  [I, H]     mlp.experts.gate_up_proj [E, 2I, H]   mlp.experts.E.gate_proj
    mlp.experts.E.up_proj.weight    [I, H]                                           mlp.experts.E.up_proj
    mlp.experts.E.down_proj.weight  [H, I]     mlp.experts.down_proj    [E, H, I]    mlp.experts.E.down_proj

Split, every expert projection is a Linear like any other: selected by name, observed, quantized and loaded as such. The
names come from transformers' own mapping of checkpoints (Mixtral: block_sparse_moe, w1, w3, w2). The router is none of
this and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PARAMETERS = {"gate_up_proj", "down_proj"}
_LEAF = re.compile(r"\*\\?\.(\w+)\\?\.weight$")


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
    """The experts of a layer by number. Computes what transformers' eager experts compute, expert after expert."""

    def __init__(self, experts: list[Expert]) -> None:
        super().__init__()
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

    What transformers fuses in another way (transposed, interleaved, with biases, or fused in the checkpoint too) is left
    as it is, and `select` refuses it. A second call finds nothing to do.
    """
    fused = {name: module for name, module in model.named_modules() if _is_fused(module)}
    if not fused:
        return
    conversions = _conversions(model)
    for name, module in fused.items():
        names = _projection_names(name, conversions)
        if names is None:
            continue
        block, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(block), leaf, _split(module, names))
        parent, _, block_leaf = block.rpartition(".")
        stored_leaf = next((source for source, target in _renamed(conversions) if target == block_leaf), None)
        if stored_leaf is not None:
            _rename(model.get_submodule(parent), block_leaf, stored_leaf)


def conversions_of_split(conversions: list[Any]) -> list[Any]:
    """Of transformers' conversions between checkpoint and model, those that a model with split experts still needs."""
    dropped = {id(converter) for converter in conversions if _merges_experts(converter)}
    if not dropped:
        return conversions
    renamed = {id(renaming) for renaming in conversions if list(_renamed([renaming]))}
    return [conversion for conversion in conversions if id(conversion) not in dropped | renamed]


def _is_fused(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() != _PARAMETERS or any(parameter.dim() != 3 for parameter in parameters.values()):
        return False
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    return hasattr(module, "_apply_gate") and all(getattr(module, key, None) is value for key, value in plain.items())


def _split(fused: Any, names: tuple[str, str, str]) -> Experts:
    halves_E2IH, down_EHI = fused.gate_up_proj, fused.down_proj
    inner = down_EHI.shape[2]
    weights = ((half[:inner], half[inner:], down) for half, down in zip(halves_E2IH, down_EHI, strict=True))
    gating = fused._apply_gate
    experts = [
        Expert({name: _linear(weight) for name, weight in zip(names, parts, strict=True)}, gating) for parts in weights
    ]
    for name in _PARAMETERS:  # the bound gating keeps the module
        delattr(fused, name)
    return Experts(experts)


def _linear(weight_NK: Tensor) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = weight_NK.shape
    linear.weight = nn.Parameter(weight_NK.detach(), requires_grad=False)
    return linear


def _rename(parent: Any, name: str, stored: str) -> None:
    """Register a child under its name in the checkpoint; the code of the parent goes on finding it under its own."""
    module = parent._modules.pop(name)
    parent.add_module(stored, module)
    object.__setattr__(parent, name, module)


# --- transformers' mapping of checkpoints ---


def _conversions(model: nn.Module) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _merges_experts(conversion: Any) -> bool:
    """A conversion that stacks the experts of a layer, as they are stored, into one parameter."""
    operations = [type(operation).__name__ for operation in getattr(conversion, "operations", ())]
    return operations in (["MergeModulelist", "Concatenate"], ["MergeModulelist"]) and all(
        target.endswith((".experts.gate_up_proj", ".experts.down_proj")) for target in conversion.target_patterns
    )


def _projection_names(experts: str, conversions: list[Any]) -> tuple[str, str, str] | None:
    """(gate, up, down) as the checkpoint names them; None where it does not hold expert by expert."""
    found: dict[str, list[str]] = {}
    for converter in filter(_merges_experts, conversions):
        target = converter.target_patterns[0]
        parameter = target.rpartition(".")[2]
        leaves = [match[1] for match in map(_LEAF.search, converter.source_patterns) if match]
        if f".{experts}.{parameter}".endswith(f".{target.strip('.')}") and len(leaves) == len(
            converter.source_patterns
        ):
            found.setdefault(parameter, leaves)
    halves, down = found.get("gate_up_proj", []), found.get("down_proj", [])
    return (halves[0], halves[1], down[0]) if (len(halves), len(down)) == (2, 1) else None


def _renamed(conversions: list[Any]) -> Iterator[tuple[str, str]]:
    """(name in the checkpoint, name in transformers) of modules that are only renamed."""
    for conversion in conversions:
        if type(conversion).__name__ == "WeightRenaming" and len(conversion.source_patterns) == 1:
            source, target = (re.sub(r"\\", "", p[0]) for p in (conversion.source_patterns, conversion.target_patterns))
            if re.fullmatch(r"\.\w+\.", source) and re.fullmatch(r"\.\w+\.", target):
                yield source.strip("."), target.strip(".")
