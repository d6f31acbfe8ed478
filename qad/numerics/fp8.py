"""FP8 numerics: E4M3 with one FP32 scale per tensor, for weights and for the inputs of a Linear.

    weight   scale = amax / 448, shared by a scale group         value = E4M3_RNE(BF16_RNE(w / scale))
    input    scale = headroom * calibrated amax / 448, frozen    value = E4M3_RNE(clamp(x * (1 / scale), -448, 448))

Weights follow ModelOpt's export of a BF16 model, where the quotient is a BF16 number before it becomes an E4M3 one; it is
one here whatever the weight's dtype, so that an FP32 master equal to a BF16 weight has its bytes. Inputs follow vLLM
(QuantFP8, static per tensor). Rounding is to nearest, ties to even; a negative value that rounds to zero is -0.0 (byte
0x80). Everything above 448 saturates, so no stored byte is NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qad.numerics.compiled import compiled
from qad.numerics.nvfp4 import E4M3_MAX, round_to_e4m3

_FP32_TINY = torch.finfo(torch.float32).tiny
_ELEMENTS = 1 << 20  # quantized at a time, some 25 MB of FP32 intermediates


@dataclasses.dataclass(frozen=True)
class Fp8Tensor:
    """A weight in FP8.

    values  float8_e4m3fn  [..., K]
    scale   float32        []         decode scale
    """

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., K]."""
        return self.values.shape

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """As they are stored: values, scale."""
        return self.values, self.scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`dequantize` of this module."""
        return dequantize(self, dtype)


def from_tensors(*tensors: Tensor) -> Fp8Tensor:
    """Of a stored module: values, scale."""
    return Fp8Tensor(*tensors)


def global_scale_from_amax(amax: Tensor | float) -> Tensor:
    """FP32 decode scale: amax / 448. An amax of zero, or so small that the scale would be subnormal, counts as 1.0; NaN and
    Inf pass through and are refused by `quantize`."""
    scale = torch.as_tensor(amax, dtype=torch.float32) / E4M3_MAX
    return torch.where(scale < _FP32_TINY, torch.full_like(scale, 1.0) / E4M3_MAX, scale)


def _round_to_bf16(value: Tensor) -> Tensor:
    """FP32 -> the nearest BF16 value as FP32, ties to even. Arithmetic, because a compiler may drop a cast and its inverse.
    Finite values only; NaN stays NaN."""
    bits = value.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(value == value, rounded, value)


def _round(value: Tensor) -> Tensor:
    """FP32 -> the nearest E4M3 value as FP32, saturated at 448; the sign stays, also of zero."""
    return torch.copysign(round_to_e4m3(value.abs().clamp(max=E4M3_MAX)), value)


def _weight_values(weight: Tensor, scale: Tensor) -> Tensor:
    return _round(_round_to_bf16(weight.float() / scale))


def _fake_quantize(weight: Tensor, scale: Tensor) -> Tensor:
    return (_weight_values(weight, scale) * scale).to(weight.dtype)


def fake_quantize_activation_values(x: Tensor, input_scale: Tensor) -> Tensor:
    """`fake_quantize_activation` without a gradient: the kernel itself, to be compiled. The scale is an FP32 scalar on x's
    device."""
    return (_round(x.float() * (1.0 / input_scale)) * input_scale).to(x.dtype)


def quantize(weight: Tensor, global_scale: Tensor | None = None) -> Fp8Tensor:
    """Quantize a weight [N, K] (BF16, FP16 or FP32).

    `global_scale`: FP32 scalar shared by the weight's scale group; None: the weight is a group of its own. Raises ValueError for
    NaN or Inf, naming the first bad index.
    """
    amax = weight.abs().amax().float()
    if not torch.isfinite(amax):
        index = tuple(int(i) for i in (~torch.isfinite(weight)).nonzero()[0])
        raise ValueError(f"weight holds {weight[index].item()} at index {index}: it cannot be scaled to FP8.")
    scale = global_scale_from_amax(amax) if global_scale is None else global_scale.detach().reshape(())
    scale = scale.to(weight.device, torch.float32)
    rows = weight.split(max(1, _ELEMENTS // max(1, weight.shape[-1])))
    values = [compiled(_weight_values, weight)(part, scale).to(torch.float8_e4m3fn) for part in rows]
    return Fp8Tensor(torch.cat(values), scale)


def dequantize(q: Fp8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a quantized tensor, [..., K]: value * scale in FP32, then cast to `dtype`."""
    return (q.values.float() * q.scale).to(dtype)


def fake_quantize(weight: Tensor, global_scale: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """dequantize(quantize(weight, global_scale)) in one pass, in the weight's dtype, with a straight-through gradient. NaN
    stays NaN. `out`: gets the values and is returned; no gradient passes."""
    if global_scale is None:
        global_scale = global_scale_from_amax(weight.detach().abs().amax().float())
    scale = global_scale.detach().reshape(()).to(weight.device, torch.float32)
    if out is not None:
        return out.detach().copy_(compiled(_fake_quantize, weight)(weight.detach(), scale))
    return _StraightThrough.apply(weight, _fake_quantize, scale)


def fake_quantize_activation(x: Tensor, input_scale: Tensor) -> Tensor:
    """What an engine's FP8 GEMM sees of its input [..., K]: quantized and decoded, in the input's dtype.

    `input_scale`: FP32 scalar, calibrated amax / 448, frozen; what exceeds it saturates. Straight-through gradient.
    Source: vLLM 0.32, QuantFP8.forward_native.
    """
    scale = input_scale.detach().reshape(()).to(x.device, torch.float32)
    return _StraightThrough.apply(x, fake_quantize_activation_values, scale)


class _StraightThrough(torch.autograd.Function):
    """y = kernel(x, scale), dy/dx = 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Any, scale: Tensor) -> Tensor:
        return compiled(kernel, x)(x.detach(), scale)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return grad_outputs[0], None, None
