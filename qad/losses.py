"""Distillation losses, computed chunk by chunk so that no [tokens, vocabulary] tensor beyond one chunk ever lives.

    hidden_TH --head--> logits_tV --loss--> loss_t        for t in chunks of T

The matmul with the output head happens inside the chunk, for teacher and student, and so does the backward pass:
the gradients of the student's hidden states and head are ready when the forward pass is done, because the loss is
a sum over tokens. Matmuls run in the compute dtype, everything behind them in FP32.

A loss is a function (student_logits_tV, teacher_logits_tV) -> loss_t, both FP32, differentiable in the first.

Shape suffixes: T tokens, t tokens of one chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qad.errors import SourceError

TokenLoss = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: softcap(scale * (hidden @ weight.T + bias)).

    `scale` and `softcap` are those of the few families that have them (Granite, Cohere, Gemma).
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

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
        head = cls(output.weight, output.bias, scale, getattr(config, "final_logit_softcapping", None))
        head._verify(model)
        return head

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
        return self._finish(F.linear(hidden_tH, self.weight_VH, self.bias_V).float())

    def _finish(self, raw_tV: Tensor) -> Tensor:
        logits = raw_tV * self.scale if self.scale != 1.0 else raw_tV
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def forward_kl(student_logits_tV: Tensor, teacher_logits_tV: Tensor) -> Tensor:
    """D_KL(teacher || student) per token, nats, FP32. Never negative; exactly 0, with gradient 0, for equal logits."""
    return _ForwardKL.apply(student_logits_tV, teacher_logits_tV)


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student_tV: Tensor, teacher_tV: Tensor) -> Tensor:
        log_q, log_p = student_tV.log_softmax(-1), teacher_tV.log_softmax(-1)
        p = log_p.exp()
        # A probability that underflows contributes nothing, whatever the student says: 0 * inf would be NaN.
        difference = torch.where(p > 0, log_p - log_q, 0.0)
        ctx.save_for_backward(log_q, p)
        # Rounding can leave -1e-8 where the two agree almost everywhere; a divergence is not negative.
        return (p * difference).sum(-1).clamp(min=0.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        log_q, p = ctx.saved_tensors
        return (log_q.exp() - p) * grad_outputs[0][..., None], None


def chunked_loss(
    student_hidden_TH: Tensor,
    student: Head,
    teacher_hidden_TH: Tensor,
    teacher: Head,
    loss: TokenLoss = forward_kl,
    chunk: int = 512,
) -> Tensor:
    """Sum of a loss over all T tokens, FP32 scalar, differentiable in the student's hidden states, head weight and bias.

    Memory beyond the inputs and their gradients: a few [chunk, V] tensors.
    """
    bias = student.bias_V
    return _ChunkedLoss.apply(
        student_hidden_TH, student.weight_VH, bias, student, teacher_hidden_TH, teacher, loss, chunk
    )


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the sum in FP32 whatever the matmul's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        student: Head,
        teacher_hidden_TH: Tensor,
        teacher: Head,
        loss: TokenLoss,
        chunk: int,
    ) -> Tensor:
        needs = any(ctx.needs_input_grad[:3])
        total = torch.zeros((), device=hidden_TH.device)
        d_hidden = torch.empty_like(hidden_TH) if needs else None
        d_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if needs else None
        d_bias = torch.zeros_like(bias_V, dtype=torch.float32) if needs and bias_V is not None else None
        for start in range(0, hidden_TH.shape[0], chunk):
            part = slice(start, start + chunk)
            raw_tV = F.linear(hidden_TH[part], weight_VH, bias_V).float()
            teacher_tV = teacher.logits(teacher_hidden_TH[part])
            if d_hidden is None or d_weight is None:
                total += loss(student._finish(raw_tV), teacher_tV).sum()
                continue
            with torch.enable_grad():
                raw_tV.requires_grad_()
                value = loss(student._finish(raw_tV), teacher_tV).sum()
            (d_raw,) = torch.autograd.grad(value, raw_tV)
            total += value.detach()
            d_raw_c = d_raw.to(weight_VH.dtype)
            d_hidden[part] = d_raw_c @ weight_VH
            _accumulate(d_weight, d_raw_c.T, hidden_TH[part])
            if d_bias is not None:
                d_bias += d_raw.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtype = weight_VH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        scale = grad_outputs[0]
        bias = None if d_bias is None else (d_bias * scale).to(ctx.dtype)
        # In place: the [V, H] gradient is the largest tensor here and is used once.
        return d_hidden * scale, d_weight.mul_(scale).to(ctx.dtype), bias, None, None, None, None, None
