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

import torch
from torch import Tensor, nn

from qad.arms.arm import Arm
from qad.model.names import names_of
from qad.numerics.grouped import ExpertInputs
from qad.numerics.input_saturation import TOLERATED, InputSaturation
from qad.numerics.nvfp4 import FrozenScales, saturated_weight_blocks
from qad.training.ranks.group import here
from qad.training.ranks.shards import Part

UNCOUNTED: Mapping[str, float | None] = {"saturated_weight_share": None, "saturated_input_share": None}
_REMEDIES = {
    "saturated_weight_share": "weight blocks outgrew their frozen scales and saturate: lower the learning rate, or take "
    "quantize.scales: dynamic",
    "saturated_input_share": "blocks of inputs lie above what was calibrated and saturate: calibrate on text like this, and on "
    "more of it",
}


class Saturation:
    """Counts of one student; `own` are its masters, or this rank's rows of them, by name in the checkpoint.

    `shares` holds the counts of the last `counting` block.
    """

    def __init__(self, arm: Arm, model: nn.Module, own: Mapping[str, Part], frozen: Mapping[str, FrozenScales]) -> None:
        self.shares: dict[str, float | None] = dict(UNCOUNTED)
        self._arm, self._model, self._own, self._frozen = arm, model, own, frozen
        self._inputs = InputSaturation()
        self.aside = self._inputs.aside  # around what is not to be counted
        self._warned: set[str] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the inputs of every forward pass within the block, and the weights at its end.

        Warns, once of each, where more than 1 % of the weight blocks outgrew their scales, or of the inputs what was calibrated.
        """
        assert self._arm.selection is not None
        names = names_of(self._model)
        linears = {names.module(name): module for name, module in self._model.named_modules()}
        heads = {group[0] for group in self._arm.selection.groups}
        experts = [module for module in linears.values() if isinstance(getattr(module, "inputs", None), ExpertInputs)]
        with self._inputs.watching([*(linears[name] for name in heads & linears.keys()), *experts]):
            yield
        self.shares = {"saturated_weight_share": self._outgrown(), "saturated_input_share": _share(self._inputs.counts)}
        self._warn()

    @torch.no_grad()
    def _outgrown(self) -> float | None:
        outgrown = blocks = 0
        for module, scales in self._frozen.items():
            now = saturated_weight_blocks(self._own[f"{module}.weight"].view, scales)
            outgrown += int((now & ~self._cut_off_on_purpose[module]).sum())
            blocks += now.numel()
        return _share((outgrown, blocks))

    @functools.cached_property
    def _cut_off_on_purpose(self) -> dict[str, Tensor]:
        """Per module, the blocks that were cut off already in the weights the scales were found for: the source's, or where codes
        were decided with the scales those that training starts from."""
        found_for = self._arm.start if self._arm.decides_codes else self._arm.source.get
        found = {}
        for module, scales in self._frozen.items():
            name = f"{module}.weight"
            found[module] = saturated_weight_blocks(found_for(name)[self._own[name].rows].to(scales.block_scale.device), scales)
        return found

    def _warn(self) -> None:
        for name, remedy in _REMEDIES.items():
            share = self.shares[name]
            if share is not None and share > TOLERATED and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"{share:.1%} of the {remedy}", stacklevel=2)


def _share(counts: tuple[int, int]) -> float | None:
    """Of all ranks' counts (some, all); None where there is nothing to count."""
    some, every = here().add(*counts)
    return some / every if every else None
