"""Codes of all 4-bit weights trained layer after layer, in one forward pass of the calibration text
(`quantize.rounding: blockwise`).

A decoder layer is reached once, with the hidden states of all windows behind the quantized prefix. What the original makes of its
own hidden states is the target, so that a layer also makes up for what the layers before it lost. The error of a token counts in
units of its target's mean square, as the norms behind see it: a few tokens of most models have hidden states a thousand times as
large as all others. Activations are quantized as the engine will; nothing but 4-bit weights trains.

Weights train in units of their block's scale, in which E2M1's steps are the same everywhere, so that one learning rate fits all.
Scales stay as they were searched: learned ones fit the calibration text better and other text worse (LOG.md).

At one time there are a layer's weights with moments and gradients (FP32), and four hidden states of all windows. Codes are kept
in the arm as those of gptq are, and end-to-end training goes on from the weights that were rounded to them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from qad.arms.selection import Selection
from qad.errors import SourceError
from qad.model.experts import split_experts
from qad.model.names import names_of
from qad.numerics import nvfp4
from qad.numerics.gptq import decided_near
from qad.numerics.groups import fake_quantize_group
from qad.numerics.linear import QuantizedLinear, wrap_linears
from qad.numerics.nvfp4 import BLOCK_SIZE, FrozenScales
from qad.numerics.scale_search import search_blocks
from qad.numerics.widened import widened_linears
from qad.text.windows import WindowSet

TOKENS = 512  # of a step, or fewer so that there are
STEPS = 32  # of a layer; each window is seen once
LR = 0.01  # in units of the block's scale
WARMUP = 4  # steps, then linearly to zero
BETAS = (0.9, 0.95)


@torch.no_grad()
def trained_codes(
    model: Any,
    selection: Selection,
    windows: WindowSet,
    weight_of: Callable[[str], Tensor],
    input_scales: Mapping[str, Tensor],
    global_scales: Mapping[str, Tensor],
    strategy: str,
    *,
    keep_start: bool = True,
    progress: Callable[[int], object] = lambda weights: None,
) -> dict[str, FrozenScales]:
    """Scales, codes and start of every module of `global_scales`, on the CPU.

    model: the original in its compute dtype; its experts are split and its layers become those of the student, in place.
    weight_of: a module's weight [N, K] in the source.
    global_scales: FP32 scalars of all 4-bit modules, which stay; a group shares one.
    strategy: what searches the block scales (qad.numerics.scale_search) that training begins with.
    keep_start: whether end-to-end training is to go on from the codes; what it begins at is as large as the source.
    progress: called with the weights just decided.

    Modules outside of the layers are rounded to nearest. Raises SourceError for a model whose layers do not follow one another.
    """
    split_experts(model)
    device = next(model.parameters()).device
    (batch,) = windows.batches(len(windows))
    layers = _Layers(selection, weight_of, input_scales, global_scales, strategy, batch.counted_ST.to(device), progress)
    inner = {names_of(model).inner(name): name for name in selection.modules}
    for path, layer in model.named_modules():
        names = {leaf.removeprefix(f"{path}."): name for leaf, name in inner.items() if leaf.startswith(f"{path}.")}
        if names and isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(layers.reached, layer, names)
    with contextlib.ExitStack() as stack:
        stack.enter_context(widened_linears(device.type))
        model.base_model(**batch.model_inputs(device))
    for name in global_scales.keys() - layers.decided.keys():
        weight = weight_of(name)
        layers.decided[name] = _kept(weight, search_blocks(weight, global_scales[name], strategy))
    return layers.decided if keep_start else {name: replace(scales, start=None) for name, scales in layers.decided.items()}


class _Layers:
    """One forward pass. decided: scales with codes by module."""

    def __init__(
        self,
        selection: Selection,
        weight_of: Callable[[str], Tensor],
        input_scales: Mapping[str, Tensor],
        global_scales: Mapping[str, Tensor],
        strategy: str,
        counted_ST: Tensor,
        progress: Callable[[int], object],
    ) -> None:
        self.decided: dict[str, FrozenScales] = {}
        self._selection, self._weight_of, self._input_scales = selection, weight_of, input_scales
        self._global_scales, self._strategy = global_scales, strategy
        self._counted_ST, self._progress = counted_ST, progress
        self._random = torch.Generator().manual_seed(0)
        self._before: tuple[Tensor, Tensor] | None = None  # what the layer before gave back, and the original's hidden states

    def reached(self, layer: Any, names: Mapping[str, str], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the layer's own forward. names: of its modules, by path in the layer."""
        del layer.forward
        if self._before is not None and self._before[0] is not hidden_states:
            raise SourceError(
                "quantize.rounding blockwise needs layers that follow one another, and this model computes something between "
                f"them (before {next(iter(names.values()))}): take rounding gptq"
            )
        original_STH = hidden_states if self._before is None else self._before[1]

        def run(index_B: Tensor, states_STH: Tensor) -> Tensor:
            given, named = _rows((args, kwargs), index_B, len(states_STH))
            out = layer(states_STH[index_B], *given, **named)
            found: Tensor = out[0] if isinstance(out, tuple) else out
            return found

        steps = torch.arange(len(hidden_states)).split(max(1, TOKENS // hidden_states.shape[1]))
        target_STH = torch.cat([run(index_B, original_STH) for index_B in steps])
        masters = self._to_student(layer, names)
        if masters:
            self._train(masters, lambda index_B: run(index_B, hidden_states), target_STH)
        found_STH = torch.cat([run(index_B, hidden_states) for index_B in steps])
        for path, name in names.items():
            if name in masters:
                self.decided[name] = masters[name].decided()
                self._progress(masters[name].element_NGB.numel())
            layer.get_submodule(path).weight = None
        self._before = found_STH, target_STH
        return found_STH

    def _to_student(self, layer: nn.Module, names: Mapping[str, str]) -> dict[str, _Master]:
        """The layer's Linears quantize as the engine will; those in 4 bits have masters."""
        format_of = self._selection.format_of
        biases = {path: _bias(layer.get_submodule(path)) for path in names}
        wrap_linears(layer, {path: (self._input_scales.get(name), format_of(name)) for path, name in names.items()})
        inside, masters = set(names.values()), {}
        rounded: dict[str, Tensor] = {}
        for group in self._selection.groups:
            if group[0] in inside and group[0] not in self._global_scales:
                rounded |= fake_quantize_group({name: self._weight_of(name) for name in group}, format=format_of(group[0]))
        for path, name in names.items():
            linear: Any = layer.get_submodule(path)
            value = self._weight_of(name) if name in self._global_scales else rounded[name]
            linear.weight = nn.Parameter(value.to(self._counted_ST.device, linear.weight.dtype, copy=True), requires_grad=False)
            linear.bias = biases[path]
            if name in self._global_scales:
                masters[name] = _Master(linear, search_blocks(linear.weight.detach(), self._global_scales[name], self._strategy))
        return masters

    def _train(self, masters: Mapping[str, _Master], run: Callable[[Tensor], Tensor], target_STH: Tensor) -> None:
        power_ST = target_STH.float().square().mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
        share_ST = self._counted_ST / (power_ST * target_STH.shape[-1])
        size = max(1, min(TOKENS // target_STH.shape[1], len(target_STH) // STEPS))
        order = torch.randperm(len(target_STH), generator=self._random).split(size)
        optimizer = torch.optim.AdamW([m.element_NGB for m in masters.values()], lr=LR, betas=BETAS, weight_decay=0.0)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1 - step / len(order)))
        for index_B in order:
            with torch.enable_grad():
                error_BT = (run(index_B).float() - target_STH[index_B].float()).square().sum(-1)
                (error_BT * share_ST[index_B]).sum().backward()
            for master in masters.values():
                master.take_gradient()
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            for master in masters.values():
                master.deploy()


class _Master:
    """What trains of a 4-bit Linear: element_NGB, FP32, in units of the block's scale. linear: with the original's weight, whose
    scales are given."""

    def __init__(self, linear: QuantizedLinear, scales: FrozenScales) -> None:
        self._linear, self._scales = linear, scales.to(linear.weight.device)
        self._unit_NG1 = (self._scales.block_scale.float() * self._scales.global_scale)[..., None]
        self.element_NGB = linear.weight.detach().float().unflatten(-1, (-1, BLOCK_SIZE)) / self._unit_NG1
        linear.weight.requires_grad_()
        self.deploy()

    def _weight(self) -> Tensor:
        return (self.element_NGB * self._unit_NG1).flatten(-2)

    def deploy(self) -> None:
        """Write the decoded weight into the Linear."""
        decoded_NK = nvfp4.fake_quantize(self._weight(), self._scales.global_scale, self._scales.block_scale)
        self._linear.weight.detach().copy_(decoded_NK)

    def take_gradient(self) -> None:
        """From the Linear; none where no token came."""
        gradient = self._linear.weight.grad
        if gradient is not None:
            self.element_NGB.grad = gradient.float().view_as(self.element_NGB) * self._unit_NG1
            self._linear.weight.grad = None

    def decided(self) -> FrozenScales:
        """Scales, codes, and the weight they were rounded from."""
        return _kept(self._weight(), self._scales)


def _bias(linear: nn.Module) -> nn.Parameter | None:
    """Of a Linear that may be streamed: what it holds while it runs, on no token."""
    found: list[nn.Parameter | None] = []
    handle = linear.register_forward_pre_hook(lambda module, args: found.append(module.bias))
    weight: Any = linear.weight
    linear(weight.new_empty(0, weight.shape[1]))
    handle.remove()
    return found[0]


def _kept(weight_NK: Tensor, scales: FrozenScales) -> FrozenScales:
    quantized = nvfp4.quantize(weight_NK, scales.global_scale, scales.block_scale)
    start_NK = decided_near(weight_NK, quantized).start_NK
    return FrozenScales(quantized.block_scale, quantized.global_scale, quantized, start_NK).to("cpu")


def _rows(value: Any, index_B: Tensor, windows: int) -> Any:
    """A layer's other arguments, of some windows: of tensors [S, T, ...] their rows, all else as it is."""
    if isinstance(value, dict):
        return {name: _rows(part, index_B, windows) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_rows(part, index_B, windows) for part in value)
    split = isinstance(value, Tensor) and value.dim() > 1 and len(value) == windows
    return value[index_B] if split else value
