"""Scale groups: what shares a global scale, quantized (`quantize_group`) or decoded again (`fake_quantize_group`).

The trainer's forward and the exporter go through these two, so the student that was trained is the one that is deployed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from qad.errors import SourceError
from qad.numerics import fp8, nvfp4
from qad.numerics.finite import amax
from qad.numerics.formats import FP8, NVFP4

Quantized = nvfp4.QuantizedTensor | fp8.Fp8Tensor


_NONE_FROZEN: Mapping[str, nvfp4.FrozenScales] = MappingProxyType({})


def group_global_scale(weights: Mapping[str, Tensor], format: str = NVFP4) -> Tensor:
    """FP32 decode scale shared by a scale group: a pure function of its weights. The trainer's forward and
    `quantize_group` derive it alike, so the student that was trained is the one that is deployed."""
    largest = _group_amax(weights.values())
    return fp8.scale_from_amax(largest) if format == FP8 else nvfp4.global_scale_from_amax(largest)


def _group_amax(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack([amax(weight) for weight in weights]).amax()


def _group_scales(
    weights: Mapping[str, Tensor], frozen: Mapping[str, nvfp4.FrozenScales]
) -> tuple[dict[str, tuple[Tensor, Tensor | None]], Tensor | None]:
    """Module name -> (global scale, frozen block scales or None): the one place that decides between the two kinds. And
    the largest magnitude of those without frozen scales, None where there are none."""
    scales: dict[str, tuple[Tensor, Tensor | None]]
    scales = {name: (found.global_scale, found.block_scale) for name, found in frozen.items() if name in weights}
    loose = {name: weight for name, weight in weights.items() if name not in frozen}
    if not loose:
        return scales, None
    largest = _group_amax(loose.values())
    scales |= dict.fromkeys(loose, (nvfp4.global_scale_from_amax(largest), None))
    return {name: scales[name] for name in weights}, largest


def fake_quantize_group(
    weights: Mapping[str, Tensor],
    frozen: Mapping[str, nvfp4.FrozenScales] = _NONE_FROZEN,
    format: str = NVFP4,
    out: Mapping[str, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """What `quantize_group` would store, decoded, one member at a time: (module name, weight), in the weights' dtype or
    written to `out`, by module name."""
    if format == FP8:
        shared = group_global_scale(weights, FP8)
        for name, weight in weights.items():
            decoded = fp8.fake_quantize(weight, shared)
            yield name, out[name].copy_(decoded) if name in out else decoded
        return
    for name, scales in _group_scales(weights, frozen)[0].items():
        yield name, nvfp4.fake_quantize(weights[name], *scales, out=out.get(name))


def quantize_group(
    weights: Mapping[str, Tensor],
    frozen: Mapping[str, nvfp4.FrozenScales] = _NONE_FROZEN,
    format: str = NVFP4,
) -> dict[str, Quantized]:
    """Quantize the members of one scale group to a format, those in `frozen` with their frozen scales.

    Raises SourceError naming module and index for NaN or Inf; warns where the group's values are too small for a normal
    scale, so that all of them become zero, and where more than 1 % of the blocks outgrew their frozen scales.
    """
    quantized: dict[str, Quantized] = {}
    if format == FP8:
        shared = group_global_scale(weights, FP8)
    else:
        scales, largest = _group_scales(weights, frozen)
        if largest is not None and nvfp4.is_degenerate(largest):
            loose = ", ".join(name for name in weights if name not in frozen)
            warnings.warn(f"{loose}: values below 3.2e-35 have no normal scale and become zero", stacklevel=2)
    for name, weight in weights.items():
        try:
            quantized[name] = fp8.quantize(weight, shared) if format == FP8 else nvfp4.quantize(weight, *scales[name])
        except ValueError as error:
            raise SourceError(f"{name}.weight cannot be quantized: {error}") from error
    _warn_of_saturation({name: weight for name, weight in weights.items() if name in frozen}, frozen)
    return quantized


def _warn_of_saturation(weights: Mapping[str, Tensor], frozen: Mapping[str, nvfp4.FrozenScales]) -> None:
    """A search by squared error cuts off fewer than 1 % of the blocks on purpose (.2 % of a language model's)."""
    masks = [nvfp4.saturated_weight_blocks(weight, frozen[name]) for name, weight in weights.items()]
    saturated, blocks = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
    if saturated > 0.01 * blocks:
        warnings.warn(
            f"{', '.join(weights)}: {saturated} of {blocks} blocks exceed their frozen scales and saturate: a "
            "search cuts off fewer than 1 % on purpose; trained weights that moved too far lose more",
            stacklevel=3,
        )


def fake_quantize_stack(weight_ENK: Tensor, frozen: Sequence[nvfp4.FrozenScales], out_ENK: Tensor) -> None:
    """`fake_quantize_group` of every weight of a stack of 4-bit groups at once, written to `out_ENK`.

    weight_ENK: one scale group a first index, such as gate and up of one expert below each other.
    frozen: of each group; empty where scales are dynamic.
    """
    if frozen:
        global_scale_E = torch.stack([scales.global_scale.reshape(()) for scales in frozen])
        nvfp4.fake_quantize_stack(weight_ENK, global_scale_E, torch.stack([s.block_scale for s in frozen]), out_ENK)
        return
    flat = weight_ENK.detach().flatten(1)
    global_scale_E = nvfp4.global_scale_from_amax(torch.maximum(flat.amax(1), -flat.amin(1)).float())  # no copy of |w|
    nvfp4.fake_quantize_stack(weight_ENK, global_scale_E, None, out_ENK)
