"""The Linear of a quantized model, as the engine computes it: decoded weight, fake-quantized input, one GEMM.

    y_BTN = fake_quantize_activation(x_BTK) @ weight_NK.T + bias_N       by the rule of the module's format

The GEMM runs in the compute dtype (BF16, or FP32 on CPUs without BF16 units). Student and reloaded export call the
same function with the same values, so their outputs are equal to the bit.
"""

from __future__ import annotations

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


class QuantizedLinear(nn.Linear):
    """An nn.Linear whose weight holds decoded values and whose input is fake-quantized by the rule of its format."""

    input_scale: Tensor | None
    format: str
    quantizes_input: bool = True  # False: trained as W4A16 for now, whatever is deployed

    @classmethod
    def wrap(cls, linear: nn.Linear, input_scale: Tensor | None, format: str) -> QuantizedLinear:
        """Take over a Linear's own parameters; nothing is copied."""
        wrapped = cls(1, 1, bias=False, device="meta")
        wrapped.format = format
        wrapped.in_features, wrapped.out_features = linear.in_features, linear.out_features
        wrapped.weight, wrapped.bias = linear.weight, linear.bias
        device = linear.weight.device
        scale = None if input_scale is None else input_scale.to(device=device, dtype=torch.float32)
        wrapped.register_buffer("input_scale", scale, persistent=False)
        return wrapped

    def quantize_input(self, x: Tensor) -> Tensor:
        """The input as the GEMM sees it."""
        return quantize_input(x, self.input_scale if self.quantizes_input else None, self.format)

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
