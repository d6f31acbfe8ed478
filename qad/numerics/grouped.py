"""The experts of a quantized layer, as the engine computes them: inputs quantized once a token, grouped GEMMs.

    x_tH   = fake_quantize(x_tH)                      once a token: all experts of a layer share the scale
    h_sI   = gate(x[token of s] @ up_E2IH[expert of s].T)      s: a token at one of its k experts
    y_sH   = fake_quantize(h_sI) @ down_EHI[expert of s].T
    out_tH = sum over a token's k slots of weight * y_sH

Routing, sorting and the GEMMs are transformers' own (`grouped_mm_experts_forward`): no host synchronisation, one kernel a
projection. Student and reloaded export call the same function with the same values, so their outputs are equal to the bit;
a loop over experts has other bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from qad.numerics.linear import quantize_input

NAME = "qad"  # among transformers' implementations of experts


@dataclasses.dataclass
class ExpertInputs:
    """How the inputs of one layer's experts are quantized; kept by the layer's module under `inputs`.

    format: of all experts of the layer.
    first: FP32 scalar, input scale of gate and up; None leaves inputs as they are.
    second: FP32 scalar, input scale of down; None likewise.
    quantizes_input: False while the model is trained as W4A16, whatever is deployed.
    watch: called with 1 or 2 and the unquantized input, where somebody counts.
    """

    format: str
    first: Tensor | None
    second: Tensor | None
    quantizes_input: bool = True
    watch: Callable[[int, Tensor], None] | None = None

    def quantize(self, number: int, x: Tensor) -> Tensor:
        """The input of the first or second GEMM, as that GEMM sees it."""
        if self.watch is not None:
            self.watch(number, x)
        scale = self.first if number == 1 else self.second
        return quantize_input(x, scale if self.quantizes_input else None, self.format)


class _Quantizing:
    """The experts of a layer, whose activation is followed by the second quantization."""

    def __init__(self, experts: nn.Module, inputs: ExpertInputs) -> None:
        self._experts, self._inputs = experts, inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def _apply_gate(self, x: Tensor) -> Tensor:
        return self._inputs.quantize(2, self._experts._apply_gate(x))  # type: ignore[operator]

    def act_fn(self, x: Tensor) -> Tensor:
        """Of experts without a gate; `_apply_gate` calls the module's own."""
        return self._inputs.quantize(2, self._experts.act_fn(x))  # type: ignore[operator]


def experts_forward(experts: nn.Module, hidden_tH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls for a layer's experts: index and weights [t, k] -> [t, H]."""
    inputs: ExpertInputs | None = getattr(experts, "inputs", None)
    if inputs is None:
        return grouped_mm_experts_forward(experts, hidden_tH, top_k_index, top_k_weights)
    quantizing: Any = _Quantizing(experts, inputs)
    return grouped_mm_experts_forward(quantizing, inputs.quantize(1, hidden_tH), top_k_index, top_k_weights)


def dense_experts_forward(experts: Any, hidden_states: Tensor) -> Tensor:
    """Experts that are given the tokens of all of them, weighted before they come, [E * t, H] -> [E * t, H]; what an expert does
    not compute is zero and stays so (Llama 4)."""
    inputs: ExpertInputs = experts.inputs
    x_EtH = inputs.quantize(1, hidden_states.view(experts.num_experts, -1, hidden_states.shape[-1]))
    gate, up = torch.bmm(x_EtH, experts.gate_up_proj).chunk(2, dim=-1)
    return torch.bmm(inputs.quantize(2, up * experts.act_fn(gate)), experts.down_proj).flatten(0, 1)


def quantize_experts(model: Any, experts: Mapping[str, ExpertInputs | None]) -> dict[str, ExpertInputs]:
    """Let the named experts of a model quantize their inputs, in place; None: they compute as in BF16. Scales move to the
    layer's device, unless that is meta. Returns what the layers then hold."""
    quantized: dict[str, ExpertInputs] = {}
    for name, inputs in experts.items():
        if inputs is None:
            continue
        module = model.get_submodule(name)
        parameter = next(module.parameters())
        device = None if parameter.is_meta else parameter.device
        first, second = (None if scale is None else scale.to(device=device) for scale in (inputs.first, inputs.second))
        module.inputs = quantized[name] = dataclasses.replace(inputs, first=first, second=second)
        if not hasattr(module, "is_transposed"):  # transformers has no choice of functions for it
            module.forward = functools.partial(dense_experts_forward, module)
    if quantized:
        model.set_experts_implementation(NAME)
    return quantized


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
