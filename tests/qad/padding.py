"""Padding as the trainer meets it: a document of its own at either side, which counts nowhere."""

from __future__ import annotations

import torch
from torch import Tensor

from qad.text.windows import NO_LABEL, Windows


def padded(windows: Windows, left: int, right: int, pad_id: int) -> Windows:
    """The same windows with `left` and `right` padding tokens at their sides, whose positions restart."""

    def around(tensor_ST: Tensor, before_T: Tensor, after_T: Tensor) -> Tensor:
        sides = [side.to(tensor_ST.dtype).expand(len(windows), -1) for side in (before_T, after_T)]
        return torch.cat([sides[0], tensor_ST, sides[1]], dim=1)

    def constant(value: int) -> tuple[Tensor, Tensor]:
        return torch.full((left,), value), torch.full((right,), value)

    return Windows(
        around(windows.input_ids_ST, *constant(pad_id)),
        around(windows.position_ids_ST, torch.arange(left), torch.arange(right)),
        around(windows.counted_ST, *constant(0)),
        around(windows.labels_ST, *constant(NO_LABEL)),
    )
