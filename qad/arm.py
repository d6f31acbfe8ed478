"""An arm: one way to treat the source model. BF16, PTQ and QAD are the same kind of folder, so nothing downstream
branches on where a checkpoint came from.

    arm.json             name, source (path, digest, display name), compute dtype
    selection.json       what is quantized and why the rest is not; absent for BF16
    scales.safetensors   MODULE.input_scale, FP32 scalars, one per quantized module (W4A4 only)
    weights.safetensors  FP32 masters by hub name; absent where the weights are the source's own

An arm overlays the source: a tensor it holds replaces the source's, everything else is the source's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qad import nvfp4
from qad.artifact import open_artifact
from qad.errors import ArtifactError, SourceError
from qad.selection import Selection
from qad.source import Checkpoint, open_checkpoint

KIND = "arm"
_ROWS_ELEMENTS = 1 << 22  # weights quantized at a time, some 100 MB of FP32 intermediates


@dataclasses.dataclass(frozen=True)
class Arm:
    """A finished arm folder, opened. `selection` is None for BF16."""

    folder: Path
    name: str
    source: Checkpoint
    selection: Selection | None
    input_scales: dict[str, Tensor]
    facts: dict[str, Any]

    def weight(self, name: str) -> Tensor:
        """A parameter by hub name: the FP32 master where the arm trained it, else the source's tensor."""
        if name in self._overlay:
            with safe_open(self.folder / "weights.safetensors", framework="pt") as file:
                return file.get_tensor(name)
        return self.source.get(name)

    @functools.cached_property
    def _overlay(self) -> dict[str, tuple[int, ...]]:
        path = self.folder / "weights.safetensors"
        if not path.is_file():
            return {}
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the weights the arm holds itself; empty for PTQ."""
        return dict(self._overlay)

    @property
    def trained(self) -> bool:
        """True where the arm holds weights of its own."""
        return bool(self._overlay)

    def quantized(self) -> Iterator[dict[str, nvfp4.QuantizedTensor]]:
        """The quantized form, one scale group at a time: module name -> tensor."""
        if self.selection is None:
            return
        for group in self.selection.groups:
            yield quantize_group({name: self.weight(f"{name}.weight") for name in group})


def group_global_scale(weights: dict[str, Tensor]) -> Tensor:
    """FP32 decode scale shared by a scale group: a pure function of its weights. The trainer's forward and
    `quantize_group` derive it alike, so the student that was trained is the one that is deployed."""
    return nvfp4.global_scale_from_amax(_group_amax(weights))


def _group_amax(weights: dict[str, Tensor]) -> Tensor:
    return torch.stack([weight.detach().abs().amax().float() for weight in weights.values()]).amax()


def quantize_group(weights: dict[str, Tensor]) -> dict[str, nvfp4.QuantizedTensor]:
    """Quantize the members of one scale group. Raises SourceError naming module and index for NaN or Inf; warns where
    the group's values are too small for a normal scale, so that all of them become zero."""
    amax = _group_amax(weights)
    scale = nvfp4.global_scale_from_amax(amax)
    if nvfp4.is_degenerate(amax):
        warnings.warn(f"{', '.join(weights)}: values below 3.2e-35 have no normal scale and become zero", stacklevel=2)
    quantized = {}
    for name, weight in weights.items():
        try:
            quantized[name] = _quantize_rows(weight, scale)
        except ValueError as error:
            raise SourceError(f"{name}.weight cannot be quantized: {error}") from error
    return quantized


def _quantize_rows(weight: Tensor, scale: Tensor) -> nvfp4.QuantizedTensor:
    """Blocks do not see each other, so rows are taken a few at a time: a tenth of the memory, and faster."""
    rows = max(1, _ROWS_ELEMENTS // max(1, weight.shape[-1]))
    if weight.dim() != 2 or weight.shape[0] <= rows or not torch.isfinite(scale):
        return nvfp4.quantize(weight, scale)  # NaN or Inf: refused there, with its index in the whole weight
    parts = [nvfp4.quantize(part, scale) for part in weight.split(rows)]
    packed, block_scale = (torch.cat([getattr(part, field) for part in parts]) for field in ("packed", "block_scale"))
    return nvfp4.QuantizedTensor(packed, block_scale, scale)


def write_arm(
    folder: Path,
    name: str,
    source: Checkpoint,
    selection: Selection | None,
    input_scales: dict[str, Tensor],
    weights: dict[str, Tensor] | None = None,
    **facts: Any,
) -> None:
    """Fill a stage folder with an arm. `weights`: FP32 masters by hub name, None where the source's own serve."""
    described = {"path": str(source.folder), "digest": source.digest, "name": source.display_name}
    (folder / "arm.json").write_text(json.dumps({"name": name, "source": described, **facts}, indent=1) + "\n")
    if selection is not None:
        (folder / "selection.json").write_text(json.dumps(selection.to_json(), indent=1) + "\n")
    if input_scales:
        scales = {f"{module}.input_scale": scale.reshape(()).clone() for module, scale in input_scales.items()}
        save_file(scales, folder / "scales.safetensors", metadata={"format": "pt"})
    if weights is not None:
        contiguous = {key: weight.detach().contiguous() for key, weight in weights.items()}
        save_file(contiguous, folder / "weights.safetensors", metadata={"format": "pt"})


def open_arm(folder: Path) -> Arm:
    """Raises ArtifactError where the folder is no finished arm or its source has changed since."""
    open_artifact(folder, KIND)
    facts = json.loads((folder / "arm.json").read_text(encoding="utf-8"))
    source = open_checkpoint(facts["source"]["path"])
    if source.digest != facts["source"]["digest"]:
        raise ArtifactError(f"{source.folder} has changed since {folder} was made from it: make the arm again")
    selection_path, scales_path = folder / "selection.json", folder / "scales.safetensors"
    selection = Selection.from_json(json.loads(selection_path.read_text())) if selection_path.is_file() else None
    scales = load_file(scales_path) if scales_path.is_file() else {}
    input_scales = {name.removesuffix(".input_scale"): scale for name, scale in scales.items()}
    return Arm(folder, facts["name"], source, selection, input_scales, facts)
