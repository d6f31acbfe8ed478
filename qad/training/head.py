"""What turns hidden states into logits, read off a transformers model so that its matmul can run chunk by chunk.

Shape suffixes: t tokens of one chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qad.errors import SourceError
from qad.numerics.linear import QuantizedLinear
from qad.training.ranks.shards import gathered


def _as_it_is(hidden_tH: Tensor) -> Tensor:
    return hidden_tH


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of a head, where it is no module of a model. weight: [V, H]. bias: [V]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Head:
    """logits = softcap(scale * (quantize_input(hidden) @ weight.T + bias)), of the first `size` ids of the vocabulary.

    `scale` and `softcap` are those of the few families that have them (Granite, Cohere, Gemma). `size`: see `sharing`; None
    is the whole vocabulary. `quantize_input`: what a quantized head does to its input, differentiable.
    """

    output: nn.Linear | Weights
    scale: float = 1.0
    softcap: float | None = None
    size: int | None = None
    quantize_input: Callable[[Tensor], Tensor] = _as_it_is

    @property
    def weight_VH(self) -> Tensor:  # noqa: N802
        """As it is now: ranks that share the model replace it."""
        return self.output.weight

    @property
    def bias_V(self) -> Tensor | None:  # noqa: N802
        return self.output.bias

    @classmethod
    def of(cls, model: Any) -> Head:
        """Read a transformers causal LM's head and check on a few tokens that it reproduces the model's logits.

        Raises SourceError where it does not: such a model needs support of its own.
        """
        config, output = model.config.get_text_config(), model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise SourceError(f"{type(model).__name__} has no linear output head: QAD cannot chunk its logits")
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        quantize_input = output.quantize_input if isinstance(output, QuantizedLinear) else _as_it_is
        softcap = getattr(config, "final_logit_softcapping", None)
        head = cls(output, scale, softcap, quantize_input=quantize_input)
        gathered(model, lambda: head._verify(model))
        return head

    def sharing(self, size: int) -> Head:
        """The same head over ids 0 .. size-1: rows beyond (padding of another model's vocabulary) take no part in
        the softmax and get no gradient."""
        return self if size == self.weight_VH.shape[0] else dataclasses.replace(self, size=size)

    @torch.no_grad()
    def _verify(self, model: Any) -> None:
        probe = torch.arange(8, device=self.weight_VH.device)[None] % self.weight_VH.shape[0]
        expected = model(probe, use_cache=False).logits[0].float()
        actual = self.logits(model.base_model(probe, use_cache=False).last_hidden_state[0])
        if not torch.allclose(actual, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
            raise SourceError(
                f"{type(model).__name__} computes its logits in a way this tool does not know (a scale or cap "
                "after the head): QAD would distil the wrong distribution"
            )

    def logits(self, hidden_tH: Tensor) -> Tensor:
        """FP32 logits [t, V]."""
        return self.finish(self.raw(self.quantize_input(hidden_tH)))

    def raw(self, hidden_tH: Tensor) -> Tensor:
        """The matmul alone, of what `quantize_input` returned, in the compute dtype."""
        bias = None if self.bias_V is None else self.bias_V[: self.size]
        return F.linear(hidden_tH, self.weight_VH[: self.size], bias)

    def finish(self, raw_tV: Tensor) -> Tensor:
        """Widened to FP32, scaled and capped, differentiable."""
        raw_tV = raw_tV.float()
        logits = raw_tV * self.scale if self.scale != 1.0 else raw_tV
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
