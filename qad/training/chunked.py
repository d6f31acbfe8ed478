"""The loss over many tokens, chunk by chunk, so that no [tokens, vocabulary] tensor beyond one chunk ever lives.

    hidden_TH --head--> logits_tV --loss--> loss_t        for t in chunks of T

The matmul with the output head happens inside the chunk, for teacher and student, and so does the backward pass:
the gradients of the student's hidden states and head are ready when the forward pass is done, because the loss is
a sum over tokens. Matmuls run in the compute dtype, everything behind them in FP32, a few tokens of the chunk at a time: what
lives of a whole chunk are both models' logits in the compute dtype, and the gradient takes the student's place.

Shape suffixes: T tokens, t tokens of one chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from qad.training.head import Head
from qad.training.losses import TokenLoss, TopK, forward_kl

ROWS = 32  # tokens of a chunk whose loss is computed at one time; no bit depends on it
LIVE = 5  # FP32 [ROWS, V] tensors of the KL that live at one time (tests/qad/training/test_chunked.py)
_GPU_BYTES = 1 << 30  # of both models' BF16 logits


def default_chunk(device: str, vocabulary: int) -> int:
    """Tokens of a chunk where the recipe does not say: on a GPU the more the better, as every chunk adds to an FP32 gradient
    [V, H]; on a CPU few take no longer than many, and less memory."""
    if device == "cpu":
        return 128
    return max(512, _GPU_BYTES // (4 * vocabulary) // 256 * 256)


def loss_bytes(vocabulary: int, hidden: int, chunk: int, width: int) -> float:
    """Peak of the loss with the gradient of a head [V, H]: in FP32, and what a chunk adds to it in the compute dtype. chunk:
    tokens. width: bytes of the compute dtype."""
    added = width if width < 4 else 0
    return float(vocabulary * (2 * width * chunk + 4 * LIVE * min(ROWS, chunk) + (4 + added) * hidden))


class Targets(Protocol):
    """What a chunk of tokens is compared with: of any of its rows, a token loss's second argument."""

    def part(self, tokens: slice) -> Callable[[slice], Any]: ...


@dataclasses.dataclass(frozen=True)
class TeacherLogits:
    """A teacher's final hidden states and head; its logits exist one chunk at a time."""

    hidden_TH: Tensor
    head: Head

    def part(self, tokens: slice) -> Callable[[slice], Tensor]:
        """FP32 logits [t, V]."""
        raw_tV = self.head.raw(self.head.quantize_input(self.hidden_TH[tokens]))
        return lambda rows: self.head.finish(raw_tV[rows])


@dataclasses.dataclass(frozen=True)
class CachedTopK:
    """A teacher's shortened distributions for all T tokens."""

    whole: TopK

    def part(self, tokens: slice) -> Callable[[slice], TopK]:
        parts = [getattr(self.whole, field.name)[tokens] for field in dataclasses.fields(TopK)]
        return lambda rows: TopK(*(part[rows] for part in parts))


class NoTeacher:
    """For losses on labels alone."""

    def part(self, tokens: slice) -> Callable[[slice], None]:
        return lambda rows: None


def chunked_loss(
    student_hidden_TH: Tensor,
    student: Head,
    targets: Targets,
    labels_T: Tensor | None = None,
    loss: TokenLoss = forward_kl,
    chunk: int = 512,
) -> Tensor:
    """Sum of a loss over all T tokens, FP32 scalar, differentiable in the student's hidden states, head weight and bias.

    Memory beyond the inputs and their gradients: `loss_bytes`.
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
            raw_tV = student.raw(hidden_TH[part])
            total += _chunk(raw_tV, student, targets.part(part), labels_T[part], loss, needs, d_bias)
            if d_hidden is not None:
                d_hidden[part] = raw_tV @ weight_VH[: student.size]
            if d_weight is not None:
                _accumulate(d_weight[: student.size], raw_tV.T, hidden_TH[part])
            del raw_tV  # before the next chunk's logits exist
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
    raw_tV: Tensor,
    student: Head,
    teacher: Callable[[slice], Any],
    labels_t: Tensor,
    loss: TokenLoss,
    needs_grad: bool,
    d_bias: Tensor | None,
) -> Tensor:
    """The chunk's summed loss. Where needed its gradient replaces the raw logits, and that of the bias is added to `d_bias`."""
    tokens = len(raw_tV)
    # Of a bias the sum over tokens is one of the chunk; rows of nearly equal number, as a lone one would be summed otherwise.
    count = 1 if d_bias is not None else -(-tokens // ROWS)
    ends, values = [tokens * number // count for number in range(count + 1)], []
    for rows in (slice(start, end) for start, end in itertools.pairwise(ends)):
        with torch.set_grad_enabled(needs_grad):
            part_rV = raw_tV[rows].float().detach().requires_grad_(needs_grad)
            values.append(loss(student.finish(part_rV), teacher(rows), labels_t[rows]))
        if needs_grad:
            (d_part_rV,) = torch.autograd.grad(values[-1], part_rV, torch.ones_like(values[-1]))
            values[-1] = values[-1].detach()
            raw_tV[rows] = d_part_rV
            if d_bias is not None:
                d_bias[: student.size] += d_part_rV.sum(0)
    return torch.cat(values).sum()


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the sum in FP32 whatever the matmul's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
