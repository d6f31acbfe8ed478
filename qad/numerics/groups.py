"""Scale groups: what shares a global scale, quantized (`quantize_group`) or decoded again (`fake_quantize_group`).

The trainer's forward and the exporter go through these two, so the student that was trained is the one that is deployed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from qad.errors import SourceError
from qad.numerics import nvfp4
from qad.numerics.finite import amax
from qad.numerics.formats import FORMATS, NVFP4, Quantized

_NONE_FROZEN: Mapping[str, nvfp4.FrozenScales] = MappingProxyType({})
_FP32_TINY = torch.finfo(torch.float32).tiny


def _group_amax(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack([amax(weight) for weight in weights]).amax()


def is_degenerate(amax: Tensor | float, largest: float) -> bool:
    """True where amax / largest, the global scale, is no normal FP32 number although the group is not all zero."""
    amax = torch.as_tensor(amax, dtype=torch.float32)
    return bool((amax > 0) & (amax / largest < _FP32_TINY))


def fake_quantize_group(
    weights: Mapping[str, Tensor],
    frozen: Mapping[str, nvfp4.FrozenScales] = _NONE_FROZEN,
    format: str = NVFP4,
    out: Mapping[str, Tensor] = MappingProxyType({}),
    largest: Tensor | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """What `quantize_group` would store, decoded, one member at a time: (module name, weight), in the weights' dtype or
    written to `out`, by module name. largest: magnitude of the members without frozen scales, FP32, where `weights` are rows of
    them only; None: found here."""
    rule = FORMATS[format].numerics()
    shared = _shared_scale(weights, frozen, format) if largest is None else rule.global_scale_from_amax(largest)
    for name, weight in weights.items():
        found = frozen.get(name)
        if found is None:
            yield name, rule.fake_quantize(weight, shared, out=out.get(name))
        elif found.decided is not None:
            value = found.decided.dequantize(weight.dtype)
            yield name, out[name].copy_(value) if name in out else value
        else:
            yield name, nvfp4.fake_quantize(weight, found.global_scale, found.block_scale, out.get(name))


def quantize_group(
    weights: Mapping[str, Tensor], frozen: Mapping[str, nvfp4.FrozenScales] = _NONE_FROZEN, format: str = NVFP4
) -> dict[str, Quantized]:
    """Quantize the members of one scale group to a format, those in `frozen` with their frozen scales.

    Raises SourceError naming module and index for NaN or Inf; warns where the group's values are too small for a normal
    scale, so that all of them become zero, and where more than 1 % of the blocks outgrew their frozen scales.
    """
    rule, quantized = FORMATS[format].numerics(), {}
    shared = _shared_scale(weights, frozen, format, warn=True)
    for name, weight in weights.items():
        found = frozen.get(name)
        try:
            if found is None:
                quantized[name] = rule.quantize(weight, shared)
            else:
                quantized[name] = found.decided or nvfp4.quantize(weight, found.global_scale, found.block_scale)
        except ValueError as error:
            raise SourceError(f"{name}.weight cannot be quantized: {error}") from error
    rounded = (name for name in weights if name in frozen and frozen[name].decided is None)
    _warn_of_saturation({name: weights[name] for name in rounded}, frozen)
    return quantized


def _shared_scale(
    weights: Mapping[str, Tensor], frozen: Mapping[str, nvfp4.FrozenScales], format: str, warn: bool = False
) -> Tensor | None:
    """The global scale of the members without frozen scales; None where there are none."""
    loose = {name: weight for name, weight in weights.items() if name not in frozen}
    assert FORMATS[format].nvfp4_weights or len(loose) == len(weights)
    if not loose:
        return None
    largest, units = _group_amax(loose.values()), FORMATS[format].largest
    if warn and is_degenerate(largest, units):
        told = f"values below {units * _FP32_TINY:.1e} have no normal scale and become zero"
        warnings.warn(f"{', '.join(loose)}: {told}", stacklevel=3)
    return FORMATS[format].numerics().global_scale_from_amax(largest)


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
