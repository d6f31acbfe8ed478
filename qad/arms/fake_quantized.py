"""`qad import` of unquantized weights that another tool distilled with fake quantization: they become the masters of an arm.

ModelOpt keeps its calibration beside the weights: `MODULE.input_quantizer._amax` and `MODULE.weight_quantizer._amax`, one number
each, in the same safetensors files. From these follow, as its export makes them, input scale and global scale: the largest of a
scale group / (6 * 448). The weights' block scales are then those of the masters under that global scale, frozen. (What
lies in modelopt_state.pth is a pickle, which is never read.)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from qad.arms.arm import DYNAMIC, KIND, Arm, write_arm
from qad.arms.kv_cache import OFF
from qad.arms.origin import origin_of
from qad.arms.selection import Selection, given_selection
from qad.artifact import Artifact, run_stage
from qad.errors import SourceError, UsageError
from qad.model.loader import load_skeleton
from qad.model.source import Checkpoint, open_checkpoint
from qad.numerics import nvfp4
from qad.numerics.formats import NVFP4, W4A16_NVFP4

_INPUT, _WEIGHT = ".input_quantizer._amax", ".weight_quantizer._amax"
_FLOATING = ("BF16", "F16", "F32")
SCALES = "modelopt_amax"  # arm.json's word for block scales under a global scale that was calibrated before training


def arm_of_weights(
    folder: Path,
    source: str,
    name: str,
    out: Path,
    calibrate: Callable[[Path], Arm] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Artifact:
    """Write the arm `name` to `out`: the folder's weights over `source`, its BF16 original.

    calibrate: makes a PTQ arm of the folder's own weights in a folder that it is given; None takes the scales that lie in the
    folder, all modules with a quantizer taken for NVFP4 (W4A16_NVFP4 where its input has none). settings: what decides of
    calibration.
    Raises UsageError where there are no scales and nothing calibrates, or the weights are not those of `source`'s architecture,
    SourceError for a scale that no engine can use.
    """
    weights, original = open_checkpoint(folder), open_checkpoint(source)
    amax = {n: weights.get(n).float().reshape(()) for n in weights.tensors if n.endswith((_INPUT, _WEIGHT)) and not calibrate}
    if not amax and calibrate is None:
        raise UsageError(
            f"{folder} has no scales beside its weights (*{_INPUT}; modelopt_state.pth is a pickle, which is not read): give "
            "--recipe, whose sections quantize and calibrate are then used on these weights"
        )
    changed = _changed(weights, original)

    def work(partial: Path) -> None:
        masters = {tensor: weights.get(tensor) for tensor in changed}
        if calibrate is None:
            selection = _selection(original, amax)
            inputs, frozen = _scales(weights, selection, amax)
            write_arm(partial, name, original, selection, inputs, masters, scales=SCALES, frozen=frozen, imported={})
            return
        arm = calibrate(partial / "calibrated")
        assert arm.selection is not None
        frozen = {m: scales.to_nearest for group in arm.selection.groups for m, scales in arm.frozen_scales(group).items()}
        facts = {key: arm.facts[key] for key in ("kv_cache", "kv_format", "tokens", "text") if key in arm.facts}
        scales = arm.scales if frozen else DYNAMIC
        write_arm(
            partial,
            name,
            original,
            arm.selection,
            arm.input_scales,
            masters,
            scales=scales,
            frozen=frozen,
            kv_scales=arm.kv_scales,
            imported={},
            **{"kv_cache": OFF, **facts},
        )
        shutil.rmtree(partial / "calibrated")

    config = {"arm": name, "imported": "weights", **(settings or {})}
    inputs = {"source": original.digest, "folder": weights.digest}
    return run_stage(KIND, out, config, inputs, work, origin={**origin_of(folder), "source": original.digest})


def _changed(weights: Checkpoint, original: Checkpoint) -> list[str]:
    """Names of the tensors that differ from the original's."""
    quantizers = tuple(f".{kind}_quantizer." for kind in ("input", "weight", "output", "q_bmm", "k_bmm", "v_bmm"))
    held = [name for name in weights.tensors if not any(part in name for part in quantizers)]
    tied = {original.head} if original.tied_embeddings else set()
    odd = next((n for n in held if n not in tied and _shape(original, n) != weights.tensors[n].shape), None)
    odd = odd or next((n for n in original.tensors if n not in tied and n not in weights.tensors), None)
    if odd is not None:
        raise UsageError(
            f"{odd} is {_shape(weights, odd)} in {weights.folder}, {_shape(original, odd)} in {original.folder}: give the "
            "original the weights were distilled from, and weights under its names"
        )
    changed = []
    for name in held:
        if name in tied or weights.tensors[name].dtype not in _FLOATING:
            continue
        ours, theirs = weights.get(name), original.get(name)
        if not torch.equal(ours.float(), theirs.float()):
            changed.append(name)
    if not changed:
        raise UsageError(
            f"{weights.folder} holds the weights of {original.folder}: nothing was trained; make a PTQ arm (qad ptq)"
        )
    return changed


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...] | None:
    info = checkpoint.tensors.get(name)
    return info.shape if info else None


def _selection(original: Checkpoint, amax: Mapping[str, Tensor]) -> Selection:
    odd = next((name for name, value in amax.items() if not (value.numel() == 1 and torch.isfinite(value) and value >= 0)), None)
    if odd is not None:
        raise SourceError(f"{odd} is no amax of a tensor: give --recipe, so that scales are calibrated anew")
    modules = [name.removesuffix(_WEIGHT) for name in amax if name.endswith(_WEIGHT)]
    formats = {module: NVFP4 if f"{module}{_INPUT}" in amax else W4A16_NVFP4 for module in modules}
    if not formats:
        raise UsageError(f"no weight has a quantizer (*{_WEIGHT}): give --recipe, so that scales are calibrated anew")
    return given_selection(load_skeleton(original), formats, "no quantizer in the folder")


def _scales(
    weights: Checkpoint, selection: Selection, amax: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, nvfp4.FrozenScales]]:
    """Input scales, and the weights' frozen ones, by module."""
    inputs: dict[str, Tensor] = {}
    quantized = {*selection.with_input_scale}
    for group in selection.input_groups:
        members = [module for module in group if module in quantized]
        if members:
            largest = torch.stack([amax[f"{module}{_INPUT}"] for module in members]).amax()
            inputs.update(dict.fromkeys(members, nvfp4.global_scale_from_amax(largest)))
    frozen = {}
    for group in selection.groups:
        shared = nvfp4.global_scale_from_amax(torch.stack([amax[f"{module}{_WEIGHT}"] for module in group]).amax())
        for module in group:
            block_scale = nvfp4.quantize(weights.get(f"{module}.weight"), shared).block_scale
            frozen[module] = nvfp4.FrozenScales(block_scale, shared)
    return inputs, frozen
