"""The loss over many tokens, chunk by chunk, so that no [tokens, vocabulary] tensor beyond one chunk ever lives.

    hidden_TH --head--> logits_tV --loss--> loss_t        for t in chunks of T

The matmul with the output head happens inside the chunk, for teacher and student, and so does the backward pass:
the gradients of the student's hidden states and head are ready when the forward pass is done, because the loss is
a sum over tokens. Matmuls run in the compute dtype, everything behind them in FP32.

Shape suffixes: T tokens, t tokens of one chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from qad.training.head import Head
from qad.training.losses import TokenLoss, TopK, forward_kl

LIVE = 5  # FP32 [chunk, V] tensors of the KL that live at one time (tests/qad/training/test_chunked.py)
_GPU_BYTES = 4 << 30


def default_chunk(device: str, vocabulary: int) -> int:
    """Tokens of a chunk where the recipe does not say: on a GPU the more the better, as every chunk adds to an FP32 gradient
    [V, H]; on a CPU few take no longer than many, and less memory."""
    if device == "cpu":
        return 128
    return max(512, _GPU_BYTES // (4 * LIVE * vocabulary) // 256 * 256)


class Targets(Protocol):
    """What a chunk of tokens is compared with: a token loss's second argument."""

    def part(self, tokens: slice) -> Any: ...


@dataclasses.dataclass(frozen=True)
class TeacherLogits:
    """A teacher's final hidden states and head; its logits exist one chunk at a time."""

    hidden_TH: Tensor
    head: Head

    def part(self, tokens: slice) -> Tensor:
        """FP32 logits [t, V]."""
        return self.head.logits(self.hidden_TH[tokens])


@dataclasses.dataclass(frozen=True)
class CachedTopK:
    """A teacher's shortened distributions for all T tokens."""

    whole: TopK

    def part(self, tokens: slice) -> TopK:
        return TopK(*(getattr(self.whole, field.name)[tokens] for field in dataclasses.fields(TopK)))


class NoTeacher:
    """For losses on labels alone."""

    def part(self, tokens: slice) -> None:
        return None


def chunked_loss(
    student_hidden_TH: Tensor,
    student: Head,
    targets: Targets,
    labels_T: Tensor | None = None,
    loss: TokenLoss = forward_kl,
    chunk: int = 512,
) -> Tensor:
    """Sum of a loss over all T tokens, FP32 scalar, differentiable in the student's hidden states, head weight and bias.

    Memory beyond the inputs and their gradients: the few [chunk, V] tensors of the loss.
    """
    labels_T = torch.full((student_hidden_TH.shape[0],), -100) if labels_T is None else labels_T
    arguments = (student, targets, labels_T.to(student_hidden_TH.device), loss, chunk)
    return _ChunkedLoss.apply(student.quantize_input(student_hidden_TH), student.weight_VH, student.bias_V, *arguments)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *arguments: Any) -> Tensor:
        student, targets, labels_T, loss, chunk = arguments
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs = needs_hidden or needs_weight or needs_bias
        total = torch.zeros((), device=hidden_TH.device)
        d_hidden = torch.empty_like(hidden_TH) if needs_hidden else None
        d_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and needs_bias else None
        for start in range(0, hidden_TH.shape[0], chunk):
            part = slice(start, start + chunk)
            value, d_raw_tV = _chunk(student.raw(hidden_TH[part]), student, targets.part(part), labels_T[part], loss, needs)
            total += value
            if d_raw_tV is None:
                continue
            d_raw_c = d_raw_tV.to(weight_VH.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_raw_c @ weight_VH[: student.size]
            if d_weight is not None:
                _accumulate(d_weight[: student.size], d_raw_c.T, hidden_TH[part])
            if d_bias is not None:
                d_bias[: student.size] += d_raw_tV.sum(0)
            del d_raw_tV, d_raw_c  # before the next chunk's logits exist
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtype = weight_VH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        scale = grad_outputs[0]
        hidden = None if d_hidden is None else d_hidden * scale
        # In place: the [V, H] gradient is the largest tensor here and is used once.
        weight = None if d_weight is None else d_weight.mul_(scale).to(ctx.dtype)
        bias = None if d_bias is None else (d_bias * scale).to(ctx.dtype)
        return hidden, weight, bias, None, None, None, None, None


def _chunk(
    raw_tV: Tensor, student: Head, teacher: Any, labels_t: Tensor, loss: TokenLoss, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The chunk's summed loss and, where needed, its gradient in the raw logits. All else is freed on return."""
    if not needs_grad:
        return loss(student.finish(raw_tV), teacher, labels_t).sum(), None
    with torch.enable_grad():
        raw_tV.requires_grad_()
        value = loss(student.finish(raw_tV), teacher, labels_t).sum()
    (d_raw_tV,) = torch.autograd.grad(value, raw_tV)
    return value.detach(), d_raw_tV


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the sum in FP32 whatever the matmul's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
