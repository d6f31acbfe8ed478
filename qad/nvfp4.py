"""NVFP4 numerics: the one definition used by calibration, training, export, checking and emulated serving.

The format (OCP MX style, NVIDIA variant)
    element       E2M1: 1 sign, 2 exponent, 1 mantissa bit. Magnitudes 0 .5 1 1.5 2 3 4 6,
                  code = sign << 3 | index. No Inf, no NaN; everything above 5 saturates at 6.
    block         16 consecutive elements along the last dimension share one E4M3FN scale
                  (largest value 448, smallest positive value 2**-9).
    global_scale  one FP32 per tensor, or per group of tensors that an engine fuses. Always the
                  *decode* scale: value = element * (block_scale * global_scale).

Two rules, because two parties quantize
    Weights are quantized by us and follow ModelOpt's max-calibrated export: `quantize`, `fake_quantize`.
    Activations are quantized by the engine and follow vLLM's reference: `fake_quantize_activation`.

Rounding is to nearest, ties to even, everywhere. A negative value that rounds to zero keeps its sign
(code 8); -0.0 is positive zero (code 0). Every step is FP32, whatever the input's dtype, and divides
where the reference divides: a multiplication by a reciprocal moves ties. Saturation happens before a
value is cast, so a stored scale byte of a weight is never NaN and never zero.

Shape suffixes: N out_features, K in_features, G = K / 16 blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qad.compiled import compiled

BLOCK_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# vLLM multiplies by this FP32 constant where the weight rule divides by 6; the results differ in the last bit.
_ONE_SIXTH = torch.tensor(1.0 / 6.0, dtype=torch.float32).item()
_FP32_TINY = torch.finfo(torch.float32).tiny


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A weight in NVFP4.

    packed        uint8          [..., K/2]   element 2i in the low nibble of byte i, element 2i+1 in the high one
    block_scale   float8_e4m3fn  [..., K/16]  row-major, not swizzled
    global_scale  float32        []           decode scale
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., K]."""
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))


# --- elements and scales -------------------------------------------------------------------------


def _round_to_e2m1(magnitude: Tensor) -> Tensor:
    """FP32 magnitudes in [0, 6] -> the nearest E2M1 magnitude, ties to even. The step is a power of two: exact."""
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.round(magnitude / step) * step


def _round_to_e4m3(value: Tensor) -> Tensor:
    """FP32 values in [0, 448] -> the nearest E4M3FN value as FP32, ties to even.

    Three mantissa bits: one ulp is 2**(exponent - 3), and 2**-9 for everything below 2**-6. Arithmetic
    instead of a cast, because casts of out-of-range values have changed between torch versions and
    because the compiled form must not depend on a device's FP8 support.
    """
    power_of_two = (value.view(torch.int32) & 0x7F800000).view(torch.float32)
    ulp = (power_of_two * 0.125).clamp(min=E4M3_MIN)
    return torch.round(value / ulp) * ulp


def _blocks(tensor: Tensor) -> Tensor:
    """[..., K] -> [rows * K/16, 16], a view where the layout allows."""
    return tensor.reshape(-1, BLOCK_SIZE)


def _require_blocks(tensor: Tensor, what: str) -> None:
    if tensor.dim() == 0 or tensor.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}: NVFP4 needs a last dimension divisible by {BLOCK_SIZE}. "
            "Exclude this module from quantization."
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{what} has dtype {tensor.dtype}: NVFP4 quantizes BF16, FP16 or FP32.")


def global_scale_from_amax(amax: Tensor | float) -> Tensor:
    """FP32 decode scale of a scale group: amax / (6 * 448).

    An amax so small that the scale would be zero or subnormal (below 3.2e-35, so that its reciprocal could
    overflow in an engine) gives the scale of amax 1.0; see `is_degenerate`. NaN and Inf pass through and are
    refused by `quantize`.
    """
    amax = torch.as_tensor(amax, dtype=torch.float32)
    scale = amax / (E2M1_MAX * E4M3_MAX)
    return torch.where(scale < _FP32_TINY, torch.full_like(scale, 1.0) / (E2M1_MAX * E4M3_MAX), scale)


def is_degenerate(amax: Tensor | float) -> bool:
    """True where `global_scale_from_amax` had to replace the scale although the group is not all zero."""
    amax = torch.as_tensor(amax, dtype=torch.float32)
    return bool((amax > 0) & (amax / (E2M1_MAX * E4M3_MAX) < _FP32_TINY))


def _weight_block_scale(weight_B16: Tensor, global_scale: Tensor) -> Tensor:
    """FP32 values of the E4M3 block scales, [blocks, 1]. Source: ModelOpt's NVFP4QTensor, max calibration."""
    block_amax = weight_B16.abs().amax(dim=-1, keepdim=True)
    raw = block_amax / (E2M1_MAX * global_scale)
    raw = torch.where(raw == 0, 1.0, raw)
    return _round_to_e4m3(raw.clamp(E4M3_MIN, E4M3_MAX))


def _weight_magnitude(weight_B16: Tensor, decode_scale: Tensor) -> Tensor:
    """|w| in units of the ROUNDED scale, saturated and rounded to E2M1."""
    return _round_to_e2m1((weight_B16.abs() / decode_scale).clamp(max=E2M1_MAX))


# --- weights -------------------------------------------------------------------------------------


