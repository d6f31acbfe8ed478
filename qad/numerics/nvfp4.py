"""NVFP4 numerics: the one definition used by calibration, training, export, checking and emulated serving.

The format (OCP MX style, NVIDIA variant)
    element       E2M1: 1 sign, 2 exponent, 1 mantissa bit. Magnitudes 0 .5 1 1.5 2 3 4 6,
                  code = sign << 3 | index. No Inf, no NaN; everything above 5 saturates at 6.
    block         16 consecutive elements of the last dimension share an E4M3FN scale (largest 448, smallest 2**-9).
    global_scale  one FP32 per tensor, or per group of tensors that an engine fuses. Always the
                  *decode* scale: value = element * (block_scale * global_scale).

Two rules, because two parties quantize
    Weights, by us: ModelOpt's max-calibrated export (`quantize`, `fake_quantize`). Block scales are dynamic, a function of
    the weight, or frozen (`qad.numerics.scale_search`).
    Activations, by the engine: vLLM's reference (`fake_quantize_activation`).

Rounding is to nearest, ties to even, everywhere. A negative value that rounds to zero keeps its sign (code 8); -0.0 is
positive zero (code 0). Every step is FP32, whatever the input's dtype, and divides where the reference divides: a
multiplication by a reciprocal moves ties. Saturation happens before a value is cast, so a stored scale byte of a weight is
never NaN and never zero.

Shape suffixes: N out_features, K in_features, G = K / 16 blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qad.numerics.compiled import compiled
from qad.numerics.finite import amax, first_not_finite
from qad.numerics.nibbles import pack, unpack

BLOCK_SIZE = 16
E2M1_MAX, E4M3_MAX, E4M3_MIN = 6.0, 448.0, 2.0**-9
E2M1_OVERFLOW = 7.0  # halfway to 8, the next magnitude if there were one: from here on saturation costs more
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_CHUNK = 1 << 14  # blocks quantized at a time: what lies in between stays in its cache ...
_COMPILED_CHUNK = 1 << 16  # ... and is less where it is compiled, but a call costs more
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

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """As they are stored: codes, block scales, global scale."""
        return self.packed, self.block_scale, self.global_scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`dequantize` of this module."""
        return dequantize(self, dtype)


def from_tensors(*tensors: Tensor) -> QuantizedTensor:
    """Of a stored module: codes, block scales, global scale."""
    return QuantizedTensor(*tensors)


@dataclasses.dataclass(frozen=True)
class FrozenScales:
    """Scales of a weight [..., K] that stay as they are while the weight trains.

    block_scale   float8_e4m3fn  [..., K/16]  positive and finite, 1.0 for a zero block
    global_scale  float32        []           shared by the scale group
    decided       the weight's codes, decided with these scales (qad.numerics.gptq): stored as they are. None: rounded to nearest
    start         bfloat16       [..., K]     where training goes on from decided codes, in their cells; None where none does
    """

    block_scale: Tensor
    global_scale: Tensor
    decided: QuantizedTensor | None = None
    start: Tensor | None = None

    def to(self, device: torch.device | str) -> FrozenScales:
        decided = self.decided and QuantizedTensor(*(tensor.to(device) for tensor in self.decided.tensors))
        start = None if self.start is None else self.start.to(device)
        return FrozenScales(self.block_scale.to(device), self.global_scale.to(device), decided, start)

    @property
    def to_nearest(self) -> FrozenScales:
        """The scales alone: a weight that trains is rounded to nearest."""
        return FrozenScales(self.block_scale, self.global_scale)


def _round_to_step(magnitude: Tensor, step: Tensor | float) -> Tensor:
    """FP32 magnitudes below 2**23 steps -> the nearest multiple of the step, a power of two; ties to even.

    Beside 2**23 steps a float has no bits left below one step: the addition rounds, the subtraction is exact.
    """
    anchor = step * 2.0**23
    return (magnitude + anchor).sub_(anchor)


