"""Calibration: how large the inputs of the selected Linears get, in the unquantized model.

input_scale = headroom * amax / (6 * 448)      FP32, frozen from here on, one value per scale group
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qad import nvfp4
from qad.errors import SourceError
from qad.packing import Windows
from qad.selection import Selection


class AmaxObserver:
    """Largest |input| of each named Linear, FP32, over everything the model is fed inside the `with` block.

    counted_BT: bool [B, T], which tokens of the next forward pass are real; None where all are."""

    def __init__(self, model: nn.Module, modules: list[str]) -> None:
        self.amax: dict[str, Tensor] = {}
        self.counted_BT: Tensor | None = None
        self._model, self._modules = model, modules
        self._handles: list[Any] = []

    def __enter__(self) -> AmaxObserver:
        for name in self._modules:
            hook = self._hook(name)
            self._handles.append(self._model.get_submodule(name).register_forward_pre_hook(hook))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def observe(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs = args[0].detach()
            if self.counted_BT is not None:
                inputs = inputs[self.counted_BT]
            amax = inputs.abs().amax().float()
            seen = self.amax.get(name)
            self.amax[name] = amax if seen is None else torch.maximum(seen, amax)

        return observe


@torch.no_grad()
def calibrate(
    model: Any,
    selection: Selection,
    windows: Windows,
    headroom: float = 1.0,
    progress: Callable[[int], object] = lambda tokens: None,
    batch_size: int = 8,
) -> dict[str, Tensor]:
    """Input scales of every selected module, equal within a scale group; empty for weight-only formats.

    Packed windows hold no padding; where a caller adds some it is not observed. A module that sees only zeros gets the
    scale of amax 1.0. Raises SourceError for activations that are not finite, and for a selected module that the forward
    pass never reached.
    """
    if not selection.quantizes_activations:
        return {}
    device = next(model.parameters()).device
    with AmaxObserver(model, list(selection.modules)) as observer:
        tensors = (windows.input_ids_ST, windows.position_ids_ST, windows.counted_ST)
        for ids, positions, counted in zip(*(tensor.split(batch_size) for tensor in tensors), strict=True):
            observer.counted_BT = None if counted.all() else counted.to(device)
            model.base_model(ids.to(device), position_ids=positions.to(device), use_cache=False)
            progress(ids.numel())
    return group_input_scales(observer.amax, selection, headroom)


def group_input_scales(amax: dict[str, Tensor], selection: Selection, headroom: float) -> dict[str, Tensor]:
    """One input scale per scale group, from the amax of its members."""
    scales: dict[str, Tensor] = {}
    for group in selection.groups:
        unseen = [name for name in group if name not in amax]
        if unseen:
            raise SourceError(f"calibration never reached {unseen[0]}: exclude it, or give text that does")
        largest = torch.stack([amax[name] for name in group]).amax()
        if not torch.isfinite(largest):
            raise SourceError(f"the input of {group[0]} is {largest.item()} in the BF16 model: the source is damaged")
        scale = nvfp4.global_scale_from_amax(largest * headroom).cpu()
        scales.update(dict.fromkeys(group, scale))
    return scales
