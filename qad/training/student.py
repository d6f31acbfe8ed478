"""The student: a transformers model whose parameters are, at every step, exactly what would be deployed.

    masters (FP32)  --deploy-->  parameters (compute dtype)  --forward, backward-->  gradients  --STE-->  masters

`deploy` decodes the quantized form of every selected weight (scales shared within a scale group, recomputed from the
current masters or, where the arm froze them, as they are) and rounds every other parameter to BF16, as the exporter
will. Quantizing is thus done once a step, not once a call; the forward pass is that of the reloaded export, and the
straight-through estimator is the statement that a master receives its deployed parameter's gradient. Gradients of
micro-batches add up in FP32.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from qad.arms.arm import Arm
from qad.errors import ArtifactError
from qad.model.names import names_of
from qad.model.stacked import Layout
from qad.numerics.formats import FORMATS
from qad.numerics.grouped import ExpertInputs, quantize_experts
from qad.numerics.groups import fake_quantize_group, fake_quantize_stack
from qad.numerics.linear import QuantizedLinear, wrap_linears
from qad.numerics.nvfp4 import FrozenScales
from qad.training.saturation import Saturation


class Student:
    """A model, its FP32 masters by parameter name, and the selection that says how they are deployed.

    It takes over the arm's source model, whose parameters become the student's, and deploys the arm's weights.
    `trainable`: names in the checkpoint of the parameters that get gradients, None for all; the others stay as the arm
    has them. Experts of a layer train together, where any of them is named.
    weights: name in the checkpoint -> its view of a master; experts are parts of one.
    Raises ArtifactError for an arm that quantizes nothing, or that lacks a scale it needs.
    """

    def __init__(self, arm: Arm, model: nn.Module, trainable: Set[str] | None = None) -> None:
        if arm.selection is None:
            raise ArtifactError(f"{arm.folder} quantizes nothing: a student starts from a PTQ or QAD arm")
        if arm.source.tied_embeddings and not arm.tied_embeddings:
            raise ArtifactError(f"{arm.folder} has a head of its own, which {arm.source.folder} ties: untie them in the source")
        self.model: Any = model
        self.arm = arm
        self.selection = arm.selection
        arm.require_input_scales()
        self.stored = names_of(model)
        self.experts = self._quantize_inputs()
        self.masters: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            master = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            parts = self.stored.parts(name, master)
            if not parts:  # converted while loading: it stays as the source has it
                parameter.detach().copy_(parameter.detach().to(torch.bfloat16))
                continue
            for stored, part in parts.items():
                part.copy_(_of_shape(arm.start(stored), part))
            self.masters[name] = master
            if trainable is None or not trainable.isdisjoint(parts):
                master.requires_grad_()
                parameter.requires_grad_().register_post_accumulate_grad_hook(self._to_master(name))
        self.weights = self.stored.of({name: master.detach() for name, master in self.masters.items()})
        self.frozen: dict[str, FrozenScales] = {}
        for group in self.selection.groups:
            for module, scales in arm.frozen_scales(group).items():
                self.frozen[module] = scales.to_nearest.to(self.weights[f"{module}.weight"].device)
        self.saturation = Saturation(arm, model, self.weights, self.frozen)
        self.deploy()

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
            master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

        return move

    @torch.no_grad()
    def deploy(self) -> None:
        """Write into the model what the exporter would write into a checkpoint, decoded."""
        parameters = self.stored.of({name: parameter.detach() for name, parameter in self.model.named_parameters()})
        deployed = self._deploy_stacks()
        for group in self.selection.groups:
            if f"{group[0]}.weight" in deployed:
                continue
            weights = {module: self.weights[f"{module}.weight"] for module in group}
            targets = {module: parameters[f"{module}.weight"] for module in group}
            form = self.selection.format_of(group[0])
            deployed |= {f"{module}.weight" for module, _ in fake_quantize_group(weights, self.frozen, form, targets)}
        for name, parameter in parameters.items():
            if name not in deployed:
                parameter.copy_(self.weights[name].to(torch.bfloat16))

    def _deploy_stacks(self) -> set[str]:
        """Experts in 4 bits, a parameter at once; the names in the checkpoint of what was written."""
        deployed: set[str] = set()
        for name, layout in ((stack.name, stack.layout) for stack in self.stored.stacks):
            inputs = self.experts.get(name)
            if inputs is None or not FORMATS[inputs.format].nvfp4_weights:
                continue
            for leaf in (f"{name}.{leaf}" for leaf in layout.weights):
                master, parameter = self.masters[leaf], self.model.get_parameter(leaf)
                parts = list(self.stored.parts(leaf, master.detach()))
                frozen = [self.frozen[part.removesuffix(".weight")] for part in parts] if self.frozen else []
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
        changed, total = 0, 0
        for name in (name for name, master in self.masters.items() if master.requires_grad):
            for stored, part in self.stored.parts(name, self.masters[name]).items():
                start = self.arm.start(stored).to(device=part.device, dtype=torch.float32)
                changed, total = changed + int((part != start).sum()), total + part.numel()
        deployed = self.stored.of({name: parameter.detach() for name, parameter in self.model.named_parameters()})
        codes, elements = 0, 0
        for group in self.selection.groups:
            start_weights = {
                m: self.arm.start(f"{m}.weight").to(device=self.weights[f"{m}.weight"].device, dtype=torch.float32) for m in group
            }
            for module, decoded in fake_quantize_group(start_weights, self.frozen, self.selection.format_of(group[0])):
                value = deployed[f"{module}.weight"]
                codes += int((decoded.to(value.dtype) != value).sum())
                elements += value.numel()
        return {"masters": changed / max(1, total), "deployed": codes / max(1, elements)}

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
