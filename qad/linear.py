"""The Linear of an NVFP4 model, as the engine computes it: decoded weight, fake-quantized input, one GEMM.

    y_BTN = fake_quantize_activation(x_BTK) @ weight_NK.T + bias_N

The GEMM runs in the compute dtype (BF16, or FP32 on CPUs without BF16 units). Student and reloaded export call the
same function with the same values, so their outputs are equal to the bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qad.nvfp4 import fake_quantize_activation


def nvfp4_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, input_scale: Tensor | None) -> Tensor:
    """`weight_NK` holds decoded values. `input_scale`: FP32 scalar; None (W4A16) leaves the activation as it is."""
    if input_scale is not None:
        x = fake_quantize_activation(x, input_scale)
    return F.linear(x, weight_NK, bias_N)


class NVFP4Linear(nn.Linear):
    """An nn.Linear whose weight holds decoded NVFP4 values and whose input is fake-quantized."""

    input_scale: Tensor | None
    quantizes_input: bool = True  # False: trained as W4A16 for now, whatever is deployed

    @classmethod
    def wrap(cls, linear: nn.Linear, input_scale: Tensor | None) -> NVFP4Linear:
        """Take over a Linear's own parameters; nothing is copied."""
        wrapped = cls(1, 1, bias=False, device="meta")
        wrapped.in_features, wrapped.out_features = linear.in_features, linear.out_features
        wrapped.weight, wrapped.bias = linear.weight, linear.bias
        device = linear.weight.device
        scale = None if input_scale is None else input_scale.to(device=device, dtype=torch.float32)
        wrapped.register_buffer("input_scale", scale, persistent=False)
        return wrapped

    def forward(self, input: Tensor) -> Tensor:
        return nvfp4_linear(input, self.weight, self.bias, self.input_scale if self.quantizes_input else None)


def wrap_linears(model: nn.Module, input_scales: dict[str, Tensor | None]) -> None:
    """Replace the named Linears of a model in place by NVFP4Linears."""
    for name, input_scale in input_scales.items():
        parent, _, leaf = name.rpartition(".")
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{name} is {type(linear).__name__}, expected Linear")
        setattr(model.get_submodule(parent), leaf, NVFP4Linear.wrap(linear, input_scale))
