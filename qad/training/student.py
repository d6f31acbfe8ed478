"""The student: a transformers model whose parameters are, at every step, exactly what would be deployed.

    masters (FP32)  --deploy-->  parameters (compute dtype)  --forward, backward-->  gradients  --STE-->  masters

`deploy` decodes the quantized form of every selected weight (scales shared within a scale group, recomputed from the
current masters or, where the arm froze them, as they are) and rounds every other parameter to BF16, as the exporter
will. Quantizing is thus done once a step, not once a call; the forward pass is that of the reloaded export, and the
straight-through estimator is the statement that a master receives its deployed parameter's gradient. Gradients of
micro-batches add up in FP32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from qad.arms.arm import DYNAMIC, Arm
from qad.errors import ArtifactError
from qad.model.names import names_of
from qad.model.stacked import Layout
from qad.numerics.finite import amax
from qad.numerics.formats import FORMATS
from qad.numerics.grouped import ExpertInputs, quantize_experts
from qad.numerics.groups import fake_quantize_group, fake_quantize_stack
from qad.numerics.linear import QuantizedLinear, wrap_linears
from qad.numerics.nvfp4 import FrozenScales
from qad.training.ranks.group import here
from qad.training.ranks.shards import Part, own_rows, parts, released, shard
from qad.training.saturation import Saturation


class Student:
    """A model, its FP32 masters by parameter name, and the selection that says how they are deployed. What neither trains nor is
    quantized, such as a tower, has no master: it is the source's, in BF16.

    It takes over the arm's source model, whose parameters become the student's, and deploys the arm's weights. Of several ranks
    each gives a skeleton, and holds its rows of parameters, masters and frozen scales.
    `trainable`: names in the checkpoint of the parameters that get gradients, None for all; the others stay as the arm
    has them. Experts of a layer train together, where any of them is named.
    dtype: of a skeleton's computations; None: the model is loaded.
    lengths: rows of each parameter, whoever holds them.
    first_names: by parameter, its first name in the checkpoint.
    own: name in the checkpoint -> what of it is here.
    weights: name in the checkpoint -> its view of a master; experts are parts of one.
    Raises ArtifactError for an arm that quantizes nothing, or that lacks a scale it needs.
    """

    def __init__(self, arm: Arm, model: nn.Module, trainable: Set[str] | None = None, dtype: str | None = None) -> None:
        if arm.selection is None:
            raise ArtifactError(f"{arm.folder} quantizes nothing: a student starts from a PTQ or QAD arm")
        if arm.source.tied_embeddings and not arm.tied_embeddings:
            raise ArtifactError(f"{arm.folder} has a head of its own, which {arm.source.folder} ties: untie them in the source")
        self.model: Any = model
        self.arm = arm
        self.selection = arm.selection
        arm.require_input_scales()
        self.stored, self.ranks = names_of(model), here()
        self.experts = self._quantize_inputs()
        if dtype is not None:
            shard(model, dtype, True, self.ranks)
            for inputs in self.experts.values():
                given = inputs.first, inputs.second
                inputs.first, inputs.second = (s if s is None else s.to(self.ranks.device) for s in given)
        self.lengths = {name: len(parameter) if parameter.dim() else 0 for name, parameter in model.named_parameters()}
        self.masters: dict[str, Tensor] = {}
        self.first_names: dict[str, str] = {}
        changes = {f"{module}.weight" for module in self.selection.modules} | arm.trained_shapes().keys()
        for name, parameter in model.named_parameters():
            local = own_rows(parameter.detach())
            names = self.stored.parts(name, torch.empty(parameter.shape, device="meta"))
            if not names:  # converted while loading: it stays as the source has it
                local.copy_(local.to(torch.bfloat16))
                continue
            trains = trainable is None or not trainable.isdisjoint(names)
            if not trains and changes.isdisjoint(names):
                for stored, part in self.parts(name, local).items():
                    part.view.copy_(_of_shape(arm.start(stored)[part.rows], part.view).to(torch.bfloat16))
                continue
            self.first_names[name] = next(iter(names))
            master = torch.empty_like(local, dtype=torch.float32, requires_grad=False)
            for stored, part in self.parts(name, master).items():
                part.view.copy_(_of_shape(arm.start(stored)[part.rows], part.view))
            self.masters[name] = master
            if trains:
                master.requires_grad_()
                parameter.requires_grad_().register_post_accumulate_grad_hook(self._to_master(name))
        self.own = {
            stored: part for name, master in self.masters.items() for stored, part in self.parts(name, master.detach()).items()
        }
        self.weights = {stored: part.view for stored, part in self.own.items()}
        self.frozen: dict[str, FrozenScales] = {}
        for group in self.selection.groups:
            for module, scales in arm.frozen_scales(group).items():
                own = self.own.get(f"{module}.weight")
                if own is not None and own.view.numel():
                    rows = FrozenScales(scales.block_scale[own.rows], scales.global_scale)
                    self.frozen[module] = rows.to(own.view.device)
        self.saturation = Saturation(arm, model, self.own, self.frozen)
        self.deploy()

    def parts(self, parameter: str, local: Tensor) -> dict[str, Part]:
        """Of this rank's rows of a parameter: name in the checkpoint -> its view."""
        return parts(self.stored, parameter, local, self.lengths[parameter], self.ranks)

    def _deployed(self) -> dict[str, Tensor]:
        """This rank's rows of the model's parameters, by name in the checkpoint."""
        released(self.model)
        parameters = {name: own_rows(parameter.detach()) for name, parameter in self.model.named_parameters()}
        return {stored: part.view for name in parameters for stored, part in self.parts(name, parameters[name]).items()}

    def _quantize_inputs(self) -> dict[str, ExpertInputs]:
        """Linears are wrapped, layers of experts told; returns the latter by the name of their module."""
        scales, format_of = self.arm.input_scales, self.selection.format_of
        experts: dict[str, ExpertInputs] = {}
        alone = dict.fromkeys(self.selection.modules)
        for stack in self.stored.stacks:
            first, *_, second = stack.modules(0)
            if first in alone:
                experts[stack.name] = ExpertInputs(format_of(first), scales.get(first), scales.get(second))
                for number in range(self.model.get_submodule(stack.name).num_experts):
                    for module in stack.modules(number):
                        del alone[module]
        linears = {self.stored.inner(name): (scales.get(name), format_of(name)) for name in alone}
        wrap_linears(self.model, linears)
        return quantize_experts(self.model, experts)

    def _to_master(self, name: str) -> Any:
        def move(parameter: Tensor) -> None:
            master, grad = self.masters[name], parameter.grad
            assert grad is not None
            grad = own_rows(grad)
            master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

        return move

    @torch.no_grad()
    def deploy(self) -> None:
        """Write into the model what the exporter would write into a checkpoint, decoded."""
        parameters = self._deployed()
        deployed = self._deploy_stacks()
        groups = [group for group in self.selection.groups if f"{group[0]}.weight" not in self._in_stacks]
        for module, _ in self._fake_quantized(groups, self.weights.get, parameters):
            deployed.add(f"{module}.weight")
        for name, parameter in parameters.items():
            if name not in deployed and name in self.weights:
                parameter.copy_(self.weights[name].to(torch.bfloat16))

    @functools.cached_property
    def _in_stacks(self) -> set[str]:
        """Weights of experts in 4 bits, of all ranks: a parameter is deployed at once."""
        stacks = [stack for stack in self.stored.stacks if stack.name in self.experts]
        return {
            f"{module}.weight"
            for stack in stacks
            if FORMATS[self.experts[stack.name].format].nvfp4_weights
            for number in range(self.model.get_submodule(stack.name).num_experts)
            for module in stack.modules(number)
        }

    def _fake_quantized(
        self,
        groups: Sequence[tuple[str, ...]],
        weight: Callable[[str], Tensor | None],
        out: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Iterator[tuple[str, Tensor]]:
        """`fake_quantize_group` of every group, of this rank's rows. weight, out: by name in the checkpoint."""

        def members(group: tuple[str, ...]) -> dict[str, Tensor]:
            here = {module: weight(f"{module}.weight") for module in group}
            return {module: rows for module, rows in here.items() if rows is not None and rows.numel()}

        shared: list[Tensor | None] = [None] * len(groups)
        if groups and not self.ranks.alone and any(map(self._is_dynamic, groups)):
            zero = torch.zeros((), device=self.ranks.device)
            found = (map(amax, members(group).values() if self._is_dynamic(group) else ()) for group in groups)
            shared = list(self.ranks.largest(torch.stack([torch.stack([zero, *each]).amax() for each in found])))
        for group, largest in zip(groups, shared, strict=True):
            own, format = members(group), self.selection.format_of(group[0])
            targets = {module: out[f"{module}.weight"] for module in own} if out else {}
            yield from fake_quantize_group(own, self.frozen, format, targets, largest)

    def _is_dynamic(self, group: tuple[str, ...]) -> bool:
        return self.arm.scales == DYNAMIC or not FORMATS[self.selection.format_of(group[0])].nvfp4_weights

    def _deploy_stacks(self) -> set[str]:
        """Experts in 4 bits, a parameter at once; the names in the checkpoint of what was written."""
        deployed: set[str] = set()
        for name, layout in ((stack.name, stack.layout) for stack in self.stored.stacks):
            inputs = self.experts.get(name)
            if inputs is None or not FORMATS[inputs.format].nvfp4_weights:
                continue
            for leaf in (f"{name}.{leaf}" for leaf in layout.weights):
                master, parameter = self.masters[leaf], own_rows(self.model.get_parameter(leaf).detach())
                parts = list(self.parts(leaf, master.detach()))
                frozen = [self.frozen[part.removesuffix(".weight")] for part in parts] if self.frozen else []
                if parts:
                    scales = _stacked(frozen, len(master), layout)
                    fake_quantize_stack(layout.rows(master), scales, layout.rows(parameter))
                deployed.update(parts)
        return deployed

    def checkpoint_activations(self) -> None:
        """Recompute each layer's activations in the backward pass instead of keeping them. The layers alone learn that
        they train: everything below them stays in eval mode, without dropout."""
        older = self.model.gradient_checkpointing_enable  # its name before transformers 5.20 or so; deprecated after
        getattr(self.model, "activation_checkpointing_enable", older)({"use_reentrant": False})
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True

    def quantize_inputs(self, enabled: bool) -> None:
        """False: the inputs of the selected Linears stay in the compute dtype (W4A16) until it is turned on again."""
        for module in self.model.modules():
            if isinstance(module, QuantizedLinear):
                module.quantizes_input = enabled
        for inputs in self.experts.values():
            inputs.quantizes_input = enabled

    @torch.no_grad()
    def moved(self) -> dict[str, float]:
        """Shares of the trainable masters, and of the deployed quantized values, that differ from the arm's."""
        changed = total = 0
        for name in (name for name, master in self.masters.items() if master.requires_grad):
            for stored, part in self.parts(name, self.masters[name]).items():
                start = self._start(stored)
                assert start is not None
                changed, total = changed + int((part.view != start).sum()), total + part.view.numel()
        deployed = self._deployed()
        codes = elements = 0
        for module, decoded in self._fake_quantized(self.selection.groups, self._start):
            value = deployed[f"{module}.weight"]
            codes += int((decoded.to(value.dtype) != value).sum())
            elements += value.numel()
        moved, masters, different, values = self.ranks.add(changed, total, codes, elements)
        return {"masters": moved / max(1, masters), "deployed": different / max(1, values)}

    def _start(self, stored: str) -> Tensor | None:
        """This rank's rows of the arm's weight, FP32."""
        part = self.own.get(stored)
        return None if part is None else self.arm.start(stored)[part.rows].to(part.view.device, torch.float32)

    @torch.no_grad()
    def load_masters(self, masters: dict[str, Tensor]) -> None:
        """Raises KeyError where the names differ."""
        if masters.keys() != self.masters.keys():
            raise KeyError(f"masters differ from the model's parameters: {sorted(masters.keys() ^ self.masters.keys())[:3]}")
        for name, value in masters.items():
            self.masters[name].copy_(value)
        self.deploy()


def _of_shape(weight: Tensor, like: Tensor) -> Tensor:
    """Copying would repeat a smaller tensor without a word."""
    assert weight.shape == like.shape, (weight.shape, like.shape)
    return weight


def _stacked(scales: list[FrozenScales], groups: int, layout: Layout) -> list[FrozenScales]:
    """Scales of a stack's groups, from those of its modules in order: a group's lie as its rows do."""
    size = len(scales) // groups
    members = (scales[start : start + size] for start in range(0, len(scales), size or 1))
    return [FrozenScales(layout.joined([s.block_scale for s in group]), group[0].global_scale) for group in members]
