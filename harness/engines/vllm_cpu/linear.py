"""vLLM's linear kernels of NVFP4 and of FP8 per tensor on a CPU: decoded weight, fake-quantized input, the GEMM of an
unquantized layer.

Imported by vLLM's processes only. The quantization of an activation is one operator, so that torch.compile, which vLLM
runs over the model, keeps it as it is: the project's own fused kernel, to the bit of vLLM's reference.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import CpuArchEnum, current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from harness.engines.vllm_cpu.emulated import say_emulated
from qad.numerics import fp8
from qad.numerics.compiled import compiled_for
from qad.numerics.nvfp4 import QuantizedTensor, as_blocks, dequantize, fake_quantize_activation_blocks
from qad.numerics.widened import multiplies_bfloat16

_PACKED = ("weight_scale", "weight_global_scale", "alpha")
_SERIAL = 1 << 17  # elements of an activation: below it the GEMM that follows takes many times as long on any machine


@functools.cache
def multiplied_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that what is in the model's dtype is multiplied in. On a CPU without BF16 units BF16 is multiplied as FP32,
    several times as fast: FP32 holds the same values, and sums are FP32 either way."""
    native = current_platform.get_cpu_architecture() != CpuArchEnum.X86 or multiplies_bfloat16("cpu")
    return torch.float32 if dtype == torch.bfloat16 and not native else dtype


def quantize_activation(x: Tensor, encode_scale: Tensor) -> Tensor:
    """x [..., K] -> what the GEMM sees of it: values of x's dtype, in `multiplied_dtype`. `encode_scale`: FP32 scalar,
    1 / input_scale."""
    return _quantized(_nvfp4_blocks, as_blocks(x), encode_scale).view(x.shape)


def quantize_activation_fp8(x: Tensor, input_scale: Tensor) -> Tensor:
    """The same in FP8, by the decode scale."""
    return _quantized(_fp8_values, x.reshape(-1, x.shape[-1]), input_scale).view(x.shape)


def _quantized(kernel: Callable[..., Tensor], x: Tensor, scale: Tensor) -> Tensor:
    run = compiled_for(kernel, x.device.type, serial=x.numel() < _SERIAL)
    result: Tensor = run(x, scale.reshape(()), multiplied_dtype(x.dtype))
    return result


def _nvfp4_blocks(x_B16: Tensor, encode_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return fake_quantize_activation_blocks(x_B16, encode_scale).to(dtype)


def _fp8_values(x: Tensor, input_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return fp8.fake_quantize_activation_values(x, input_scale).to(dtype)


def _same_shape(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=multiplied_dtype(x.dtype))


direct_register_custom_op(op_name="qad_nvfp4_activation", op_func=quantize_activation, fake_impl=_same_shape)
direct_register_custom_op(op_name="qad_fp8_activation", op_func=quantize_activation_fp8, fake_impl=_same_shape)


def prepare(layer: Any, weight_NK: Tensor) -> None:
    """Give a layer the weight it multiplies by."""
    layer.weight = torch.nn.Parameter(weight_NK.to(multiplied_dtype(weight_NK.dtype)), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


def multiply(layer: Any, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [..., K] -> [..., N] in the model's dtype."""
    multiplied = layer.weight.dtype
    y: Tensor = layer.cpu_linear(x.to(multiplied), layer.weight, None if bias is None else bias.to(multiplied))
    return y.to(dtype)


def widened_dispatch(original: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
    """vLLM's choice of a product for an unquantized Linear; in a quantized model, of which it is lm_head, in `multiplied_dtype`
    as well."""

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight, config = layer.weight, get_current_vllm_config_or_none()
        wide = multiplied_dtype(weight.dtype)
        quantized = config is not None and config.quant_config is not None
        looked_up = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
        if wide == weight.dtype or weight.ndim != 2 or weight.is_meta or looked_up or not quantized:
            original(layer, remove_weight)
            return
        product = types.SimpleNamespace(weight=torch.nn.Parameter(weight.to(wide), requires_grad=False))
        original(product, True)
        layer.cpu_linear = lambda x, weight, bias: multiply(product, x, bias, x.dtype)
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    return dispatch_cpu_unquantized_gemm


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
        prepare(layer, dequantize(packed, self.dtype))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        quantized = x
        if hasattr(layer, "input_global_scale_inv"):
            quantize = torch.ops.vllm.qad_nvfp4_activation if torch.compiler.is_compiling() else quantize_activation
            quantized = quantize(x, layer.input_global_scale_inv)
        return multiply(layer, quantized, bias, x.dtype)


class CpuFp8LinearKernel(FP8ScaledMMLinearKernel):
    """W8A8 with one static scale of the weight and one of the input, as mixed checkpoints have it.

    vLLM's own choice for CPUs asks for an operator that its CPU build lacks, or, with AMX, leaves the input unquantized.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if current_platform.is_cpu() else (False, "it emulates FP8 on CPUs only")

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        static = c.weight_quant_key == kFp8StaticTensorSym and c.activation_quant_key == kFp8StaticTensorSym
        return (True, None) if static else (False, "it needs static scales of whole tensors")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the weight [K, N] by its values [N, K] in the model's dtype, and drop its scale."""
        say_emulated(self.config.out_dtype)
        stored = fp8.Fp8Tensor(layer.weight.data.t(), layer.weight_scale.data)
        del layer.weight_scale
        values = fp8.dequantize(stored, self.config.out_dtype).contiguous()
        prepare(layer, values)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        quantize = torch.ops.vllm.qad_fp8_activation if torch.compiler.is_compiling() else quantize_activation_fp8
        return multiply(layer, quantize(x, layer.input_scale), bias, x.dtype)

    def apply_scaled_mm(self, **unused: Any) -> Tensor:
        raise AssertionError("apply_weights does it all")
