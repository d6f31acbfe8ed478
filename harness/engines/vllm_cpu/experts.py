"""vLLM's NVFP4 and FP8 experts on a CPU: an expert after the other, by decoded weights and fake-quantized inputs.

Imported by vLLM's processes only. vLLM has collapsed the input scales by then: one of all experts for the first GEMM, one
for the second, which is how this project's checkpoints hold them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic, kNvfp4Static
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from harness.engines.vllm_cpu.emulated import say_emulated
from harness.engines.vllm_cpu.linear import multiplied_dtype, quantize_activation, quantize_activation_fp8
from qad.numerics import fp8
from qad.numerics.nvfp4 import E4M3_MAX, QuantizedTensor, dequantize

_ACTIVATIONS = (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH, MoEActivation.RELU2_NO_MUL)


class _CpuExperts(mk.FusedMoEExpertsModular):
    """Shapes: t tokens, k experts of each, E experts, H hidden, I intermediate; w13 [E, 2I, H], or [E, I, H] without
    a gate, w2 [E, H, I]."""

    scheme: tuple[Any, Any]  # of weights, of inputs

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self.dtype = moe_config.in_dtype

    @abstractmethod
    def first_input(self, x_tH: Tensor) -> Tensor:
        """What the first GEMM sees of it."""

    @abstractmethod
    def second_input(self, x_tI: Tensor) -> Tensor:
        """What the second GEMM sees of it."""

    def values(self, w13: Tensor, w2: Tensor, e: int) -> tuple[Tensor, Tensor]:
        """Decoded weights of one expert."""
        return w13[e], w2[e]

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """hidden_states [t, H], topk_ids and topk_weights [t, k] -> the weighted sum, written into output [t, H]."""
        experts_tk = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        x_tH = self.first_input(hidden_states)
        total_tH = torch.zeros_like(hidden_states)
        for e in experts_tk.unique().tolist():
            if e < 0:  # an expert of another process
                continue
            slots, tokens = torch.where((experts_tk == e).T)
            w13_NH, w2_HI = self.values(w1, w2, e)
            gate_up = _product(x_tH[tokens], w13_NH, self.dtype)
            inner = gate_up.new_empty(len(tokens), w2_HI.shape[-1])
            self.activation(activation, inner, gate_up)
            y = _product(self.second_input(inner), w2_HI, self.dtype)
            if not apply_router_weight_on_input:
                y = y * topk_weights[tokens, slots, None]
            total_tH.index_add_(0, tokens, y.to(total_tH.dtype))
        output.copy_(total_tH)

    # --- what vLLM asks before it chooses ---

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts], moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        if moe_config.has_bias:
            return False, "kernel does not support bias"
        return mk.FusedMoEExperts.is_supported_config(cls, moe_config, weight_key, activation_key, activation_format)

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _ACTIVATIONS

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == cls.scheme

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_routing_method(routing_method: Any, weight_key: Any, activation_key: Any) -> bool:
        return True  # tokens come routed

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype: Any, routing_method: Any) -> bool:
        return True

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()


class CpuNvFp4Experts(_CpuExperts):
    """W4A4."""

    scheme = (kNvfp4Static, kNvfp4Dynamic)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weights by their values."""
        say_emulated(self.dtype)
        for name, scales, global_scales in (
            ("w13_weight", self.w1_scale, self.g1_alphas),
            ("w2_weight", self.w2_scale, self.g2_alphas),
        ):
            packed = getattr(layer, name).data
            values = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=multiplied_dtype(self.dtype))
            for e, parts in enumerate(zip(packed, scales, global_scales, strict=True)):
                values[e] = dequantize(QuantizedTensor(*parts), self.dtype)
            replace_parameter(layer, name, values)

    def first_input(self, x_tH: Tensor) -> Tensor:
        return _quantized(x_tH, self.a1_gscale)

    def second_input(self, x_tI: Tensor) -> Tensor:
        return _quantized(x_tI, self.a2_gscale)


class CpuNvFp4WeightOnlyExperts(CpuNvFp4Experts):
    """W4A16."""

    scheme = (kNvfp4Static, None)

    def first_input(self, x_tH: Tensor) -> Tensor:
        return x_tH

    def second_input(self, x_tI: Tensor) -> Tensor:
        return x_tI


class CpuFp8Experts(_CpuExperts):
    """W8A8 with one static scale of each weight and one of the input. vLLM's FP8 methods tell no kernel when its weights are
    loaded, so an expert is decoded when the first token comes to it, and stays."""

    scheme = (kFp8StaticTensorSym, kFp8StaticTensorSym)

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        say_emulated(self.dtype)
        self._decoded: dict[int, tuple[Tensor, Tensor]] = {}

    def values(self, w13: Tensor, w2: Tensor, e: int) -> tuple[Tensor, Tensor]:
        if e not in self._decoded:
            stored = fp8.Fp8Tensor(w13[e], self.w1_scale[e]), fp8.Fp8Tensor(w2[e], self.w2_scale[e])
            first, second = (fp8.dequantize(one, self.dtype).to(multiplied_dtype(self.dtype)) for one in stored)
            self._decoded[e] = first, second
        return self._decoded[e]

    def first_input(self, x_tH: Tensor) -> Tensor:
        return quantize_activation_fp8(x_tH, self.a1_scale)

    def second_input(self, x_tI: Tensor) -> Tensor:
        return quantize_activation_fp8(x_tI, self.a2_scale)


def scaled_fp8_quant(input: Tensor, scale: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """vLLM's function of that name for one static scale, [M, N] -> E4M3 [M, N]. Its CPU build has the operator's name alone,
    and the FP8 methods of experts call it when they join the two halves of w13: halves of one scale keep their bytes."""
    if scale is None or scale.numel() != 1 or any(options.values()) or any(one is not None for one in unused):
        raise ValueError("the CPU plugin takes FP8 experts with one static scale a tensor only: export them so (format FP8)")
    values = input.float() * (1.0 / scale.reshape(()))
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _quantized(x: Tensor, encode_scale: Tensor | None) -> Tensor:
    return x if encode_scale is None else quantize_activation(x, encode_scale)


def _product(x: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplied in the weight's dtype, rounded to the model's."""
    return F.linear(x.to(weight_NK.dtype), weight_NK).to(dtype)


NVFP4_EXPERTS = (CpuNvFp4Experts, CpuNvFp4WeightOnlyExperts)
FP8_EXPERTS = (CpuFp8Experts,)
