"""Deciding the codes of all 4-bit weights in one forward pass of the calibration text (`quantize.rounding: gptq`).

All windows pass the model at once, so that a Linear is reached once, with everything it will ever see of the text. There its
inputs are quantized as the engine will, their curvature is summed, its codes are decided against it (qad.numerics.gptq), and it
computes on with the decided weight: whatever lies behind sees the quantized prefix, attention's output as well as the
layers'. Every Linear, experts by name included, is treated alike and the model needs not be cut into layers; a streamed
model (qad.model.streamed) holds one module's weights. What is held at one time are one module's activations of all windows.

The codes are kept in the arm and exported as they are, on any machine. Making the arm again gives the same codes where the
forward pass has the same bits: the same kind of processor and the same number of threads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qad.arms.selection import Selection
from qad.model.experts import split_experts
from qad.model.names import names_of
from qad.numerics import nvfp4
from qad.numerics.gptq import Decided, decide_codes, decided_near
from qad.numerics.groups import fake_quantize_group
from qad.numerics.linear import quantize_input
from qad.numerics.nvfp4 import FrozenScales
from qad.numerics.scale_search import search_blocks
from qad.numerics.widened import widened_linears
from qad.text.windows import Windows, WindowSet
from qad.training.calibrate import forward_to, real_inputs

_ROWS = 4096  # inputs multiplied at a time in FP32, before the sum goes on in FP64
_PANEL = 256  # columns


@torch.no_grad()
def decided_codes(
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

    model: in its compute dtype; its experts are split and its weights replaced, in place.
    weight_of: a module's weight [N, K] in the source.
    global_scales: FP32 scalars of all 4-bit modules, which stay; a group shares one.
    strategy: what searches block scales (qad.numerics.scale_search) where no token decides them.
    keep_start: whether training is to go on from the codes; what it begins at is as large as the source.
    progress: called with the weights just decided.

    Experts that no token reached are rounded to nearest.
    """
    split_experts(model)
    device = next(model.parameters()).device
    (batch,) = windows.batches(len(windows))
    rounding = _Rounding(model, selection, batch, weight_of, input_scales, global_scales, keep_start, progress)
    with contextlib.ExitStack() as stack:
        for name in selection.modules:
            stack.callback(rounding.watch(name).remove)
        forward = stack.enter_context(forward_to(model, list(selection.modules)))
        stack.enter_context(widened_linears(device.type))
        forward(**batch.model_inputs(device))
    for name in global_scales.keys() - rounding.decided.keys():
        weight = weight_of(name)
        scales = search_blocks(weight, global_scales[name], strategy)
        nearest = nvfp4.quantize(weight, scales.global_scale, scales.block_scale)
        rounding.decided[name] = _kept(decided_near(weight, nearest), keep_start)
    return rounding.decided


class _Rounding:
    """One forward pass. decided: scales with codes by module."""

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        batch: Windows,
        weight_of: Callable[[str], Tensor],
        input_scales: Mapping[str, Tensor],
        global_scales: Mapping[str, Tensor],
        keep_start: bool,
        progress: Callable[[int], object],
    ) -> None:
        self.decided: dict[str, FrozenScales] = {}
        self._model, self._selection, self._weight_of = model, selection, weight_of
        self._input_scales, self._global_scales = input_scales, global_scales
        self._keep_start, self._progress = keep_start, progress
        device = next(model.parameters()).device
        self._counted_BT = None if batch.counted_ST.all() else batch.counted_ST.to(device)
        self._group_of = {name: group for group in selection.groups for name in group}
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None

    def watch(self, name: str) -> Any:
        """The handle of a module's hook."""
        inner = names_of(self._model).inner(name)
        parent = self._model.get_submodule(inner.rpartition(".")[0])
        return self._model.get_submodule(inner).register_forward_pre_hook(functools.partial(self._reached, name, parent))

    def _reached(self, name: str, parent: nn.Module, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, weight = args[0], self._weight_of(name).to(args[0].device)
        quantized, curvature_KK = self._of_input(name, parent, x)
        if name in self._global_scales:
            found = decide_codes(weight, self._global_scales[name], curvature_KK)
            decoded = found.quantized.dequantize(x.dtype)
            self.decided[name] = _kept(found, self._keep_start)
            self._progress(weight.numel())
        else:
            group = self._group_of[name]
            members = {member: self._weight_of(member).to(x.device) for member in group}
            decoded = dict(fake_quantize_group(members, format=self._selection.format_of(name)))[name].to(x.dtype)
        module.weight = nn.Parameter(decoded, requires_grad=False)
        return quantized, *args[1:]

    def _of_input(self, name: str, parent: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input as the GEMM sees it and its curvature; once for modules that share an input."""
        if self._seen is None or self._seen[0] is not x:
            quantized = quantize_input(x, self._input_scales.get(name), self._selection.format_of(name))
            real_tK = real_inputs(quantized, self._counted_BT, parent).flatten(0, -2)
            self._seen = x, quantized, _curvature(real_tK)
        return self._seen[1], self._seen[2]


def _kept(found: Decided, start: bool) -> FrozenScales:
    quantized = found.quantized
    return FrozenScales(quantized.block_scale, quantized.global_scale, quantized, found.start_NK if start else None).to("cpu")


def _curvature(x_tK: Tensor) -> Tensor:
    """Sum of x x^T, FP64 [K, K]. Only what lies right of each panel's first column is multiplied, the rest is its mirror."""
    total_KK = torch.zeros(x_tK.shape[1], x_tK.shape[1], dtype=torch.float64, device=x_tK.device)
    for part_tK in x_tK.split(_ROWS):
        part_tK = part_tK.float()
        for start in range(0, len(total_KK), _PANEL):
            total_KK[start : start + _PANEL, start:] += part_tK[:, start : start + _PANEL].T @ part_tK[:, start:]
    return total_KK.triu() + total_KK.triu(1).T