def _quantize_blocks(weight_B16: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    weight_B16 = weight_B16.float()
    block_scale = _weight_block_scale(weight_B16, global_scale)
    magnitude = _weight_magnitude(weight_B16, block_scale * global_scale)
    index = torch.where(magnitude < 2.0, magnitude * 2, torch.where(magnitude < 4.0, magnitude + 2, magnitude / 2 + 4))
    codes = index.to(torch.uint8) | ((weight_B16 < 0).to(torch.uint8) << 3)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed, block_scale.squeeze(-1)


def _fake_quantize_blocks(weight_B16: Tensor, global_scale: Tensor) -> Tensor:
    dtype = weight_B16.dtype
    weight_B16 = weight_B16.float()
    decode_scale = _weight_block_scale(weight_B16, global_scale) * global_scale
    value = _weight_magnitude(weight_B16, decode_scale) * decode_scale
    return torch.where(weight_B16 < 0, -value, value).to(dtype)


def quantize(weight: Tensor, global_scale: Tensor | None = None) -> QuantizedTensor:
    """Quantize a weight [..., K] (BF16, FP16 or FP32) with dynamic block scales.

    `global_scale`: FP32 scalar shared by the weight's scale group; None: the weight is a group of its own.
    Raises ValueError for K not divisible by 16, and for NaN or Inf, naming the first bad index.
    """
    _require_blocks(weight, "weight")
    amax = weight.abs().amax().float()
    if not torch.isfinite(amax):
        index = tuple(int(i) for i in (~torch.isfinite(weight)).nonzero()[0])
        raise ValueError(f"weight holds {weight[index].item()} at index {index}: NVFP4 has no NaN and no Inf.")
    scale = global_scale_from_amax(amax) if global_scale is None else _scalar(global_scale, weight.device)
    packed, block_scale = compiled(_quantize_blocks, weight)(_blocks(weight), scale)
    return QuantizedTensor(
        packed=packed.reshape(*weight.shape[:-1], -1),
        block_scale=block_scale.to(torch.float8_e4m3fn).reshape(*weight.shape[:-1], -1),
        global_scale=scale,
    )


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a quantized tensor, [..., K]: element * (block_scale * global_scale) in FP32, then cast to `dtype`."""
    values = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], device=q.packed.device)
    element = values[unpack(q.packed).long()]
    decode_scale = q.block_scale.float() * q.global_scale
    return (_blocks(element) * decode_scale.reshape(-1, 1)).reshape(q.shape).to(dtype)


def fake_quantize(weight: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """dequantize(quantize(weight)) in one fused pass, in the weight's dtype, with a straight-through gradient.

    The gradient is the identity everywhere, also on and beyond the saturation bound. NaN stays NaN.
    Raises ValueError for K not divisible by 16.
    """
    _require_blocks(weight, "weight")
    if global_scale is None:
        global_scale = global_scale_from_amax(weight.detach().abs().amax().float())
    scale = _scalar(global_scale, weight.device)
    return _StraightThrough.apply(weight, _fake_quantize_blocks, scale)


# --- activations ---------------------------------------------------------------------------------


def _fake_quantize_activation_blocks(x_B16: Tensor, input_scale: Tensor) -> Tensor:
    dtype = x_B16.dtype
    x_B16 = x_B16.float()
    encode_scale = 1.0 / input_scale
    block_amax = x_B16.abs().amax(dim=-1, keepdim=True)
    # The amax is not negative, so vLLM's lower clamp at -448 is moot.
    scale = _round_to_e4m3((encode_scale * (block_amax * _ONE_SIXTH)).clamp(max=E4M3_MAX))
    scaled = x_B16.abs() * _reciprocal(scale * _reciprocal(encode_scale))
    value = _round_to_e2m1(scaled.clamp(max=E2M1_MAX)) * (scale / encode_scale)
    return torch.where(x_B16 < 0, -value, value).to(dtype)


def _reciprocal(x: Tensor) -> Tensor:
    """vLLM's safe reciprocal: a zero divisor counts as 1e8. The value it scales is then multiplied by zero."""
    return 1.0 / (x + (x == 0) * 1e8)


def fake_quantize_activation(x: Tensor, input_scale: Tensor) -> Tensor:
    """What an engine's NVFP4 GEMM sees of its input [..., K]: quantized and decoded, in the input's dtype.

    `input_scale`: FP32 scalar, calibrated amax / (6 * 448), frozen. A block scale may be 0 here and gives zeros;
    blocks above the calibrated amax saturate. Straight-through gradient.
    Source: vLLM 0.32, nvfp4_emulation_utils.ref_nvfp4_quant_dequant.
    Raises ValueError for K not divisible by 16.
    """
    _require_blocks(x, "activation")
    return _StraightThrough.apply(x, _fake_quantize_activation_blocks, _scalar(input_scale, x.device))


def saturated_blocks(x: Tensor, input_scale: Tensor) -> Tensor:
    """Number of blocks of an activation whose amax exceeds the calibrated one, int64 scalar."""
    limit = input_scale.float() * (E2M1_MAX * E4M3_MAX)
    return (_blocks(x.detach()).abs().amax(dim=-1).float() > limit).sum()


class _StraightThrough(torch.autograd.Function):
    """y = kernel(x, scale), dy/dx = 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Any, scale: Tensor) -> Tensor:
        return compiled(kernel, x)(_blocks(x.detach()), scale).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0], None, None


def _scalar(scale: Tensor, device: torch.device) -> Tensor:
    if scale.numel() != 1:
        raise ValueError(f"a global scale is one FP32 number, got shape {tuple(scale.shape)}")
    return scale.detach().reshape(()).to(device=device, dtype=torch.float32)


# --- nibbles -------------------------------------------------------------------------------------


def pack(codes: Tensor) -> Tensor:
    """4-bit codes, uint8 [..., K] -> uint8 [..., K/2]; the even index goes to the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> 4-bit codes, uint8 [..., K]."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
