"""Losses of one token: what the student's next-token distribution is compared with, and how.

A loss is a function (student_logits_tV, teacher, labels_t) -> loss_t, FP32, differentiable in the first argument. It
uses what it needs of the other two: `teacher` holds the teacher's FP32 logits [t, V] (or its `TopK`), `labels_t` the
int64 ids of the true next tokens, -100 where there is none. A new one is a function and a line in LOSSES; its
logits are those of one chunk of tokens (qad.training.chunked), so it may use a few tensors of their size.

Shape suffixes: t tokens of one chunk, V vocabulary, K kept ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TokenLoss = Callable[[Tensor, Any, Tensor], Tensor]


def forward_kl(student_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor | None = None) -> Tensor:
    """D_KL(teacher || student), nats. Never negative; exactly 0, with gradient 0, for equal logits.

    Source: arXiv 2601.20088, equation 1.
    """
    return _ForwardKL.apply(student_tV, teacher_tV)


def reverse_kl(student_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor | None = None) -> Tensor:
    """D_KL(student || teacher), nats: punishes mass where the teacher has none."""
    log_q, log_p = student_tV.log_softmax(-1), teacher_tV.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1).clamp(min=0.0)


def jensen_shannon(student_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor | None = None) -> Tensor:
    """Mean of the KLs of both to their mixture, nats, at most ln 2."""
    log_q, log_p = student_tV.log_softmax(-1), teacher_tV.log_softmax(-1)
    log_m = torch.logaddexp(log_q, log_p) - math.log(2.0)
    divergence = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return (0.5 * divergence.sum(-1)).clamp(min=0.0)


def logit_mse(student_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor | None = None) -> Tensor:
    """Mean squared difference of the logits over the vocabulary."""
    return (student_tV - teacher_tV).square().mean(-1)


def cross_entropy(student_tV: Tensor, teacher: Any, labels_t: Tensor) -> Tensor:
    """-log q(next token), nats, 0 where there is no next token: quantization-aware training (QAT), no teacher."""
    return F.cross_entropy(student_tV, labels_t, reduction="none", ignore_index=-100)


LOSSES: dict[str, TokenLoss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "mse": logit_mse,
    "cross_entropy": cross_entropy,
}


def at_temperature(loss: TokenLoss, temperature: float) -> TokenLoss:
    """The loss of softened distributions, times T^2 so that gradients keep their size (Hinton et al., 2015)."""
    if temperature == 1.0:
        return loss

    def softened(student_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor) -> Tensor:
        return loss(student_tV / temperature, teacher_tV / temperature, labels_t) * temperature**2

    return softened


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student_tV: Tensor, teacher_tV: Tensor) -> Tensor:
        log_q, log_p = student_tV.log_softmax(-1), teacher_tV.log_softmax(-1)
        p = log_p.exp()
        ctx.save_for_backward(log_q, p)
        # In place: at most three tensors of a chunk's size live here. A probability that underflows contributes
        # nothing, whatever the student says: 0 * inf would be NaN.
        summand = log_p.sub_(log_q).masked_fill_(p == 0, 0.0).mul_(p)
        # Rounding can leave -1e-8 where the two agree almost everywhere; a divergence is not negative.
        return summand.sum(-1).clamp(min=0.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        log_q, p = ctx.saved_tensors
        return log_q.exp().sub_(p).mul_(grad_outputs[0][..., None]), None


@dataclasses.dataclass(frozen=True)
class TopK:
    """A teacher's distribution, shortened: FP32 log-probabilities of its K likeliest ids and of all the rest together.

    log_p_tK FP32, ids_tK int64, log_tail_t FP32 (-inf where nothing is left).
    """

    log_p_tK: Tensor
    ids_tK: Tensor
    log_tail_t: Tensor

    @classmethod
    def of(cls, logits_tV: Tensor, k: int) -> TopK:
        log_p_tV = logits_tV.float().log_softmax(-1)
        log_p_tK, ids_tK = log_p_tV.topk(min(k, log_p_tV.shape[-1]), dim=-1, sorted=True)
        rest = log_p_tV.scatter(-1, ids_tK, -math.inf)
        return cls(log_p_tK, ids_tK, rest.logsumexp(-1))


def top_k_forward_kl(student_tV: Tensor, teacher: TopK, labels_t: Tensor | None = None) -> Tensor:
    """D_KL over K + 1 outcomes: the teacher's K likeliest ids, and "any other". A lower bound of the full KL (data
    processing inequality), equal to it at K = V; its gradient vanishes where the distributions are equal."""
    log_q = student_tV.log_softmax(-1)
    kept = log_q.gather(-1, teacher.ids_tK)
    rest = log_q.scatter(-1, teacher.ids_tK, -math.inf).logsumexp(-1)
    p, p_tail = teacher.log_p_tK.exp(), teacher.log_tail_t.exp()
    tail = torch.where(p_tail > 0, p_tail * (teacher.log_tail_t - rest), 0.0)
    head = torch.where(p > 0, p * (teacher.log_p_tK - kept), 0.0)
    return (head.sum(-1) + tail).clamp(min=0.0)
