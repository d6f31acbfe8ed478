"""How much the frozen scales cut off, counted while a student validates and at no cost outside.

saturated_weight_share  blocks of 16 weights that outgrew their frozen scale: cut off now, and not when the scale was found
                        (a search by squared error may cut off an outlier on purpose). None where scales are dynamic
saturated_input_share   blocks of 16 activations above the calibrated amax, each input of a scale group once. None
                        where activations are not quantized
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qad.arms.arm import Arm
from qad.model.names import names_of
from qad.numerics.formats import FORMATS
from qad.numerics.grouped import ExpertInputs
from qad.numerics.nvfp4 import BLOCK_SIZE, FrozenScales, saturated_blocks, saturated_weight_blocks

UNCOUNTED: Mapping[str, float | None] = {"saturated_weight_share": None, "saturated_input_share": None}
_TOLERATED = 0.01


class Saturation:
    """Counts of one student. `shares` holds those of the last `counting` block."""

    def __init__(
        self, arm: Arm, model: nn.Module, weights: Mapping[str, Tensor], frozen: Mapping[str, FrozenScales]
    ) -> None:
        """weights: masters by name in the checkpoint."""
        self.shares: dict[str, float | None] = dict(UNCOUNTED)
        self._arm, self._model, self._weights, self._frozen = arm, model, weights, frozen
        self._saturated = self._inputs = 0
        self._warned = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the inputs of every forward pass within the block, and the weights at its end.

        Warns, once, where more than 1 % of the weight blocks outgrew their scales.
        """
        assert self._arm.selection is not None
        self._saturated = self._inputs = 0
        quantized = set(self._arm.selection.with_input_scale)
        names = names_of(self._model)
        linears = {names.module(name): module for name, module in self._model.named_modules()}
        watched = [group[0] for group in self._arm.selection.groups if group[0] in quantized and group[0] in linears]
        handles = [linears[name].register_forward_pre_hook(self._count) for name in watched]
        experts = [
            module.inputs for module in linears.values() if isinstance(getattr(module, "inputs", None), ExpertInputs)
        ]
        for inputs in experts:
            inputs.watch = functools.partial(self._count_inputs, inputs)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for inputs in experts:
                inputs.watch = None
        self.shares = {
            "saturated_weight_share": self._outgrown(),
            "saturated_input_share": self._saturated / self._inputs if self._inputs else None,
        }
        self._warn()

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module.input_scale, Tensor)
        self._add(args[0], module.input_scale, str(module.format))

    def _count_inputs(self, inputs: ExpertInputs, number: int, x: Tensor) -> None:
        scale = inputs.first if number == 1 else inputs.second
        if scale is not None:
            self._add(x, scale, inputs.format)

    def _add(self, x: Tensor, scale: Tensor, format: str) -> None:
        self._saturated += int(saturated_blocks(x, scale, FORMATS[format].largest))
        self._inputs += x.numel() // BLOCK_SIZE

    @torch.no_grad()
    def _outgrown(self) -> float | None:
        outgrown = blocks = 0
        for module, scales in self._frozen.items():
            now = saturated_weight_blocks(self._weights[f"{module}.weight"], scales)
            outgrown += int((now & ~self._cut_off_on_purpose[module]).sum())
            blocks += now.numel()
        return outgrown / blocks if blocks else None

    @functools.cached_property
    def _cut_off_on_purpose(self) -> dict[str, Tensor]:
        """Per module, the blocks that were cut off already in the weights the scales were found for, the source's."""
        return {
            module: saturated_weight_blocks(
                self._arm.source.get(f"{module}.weight").to(scales.block_scale.device), scales
            )
            for module, scales in self._frozen.items()
        }

    def _warn(self) -> None:
        share = self.shares["saturated_weight_share"]
        if share is not None and share > _TOLERATED and not self._warned:
            self._warned = True
            warnings.warn(
                f"{share:.1%} of the weight blocks outgrew their frozen scales and saturate: lower the learning rate, or "
                "take quantize.scales: dynamic",
                stacklevel=2,
            )
