"""The experts of a mixture as modules with the names of the checkpoint.

transformers holds the experts of a layer in 3-D parameters; checkpoints, engines and exclude lists name each of them:

    checkpoint                                 transformers                          here, [N, K], views of it
    mlp.experts.E.gate_proj.weight  [I, H]     mlp.experts.gate_up_proj [E, 2I, H]   mlp.experts.E.gate_proj
    mlp.experts.E.up_proj.weight    [I, H]                                           mlp.experts.E.up_proj
    mlp.experts.E.down_proj.weight  [H, I]     mlp.experts.down_proj    [E, H, I]    mlp.experts.E.down_proj

Split (`split_experts`), every expert projection is a Linear like any other: selected by name, observed, loaded. What trains and
what is measured keeps transformers' parameters, or has them again (`join_experts`), and computes all experts of a layer at
once (qad.numerics.grouped); a `Stack` says which part of a parameter bears which name. The names come from transformers' own
mapping of checkpoints (Mixtral: block_sparse_moe, w1, w3, w2). The router is none of this and stays as it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
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


@dataclasses.dataclass(frozen=True)
class Stack:
    """The experts of a layer in transformers' 3-D parameters.

    name: the module that holds the parameters.
    stored: what the checkpoint calls it.
    leaves: the checkpoint's names of gate, up and down.
    """

    name: str
    stored: str
    leaves: tuple[str, str, str]

    def modules(self, number: int) -> tuple[str, str, str]:
        """Full names of an expert's gate, up and down."""
        gate, up, down = (f"{self.stored}.{number}.{leaf}" for leaf in self.leaves)
        return gate, up, down

    def parts(self, parameter: str, tensor: Tensor) -> dict[str, Tensor]:
        """Module name -> its [N, K] view of the parameter `gate_up_proj` [E, 2I, H] or `down_proj` [E, H, I]."""
        found: dict[str, Tensor] = {}
        for number, matrix in enumerate(tensor):
            gate, up, down = self.modules(number)
            if parameter == "down_proj":
                found[down] = matrix
            else:
                found[gate], found[up] = matrix.chunk(2)
        return found


def expert_stacks(model: nn.Module) -> list[Stack]:
    """The layers whose experts transformers has fused and the checkpoint names one by one.

    Left out: what transformers fuses in another way (transposed, interleaved, with biases, or fused in the checkpoint too).
    """
    fused = [name for name, module in model.named_modules() if _is_fused(module)]
    conversions = _conversions(model) if fused else []
    found = []
    for name in fused:
        leaves = _projection_names(name, conversions)
        if leaves is not None:
            block, _, leaf = name.rpartition(".")
            parent, _, block_leaf = block.rpartition(".")
            stored = next((source for source, target in _renamed(conversions) if target == block_leaf), block_leaf)
            found.append(Stack(name, f"{parent}.{stored}.{leaf}", leaves))
    return found


class StoredNames:
    """The names in the checkpoint of what a transformers model holds in its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        stacks = expert_stacks(model)
        self._stacks = {f"{stack.name}.{leaf}": (stack, leaf) for stack in stacks for leaf in _PARAMETERS}
        blocks = ((stack.name.rpartition(".")[0], stack.stored.rpartition(".")[0]) for stack in stacks)
        self._blocks = {f"{name}.": f"{stored}." for name, stored in blocks if name != stored}

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Of a tensor of a parameter's shape: name in the checkpoint -> its view."""
        if name not in self._stacks:
            block = next((block for block in self._blocks if name.startswith(block)), "")
            return {self._blocks.get(block, "") + name.removeprefix(block): tensor}
        stack, leaf = self._stacks[name]
        return {f"{module}.weight": view for module, view in stack.parts(leaf, tensor).items()}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of tensors by parameter name: name in the checkpoint -> view."""
        return {stored: view for name, tensor in tensors.items() for stored, view in self.parts(name, tensor).items()}

    @property
    def all(self) -> list[str]:
        """Every parameter's names, in the model's order."""
        return list(self.of(self._parameters))


def split_experts(model: nn.Module) -> None:
    """Replace, in place, the fused experts of a transformers model (meta device is enough) by `Experts`; nothing is copied.

    What is no `Stack` is left as it is, and `select` refuses it. A second call finds nothing to do.
    """
    for stack in expert_stacks(model):
        block, _, leaf = stack.name.rpartition(".")
        setattr(model.get_submodule(block), leaf, _split(model.get_submodule(stack.name), stack.leaves))
        parent, _, block_leaf = block.rpartition(".")
        stored_leaf = stack.stored.rpartition(".")[0].rpartition(".")[2]
        if stored_leaf != block_leaf:
            _rename(model.get_submodule(parent), block_leaf, stored_leaf)


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
    for stored, experts in [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]:
        block, _, leaf = stored.rpartition(".")
        linears: Any = [tuple(expert.children()) for expert in experts.children()]
        if not may_join(linears):
            continue
        fused = experts.fused
        halves = torch.stack([torch.cat((gate.weight, up.weight)) for gate, up, _ in linears])
        fused.gate_up_proj = nn.Parameter(halves, requires_grad=False)
        fused.down_proj = nn.Parameter(torch.stack([down.weight for *_, down in linears]), requires_grad=False)
        setattr(model.get_submodule(block), leaf, fused)
        joined[f"{_restore_name(model, block)}.{leaf}"] = linears
    return joined


def _restore_name(model: nn.Module, block: str) -> str:
    """Undo `_rename` where a module bears its name in the checkpoint; returns its own name."""
    parent_name, _, stored = block.rpartition(".")
    parent: Any = model.get_submodule(parent_name)
    own = next((name for name, value in vars(parent).items() if value is parent._modules[stored]), None)
    if own is None:
        return block
    module = parent._modules.pop(stored)
    del parent.__dict__[own]
    parent.add_module(own, module)
    return f"{parent_name}.{own}"


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
    return Experts(experts, fused)


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
