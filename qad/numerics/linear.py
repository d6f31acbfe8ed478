"""The Linear of a quantized model, as the engine computes it: decoded weight, fake-quantized input, one GEMM.

    y_BTN = fake_quantize_activation(x_BTK) @ weight_NK.T + bias_N       by the rule of the module's format

The GEMM runs in the compute dtype (BF16, or FP32 on CPUs without BF16 units). Student and reloaded export call the
same function with the same values, so their outputs are equal to the bit. Linears beside each other that are given the same
tensor under the same scale (q, k and v; gate and up) quantize it once, as engines do, which fuse them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qad.numerics.formats import FORMATS, NVFP4


def quantize_input(x: Tensor, input_scale: Tensor | None, format: str = NVFP4) -> Tensor:
    """What the GEMM of a format sees of its input. `input_scale`: FP32 scalar; None (weights alone) leaves it as it is."""
    if input_scale is None:
        return x
    return FORMATS[format].numerics().fake_quantize_activation(x, input_scale)


class SharedInput:
    """The quantized form of the last input of Linears with one scale and format, for those that are given the same tensor.

    Kept until each of the `members` has had it, or the tensor is gone.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._input: weakref.ref[Tensor] | None = None
        self._seen: object = None
        self._quantized: Tensor | None = None
        self._left = 0

    def __reduce__(self) -> tuple[type[SharedInput], tuple[int]]:
        return SharedInput, (self._members,)  # a copied model shares anew

    def quantize(self, x: Tensor, input_scale: Tensor | None, format: str) -> Tensor:
        """As `quantize_input`, from memory where it is this tensor, unchanged, that came last."""
        seen = (None if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._quantized is None or self._input is None or self._input() is not x or self._seen != seen:
            self._quantized = quantize_input(x, input_scale, format)
            self._input, self._seen, self._left = weakref.ref(x, self._forget), seen, self._members
        quantized = self._quantized
        self._left -= 1
        if self._left == 0:
            self._input = self._quantized = None
        return quantized

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if gone is self._input:
            self._input = self._quantized = None


class QuantizedLinear(nn.Linear):
    """An nn.Linear whose weight holds decoded values and whose input is fake-quantized by the rule of its format."""

    input_scale: Tensor | None
    format: str
    quantizes_input: bool = True  # False: trained as W4A16 for now, whatever is deployed
    shared: SharedInput | None = None  # with the Linears beside it that have the same scale and format

    @classmethod
    def wrap(cls, linear: nn.Linear, input_scale: Tensor | None, format: str) -> QuantizedLinear:
        """Take over a Linear's own parameters; nothing is copied. On the meta device the scale stays where it is."""
        wrapped = cls(1, 1, bias=False, device="meta")
        wrapped.format = format
        wrapped.in_features, wrapped.out_features = linear.in_features, linear.out_features
        wrapped.weight, wrapped.bias = linear.weight, linear.bias
        device = None if linear.weight.is_meta else linear.weight.device
        scale = None if input_scale is None else input_scale.to(device=device, dtype=torch.float32)
        wrapped.register_buffer("input_scale", scale, persistent=False)
        return wrapped

    def quantize_input(self, x: Tensor) -> Tensor:
        """The input as the GEMM sees it."""
        if self.input_scale is None or not self.quantizes_input:
            return x
        quantize = quantize_input if self.shared is None else self.shared.quantize
        return quantize(x, self.input_scale, self.format)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.quantize_input(input), self.weight, self.bias)


def wrap_linears(model: nn.Module, linears: Mapping[str, tuple[Tensor | None, str]]) -> None:
    """Replace the named Linears of a model in place by QuantizedLinears. linears: name -> (input scale or None, format)."""
    for name, (input_scale, format) in linears.items():
        parent, _, leaf = name.rpartition(".")
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{name} is {type(linear).__name__}, expected Linear")
        setattr(model.get_submodule(parent), leaf, QuantizedLinear.wrap(linear, input_scale, format))
    share_inputs(model)


def share_inputs(model: nn.Module) -> None:
    """Let the QuantizedLinears of each module that have the same input scale and format quantize a common input once."""
    for module in model.modules():
        alike: dict[tuple[str, float], list[QuantizedLinear]] = {}
        for child in module.children():
            if isinstance(child, QuantizedLinear) and child.input_scale is not None and not child.input_scale.is_meta:
                alike.setdefault((child.format, float(child.input_scale)), []).append(child)
        for members in alike.values():
            shared = SharedInput(len(members)) if len(members) > 1 else None
            for member in members:
                member.shared = shared
