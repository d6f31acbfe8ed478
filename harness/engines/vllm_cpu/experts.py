"""vLLM's NVFP4 experts on a CPU: an expert after the other, by decoded weights and fake-quantized inputs.

Imported by vLLM's processes only. vLLM has collapsed the input scales by then: one of all experts for the first GEMM, one
for the second, which is how this project's checkpoints hold them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from harness.engines.vllm_cpu.linear import quantize_activation
from harness.engines.vllm_cpu.plugin import say_emulated
from qad.nvfp4 import QuantizedTensor, dequantize

_ACTIVATIONS = (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH)


class CpuNvFp4Experts(mk.FusedMoEExpertsModular):
    """W4A4. Shapes: t tokens, k experts of each, E experts, H hidden, I intermediate; w13 [E, 2I, H], w2 [E, H, I]."""

    quantizes_input = True

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self.dtype = moe_config.in_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weights by their values in the model's dtype."""
        say_emulated(self.dtype)
        for name, scales, global_scales in (
            ("w13_weight", self.w1_scale, self.g1_alphas),
            ("w2_weight", self.w2_scale, self.g2_alphas),
        ):
            packed = getattr(layer, name).data
            values = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=self.dtype)
            for e, parts in enumerate(zip(packed, scales, global_scales, strict=True)):
                values[e] = dequantize(QuantizedTensor(*parts), self.dtype)
            replace_parameter(layer, name, values)

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: Any, global_num_experts: int, expert_map: Tensor | None, a1q_scale: Tensor | None,
        a2_scale: Tensor | None, workspace13: Tensor, workspace2: Tensor, expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """hidden_states [t, H], topk_ids and topk_weights [t, k] -> the weighted sum, written into output [t, H]."""
        experts_tk = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        x_tH = self._quantized(hidden_states, self.a1_gscale)
        total_tH = torch.zeros_like(hidden_states)
        for e in experts_tk.unique().tolist():
            if e < 0:  # an expert of another process
                continue
            slots, tokens = torch.where((experts_tk == e).T)
            gate_up = F.linear(x_tH[tokens], w1[e])
            inner = gate_up.new_empty(len(tokens), gate_up.shape[-1] // 2)
            self.activation(activation, inner, gate_up)
            y = F.linear(self._quantized(inner, self.a2_gscale), w2[e])
            if not apply_router_weight_on_input:
                y = y * topk_weights[tokens, slots, None]
            total_tH.index_add_(0, tokens, y.to(total_tH.dtype))
        output.copy_(total_tH)

    def _quantized(self, x: Tensor, encode_scale: Tensor | None) -> Tensor:
        return quantize_activation(x, encode_scale) if self.quantizes_input and encode_scale is not None else x

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
        return False

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _ACTIVATIONS

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)

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
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()


class CpuNvFp4WeightOnlyExperts(CpuNvFp4Experts):
    """W4A16."""

    quantizes_input = False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kNvfp4Static, None)


EXPERTS = (CpuNvFp4Experts, CpuNvFp4WeightOnlyExperts)
