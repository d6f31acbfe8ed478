"""How much of what Linears are given lies above what was calibrated: blocks of 16 inputs with a larger magnitude, which
saturate. Counted on the device, while somebody watches; a model's outputs are the same."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qad.numerics.formats import FORMATS
from qad.numerics.grouped import ExpertInputs
from qad.numerics.linear import QuantizedLinear
from qad.numerics.nvfp4 import BLOCK_SIZE, E2M1_MAX, E4M3_MAX, as_blocks

TOLERATED = 0.01  # share of blocks, above which it is warned of


def saturated_blocks(x: Tensor, input_scale: Tensor, largest: float = E2M1_MAX * E4M3_MAX) -> Tensor:
    """Number of blocks of an activation whose amax exceeds the calibrated one, int64 scalar. largest: what the calibrated
    amax is in units of input_scale."""
    limit = input_scale.float() * largest * (1 + 2.0**-22)  # makes up for what input_scale lost when it was rounded
    return (as_blocks(x.detach()).abs().amax(dim=-1).float() > limit).sum()


class InputSaturation:
    """Counts of the forward passes within the last `watching` block."""

    def __init__(self) -> None:
        self._saturated: dict[torch.device, Tensor] = {}
        self._blocks = 0
        self._aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs within the block is not counted."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    @property
    def counts(self) -> tuple[int, int]:
        """Saturated blocks, and all of them."""
        return sum(int(count) for count in self._saturated.values()), self._blocks

    @property
    def share(self) -> float | None:
        """Saturated blocks / all of them; None where no input was quantized."""
        saturated, blocks = self.counts
        return saturated / blocks if blocks else None

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Of QuantizedLinears and of layers of experts that quantize their inputs; other modules are passed over."""
        self._saturated, self._blocks = {}, 0
        handles, experts = [], []
        for module in modules:
            inputs = getattr(module, "inputs", None)
            if isinstance(inputs, ExpertInputs):
                experts.append(inputs)
                inputs.watch = functools.partial(self._experts, inputs)
            elif isinstance(module, QuantizedLinear) and module.input_scale is not None:
                handles.append(module.register_forward_pre_hook(self._linear))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for inputs in experts:
                inputs.watch = None

    def _linear(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, QuantizedLinear)
        assert module.input_scale is not None
        self._add(args[0], module.input_scale, module.format)

    def _experts(self, inputs: ExpertInputs, number: int, x: Tensor) -> None:
        scale = inputs.first if number == 1 else inputs.second
        if scale is not None:
            self._add(x, scale, inputs.format)

    def _add(self, x: Tensor, scale: Tensor, format: str) -> None:
        if self._aside:
            return
        count = saturated_blocks(x, scale, FORMATS[format].largest)
        before = self._saturated.get(count.device)
        self._saturated[count.device] = count if before is None else before + count
        self._blocks += x.numel() // BLOCK_SIZE