def _e2m1_pieces(magnitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far FP32 magnitudes reach into each piece of E2M1, rounded to its steps: .5 up to 2, 1 up to 4, 2 up to 6.

    Their sum is the nearest E2M1 magnitude, ties to even, saturated at 6; the differences are exact. Minima and sums
    only, because an eager torch.where takes ten times as long on a CPU, and in place, because new memory takes half of it.
    """
    low, middle, high = (magnitude.clamp(max=end) for end in (2.0, 4.0, E2M1_MAX))
    high -= middle
    middle -= low
    return _round_to_step(low, 0.5), _round_to_step(middle, 1.0), _round_to_step(high, 2.0)


def _round_to_e2m1(magnitude: Tensor) -> Tensor:
    """FP32 magnitudes -> the nearest E2M1 magnitude."""
    low, middle, high = _e2m1_pieces(magnitude)
    return low.add_(middle).add_(high)


def round_to_e4m3(value: Tensor) -> Tensor:
    """FP32 values in [0, 448] -> the nearest E4M3FN value as FP32, ties to even.

    Three mantissa bits: one ulp is 2**(exponent - 3), and 2**-9 for everything below 2**-6. Arithmetic
    instead of a cast, because casts of out-of-range values have changed between torch versions and
    because the compiled form must not depend on a device's FP8 support.
    """
    power_of_two = (value.view(torch.int32) & 0x7F800000).view(torch.float32)
    return _round_to_step(value, (power_of_two * 0.125).clamp(min=E4M3_MIN))


def as_blocks(tensor: Tensor) -> Tensor:
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


def global_scale_from_amax(amax: Tensor | float, block_scale_max: float = E4M3_MAX) -> Tensor:
    """FP32 decode scale of a scale group: amax / (6 * 448), so that the block scale of the largest value is 448.

    `block_scale_max`: another block scale for the largest value; four-over-six takes 256.
    An amax so small that the scale would be zero or subnormal (below 3.2e-35, so that its reciprocal could overflow in an
    engine) gives the scale of amax 1.0. NaN and Inf pass through and are refused by `quantize`.
    """
    amax = torch.as_tensor(amax, dtype=torch.float32)
    scale = amax / (E2M1_MAX * block_scale_max)
    return torch.where(scale < _FP32_TINY, torch.full_like(scale, 1.0) / (E2M1_MAX * block_scale_max), scale)


def _weight_block_scale(weight_B16: Tensor, global_scale: Tensor) -> Tensor:
    """FP32 values of the E4M3 block scales, [blocks, 1]. Source: ModelOpt's NVFP4QTensor, max calibration."""
    raw = weight_B16.abs().amax(dim=-1, keepdim=True) / (E2M1_MAX * global_scale)
    raw = torch.where(raw == 0, 1.0, raw)
    return round_to_e4m3(raw.clamp(E4M3_MIN, E4M3_MAX))


def weight_magnitude(weight_B16: Tensor, decode_scale: Tensor) -> Tensor:
    """|w| in units of the ROUNDED scale, saturated and rounded to E2M1."""
    return _round_to_e2m1(weight_B16.abs().div_(decode_scale))


def _encode(weight_B16: Tensor, decode_scale_B1: Tensor) -> Tensor:
    """FP32 weights -> 4-bit codes, uint8 [blocks, 16]. Computed in FP32, which every CPU does eight at a time."""
    low, middle, high = _e2m1_pieces(weight_B16.abs().div_(decode_scale_B1))
    index = low.mul_(2).add_(middle).add_(high, alpha=0.5)
    return index.sub_(torch.sign(weight_B16).clamp_(max=0), alpha=8).to(torch.uint8)


def _round_trip(weight_B16: Tensor, decode_scale_B1: Tensor) -> Tensor:
    """FP32 weights -> the FP32 values of their codes."""
    return _signed(weight_magnitude(weight_B16, decode_scale_B1) * decode_scale_B1, weight_B16)


def _signed(magnitude: Tensor, like: Tensor) -> Tensor:
    """A magnitude with another number's sign, zero negative only where that number is not zero."""
    return magnitude * torch.sign(like)


def _quantize_blocks(weight_B16: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    assert weight_B16.shape[1] == BLOCK_SIZE  # tells the compiler
    weight_B16 = weight_B16.float()
    block_scale_B1 = _weight_block_scale(weight_B16, global_scale)
    return _encode(weight_B16, block_scale_B1 * global_scale), block_scale_B1


def _quantize_frozen_blocks(weight_B16: Tensor, global_scale: Tensor, block_scale_B1: Tensor) -> Tensor:
    assert weight_B16.shape[1] == BLOCK_SIZE
    return _encode(weight_B16.float(), block_scale_B1 * global_scale)


def _fake_quantize_blocks(weight_B16: Tensor, global_scale: Tensor, out_B16: Tensor | None = None) -> Tensor:
    assert weight_B16.shape[1] == BLOCK_SIZE
    value_B16 = weight_B16.float()
    decode_scale_B1 = _weight_block_scale(value_B16, global_scale) * global_scale
    return _stored(_round_trip(value_B16, decode_scale_B1).to(weight_B16.dtype), out_B16)


def _fake_quantize_frozen_blocks(
    weight_B16: Tensor, global_scale: Tensor, block_scale_B1: Tensor, out_B16: Tensor | None = None
) -> Tensor:
    assert weight_B16.shape[1] == BLOCK_SIZE
    return _stored(_round_trip(weight_B16.float(), block_scale_B1 * global_scale).to(weight_B16.dtype), out_B16)


def _stored(value: Tensor, out: Tensor | None) -> Tensor:
    return value if out is None else out.copy_(value)


def quantize(weight: Tensor, global_scale: Tensor | None = None, block_scale: Tensor | None = None) -> QuantizedTensor:
    """Quantize a weight [..., K] (BF16, FP16 or FP32) with dynamic block scales, or with the given ones.

    `global_scale`: FP32 scalar shared by the weight's scale group; None: the weight is a group of its own.
    `block_scale`: frozen, float8_e4m3fn [..., K/16], only together with its global scale; what exceeds it saturates at 6.
    Raises ValueError for K not divisible by 16, for NaN or Inf, naming the first bad index, and for block scales of
    another shape or dtype, or that are not positive and finite.
    """
    _require_blocks(weight, "weight")
    given = None
    if block_scale is not None:
        global_scale, given = _frozen(weight, global_scale, block_scale)
        if not ((given > 0) & (given <= E4M3_MAX)).all():
            raise ValueError("a frozen block scale is zero, negative or NaN: find the scales again")
    scale = _scalar(global_scale_from_amax(amax(weight)) if global_scale is None else global_scale, weight.device)
    weight_B16 = as_blocks(weight.detach())
    packed_B8 = torch.empty(len(weight_B16), BLOCK_SIZE // 2, dtype=torch.uint8, device=weight.device)
    values_B1 = torch.empty(len(weight_B16), 1, dtype=torch.float8_e4m3fn, device=weight.device)
    kernel = _quantize_blocks if given is None else _quantize_frozen_blocks
    run = compiled(kernel, weight)
    size = _CHUNK if run is kernel else _COMPILED_CHUNK
    for start in range(0, len(weight_B16), size):  # blocks do not see each other
        part = slice(start, start + size)
        chunk_B16 = weight_B16[part]
        if not torch.isfinite(amax(chunk_B16)):
            index = first_not_finite(weight)
            assert index is not None
            raise ValueError(f"weight holds {weight[index].item()} at index {index}: NVFP4 has no NaN and no Inf.")
        if given is None:
            codes_B16, values_B1[part] = run(chunk_B16, scale)
        else:
            codes_B16 = run(chunk_B16, scale, given[part])
        packed_B8[part] = pack(codes_B16)
    packed = packed_B8.reshape(*weight.shape[:-1], -1)
    if block_scale is None:
        block_scale = values_B1.reshape(*weight.shape[:-1], -1)
    return QuantizedTensor(packed, block_scale, scale)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a quantized tensor, [..., K]: element * (block_scale * global_scale) in FP32, then cast to `dtype`."""
    values = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], device=q.packed.device)
    element = values[unpack(q.packed).long()]
    decode_scale = q.block_scale.float() * q.global_scale
    return (as_blocks(element) * decode_scale.reshape(-1, 1)).reshape(q.shape).to(dtype)


def fake_quantize(
    weight: Tensor, global_scale: Tensor | None = None, block_scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """dequantize(quantize(weight, ...)) in one fused pass, in the weight's dtype, with a straight-through gradient.

    The gradient is the identity everywhere, also on and beyond the saturation bound. NaN stays NaN.
    `out`: a tensor of the weight's shape and any floating dtype that gets the values and is returned; no gradient passes. New
    memory for a large tensor costs more than its values; one that is not contiguous takes it.
    Raises ValueError for K not divisible by 16, and for block scales of another shape or dtype.
    """
    _require_blocks(weight, "weight")
    kernel: Any
    scales: tuple[Tensor, ...]
    if block_scale is not None:
        kernel, scales = _fake_quantize_frozen_blocks, _frozen(weight, global_scale, block_scale)
    else:
        scale = global_scale_from_amax(amax(weight)) if global_scale is None else global_scale
        kernel, scales = _fake_quantize_blocks, (_scalar(scale, weight.device),)
    if out is None:
        return _StraightThrough.apply(weight, kernel, *scales)
    _into(out, compiled(kernel, weight), as_blocks(weight.detach()), *scales)
    return out


def _into(out: Tensor, kernel: Any, blocks: Tensor, *scales: Tensor) -> None:
    values = out.detach() if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    kernel(blocks, *scales, values.view(-1, BLOCK_SIZE))
    if not out.is_contiguous():
        out.detach().copy_(values)


def fake_quantize_stack(weight_ENK: Tensor, global_scale_E: Tensor, block_scale_ENG: Tensor | None, out_ENK: Tensor) -> None:
    """`fake_quantize` of every weight of a stack with its own global scale, in one pass, written to `out_ENK`.

    global_scale_E: FP32.
    block_scale_ENG: frozen, float8_e4m3fn [E, N, K/16]; None for dynamic ones.
    Raises ValueError for K not divisible by 16.
    """
    _require_blocks(weight_ENK, "weight")
    blocks = weight_ENK[0].numel() // BLOCK_SIZE
    scales = [global_scale_E.repeat_interleave(blocks)[:, None]]
    if block_scale_ENG is not None:
        scales.append(block_scale_ENG.float().reshape(-1, 1))
    kernel: Any = _fake_quantize_blocks if block_scale_ENG is None else _fake_quantize_frozen_blocks
    _into(out_ENK, compiled(kernel, weight_ENK), as_blocks(weight_ENK.detach()), *scales)


def _frozen(weight: Tensor, global_scale: Tensor | None, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 values of given scales on the weight's device: global [], block [blocks, 1]."""
    expected = (*weight.shape[:-1], weight.shape[-1] // BLOCK_SIZE)
    if tuple(block_scale.shape) != expected or block_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"block scales are {block_scale.dtype} {tuple(block_scale.shape)}, "
            f"a weight {tuple(weight.shape)} has torch.float8_e4m3fn {expected}"
        )
    if global_scale is None:
        raise ValueError("block scales mean nothing without the global scale they were found with: give both")
    return _scalar(global_scale, weight.device), block_scale.to(weight.device).float().reshape(-1, 1)


def saturated_weight_blocks(weight: Tensor, scales: FrozenScales) -> Tensor:
    """Blocks that their frozen scale cuts off: an element is 7 or more in units of its scale, where an unlimited
    E2M1 would go on to 8. Bool [..., K/16]."""
    global_scale, values_B1 = _frozen(weight, scales.global_scale, scales.block_scale)
    amax_B1 = as_blocks(weight.detach()).abs().amax(dim=-1, keepdim=True).float()
    return (amax_B1 / (values_B1 * global_scale) >= E2M1_OVERFLOW).reshape(scales.block_scale.shape)


def fake_quantize_activation_blocks(x_B16: Tensor, encode_scale: Tensor) -> Tensor:
    """`fake_quantize_activation_encoded` of blocks [blocks, 16], without a gradient: the kernel itself, to be compiled. The
    scale is an FP32 scalar on their device."""
    assert x_B16.shape[1] == BLOCK_SIZE
    dtype = x_B16.dtype
    x_B16 = x_B16.float()
    block_amax = x_B16.abs().amax(dim=-1, keepdim=True)
    # vLLM multiplies by FP32's 1/6 where the weight rule divides by 6: another last bit. (A literal: torch.compile would make a
    # name an input of every call.) Its lower clamp at -448 is moot.
    scale = round_to_e4m3((encode_scale * (block_amax * 0.16666667163372040)).clamp(max=E4M3_MAX))
    scaled = x_B16.abs() * _reciprocal(scale * _reciprocal(encode_scale))
    value = _round_to_e2m1(scaled) * (scale / encode_scale)
    return _signed(value, x_B16).to(dtype)


def _reciprocal(x: Tensor) -> Tensor:
    """vLLM's safe reciprocal: a zero divisor counts as 1e8. The value it scales is then multiplied by zero.

    A division of FP32 tensors, because what `1.0 / x` compiles to on CUDA before torch 2.13 is not the nearest.
    """
    return torch.ones_like(x) / (x + (x == 0) * 1e8)


def fake_quantize_activation(x: Tensor, input_scale: Tensor) -> Tensor:
    """What an engine's NVFP4 GEMM sees of its input [..., K]: quantized and decoded, in the input's dtype.

    `input_scale`: FP32 scalar, calibrated amax / (6 * 448), frozen. A block scale may be 0 here and gives zeros;
    blocks above the calibrated amax saturate. Straight-through gradient.
    Source: vLLM 0.32, nvfp4_emulation_utils.ref_nvfp4_quant_dequant.
    Raises ValueError for K not divisible by 16.
    """
    return fake_quantize_activation_encoded(x, 1.0 / _scalar(input_scale, x.device))


def fake_quantize_activation_encoded(x: Tensor, encode_scale: Tensor) -> Tensor:
    """`fake_quantize_activation` by the FP32 scalar 1 / input_scale, which compressed-tensors checkpoints store and an
    engine holds: a second reciprocal could change its last bit."""
    _require_blocks(x, "activation")
    return _StraightThrough.apply(x, fake_quantize_activation_blocks, _scalar(encode_scale, x.device))


class _StraightThrough(torch.autograd.Function):
    """y = kernel(x, *scales), dy/dx = 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Any, *scales: Tensor) -> Tensor:
        ctx.scales = len(scales)
        return compiled(kernel, x)(as_blocks(x.detach()), *scales).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (grad_outputs[0], None, *[None] * ctx.scales)


def _scalar(scale: Tensor, device: torch.device) -> Tensor:
    if scale.numel() != 1:
        raise ValueError(f"a global scale is one FP32 number, got shape {tuple(scale.shape)}")
    return scale.detach().reshape(()).to(device=device, dtype=torch.float32)
