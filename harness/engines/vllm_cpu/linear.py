"""vLLM's NVFP4 linear kernel on a CPU: decoded weight, fake-quantized input, the GEMM of an unquantized layer.

Imported by vLLM's processes only. The quantization of an activation is one operator, so that torch.compile, which vLLM
runs over the model, keeps it as it is: the project's own fused kernel, to the bit of vLLM's reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from harness.engines.vllm_cpu.plugin import say_emulated
from qad.compiled import compilation
from qad.nvfp4 import QuantizedTensor, dequantize, fake_quantize_activation_encoded

_PACKED = ("weight_scale", "weight_global_scale", "alpha")


def quantize_activation(x: Tensor, encode_scale: Tensor) -> Tensor:
    """x [..., K] -> what the GEMM sees of it, in x's dtype. `encode_scale`: FP32 scalar, 1 / input_scale."""
    with compilation(True), torch.no_grad():
        return fake_quantize_activation_encoded(x, encode_scale)


def _same_shape(x: Tensor, encode_scale: Tensor) -> Tensor:
    return torch.empty_like(x)


direct_register_custom_op(op_name="qad_nvfp4_activation", op_func=quantize_activation, fake_impl=_same_shape)


class CpuNvFp4LinearKernel(NvFp4LinearKernel):
    """W4A4 where the layer has an input scale, else W4A16."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if current_platform.is_cpu() else (False, "it emulates NVFP4 on CPUs only")

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self.dtype = torch.get_default_dtype()  # the model's, which vLLM sets while it builds a model

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weight by its values in the model's dtype, and drop the scales of the weight."""
        say_emulated(self.dtype)
        packed = QuantizedTensor(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        for name in _PACKED:
            if hasattr(layer, name):
                delattr(layer, name)
        layer.weight = torch.nn.Parameter(dequantize(packed, self.dtype), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if hasattr(layer, "input_global_scale_inv"):
            x = torch.ops.vllm.qad_nvfp4_activation(x, layer.input_global_scale_inv)
        y: Tensor = layer.cpu_linear(x, layer.weight, bias)
        return y
