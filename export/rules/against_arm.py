"""W3: the folder against the arm it was exported from. Our own export of an arm equals it to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from export.findings import Finding, error, warning
from export.folder import FLOATING, Folder
from qad.arm import Arm, open_arm, quantize_group
from qad.fusion import scale_groups
from qad.nvfp4 import QuantizedTensor, dequantize

# Gaussian weights have .094-.096 under max calibration.
_RELATIVE_ERROR = 0.15
_LEAVES = ("weight", "weight_scale", "weight_scale_2")


def against_arm(folder: Folder, source: Path) -> Iterator[Finding]:
    """Decoded weights and unquantized tensors against the arm's own. Assumes a folder without errors. Raises ArtifactError
    where `source` is no finished arm."""
    arm = open_arm(source)
    known = {*arm.source.tensors}
    lost = [module for module in folder.packed if f"{module}.weight" not in known]
    for module in lost:
        yield error("W3", module, f"is not in the arm {arm.name}", f"give the arm it was exported from, not {source}")
    other: list[str] = []
    for group in scale_groups(module for module in folder.packed if module not in lost):
        yield from _group(folder, arm, group, other)
    if other:
        yield warning("W3", other[0], f"is quantized differently from what {arm.name} exports ({len(other)} modules): another "
                      "arm's export, or another tool's rules", f"compare with an export of {source}")  # fmt: skip
    for name, (_, entry) in folder.tensors.items():
        if entry.dtype in FLOATING and name in known and name.rpartition(".")[0] not in folder.packed:
            stored, own = folder.get(name).to(torch.bfloat16), arm.weight(name).to(torch.bfloat16)
            if stored.shape != own.shape or not torch.equal(_bits(stored), _bits(own)):
                yield error(
                    "W3",
                    name.rpartition(".")[0],
                    f"{name} is not {arm.name}'s, rounded to BF16",
                    f"export {source} again",
                )


def _group(folder: Folder, arm: Arm, group: tuple[str, ...], other: list[str]) -> Iterator[Finding]:
    weights = {module: arm.weight(f"{module}.weight") for module in group}
    expected = quantize_group(weights, arm.frozen_scales(group))
    for module, weight in weights.items():
        stored = QuantizedTensor(*(folder.get(f"{module}.{leaf}") for leaf in _LEAVES))
        if stored.shape != weight.shape:
            yield error("W3", module, f"holds {list(stored.shape)} weights, {arm.name} has {list(weight.shape)}",
                        f"export {arm.folder} again")  # fmt: skip
            continue
        own = expected[module]
        same = all(
            torch.equal(_bits(ours), _bits(theirs))
            for ours, theirs in (
                (own.packed, stored.packed),
                (own.block_scale, stored.block_scale),
                (own.global_scale, stored.global_scale),
            )
        )
        ratio = _relative_error(dequantize(stored), weight)
        if not ratio <= _RELATIVE_ERROR:
            told = f"decoded weights differ from {arm.name}'s by {ratio:.3f} of their norm, expected about 0.095"
            if same:
                yield warning("W3", module, told + ", as its own quantization does", "keep this module in BF16")
            else:
                yield error("W3", module, told, f"export {arm.folder} again")
        elif not same:
            other.append(module)


def _relative_error(decoded: Tensor, weight: Tensor) -> float:
    """||decoded - w|| / ||w||; 0 where both are zero."""
    difference, norm = (decoded - weight.float()).norm(), weight.float().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
