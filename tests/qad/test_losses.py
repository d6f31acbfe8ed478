"""The KL: dense equals chunked, never negative, exactly zero for equal logits; the head of every known kind."""

from __future__ import annotations

import pytest
import torch

from qad.losses import Head, chunked_loss, forward_kl

T, V, H = 37, 512, 32


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "student_hidden": torch.randn(T, H, generator=g).requires_grad_(),
        "student_head": torch.randn(V, H, generator=g).requires_grad_(),
        "teacher_hidden": torch.randn(T, H, generator=g),
        "teacher_head": torch.randn(V, H, generator=g),
    }


def dense(t: dict[str, torch.Tensor]) -> torch.Tensor:
    """The definition, in float64."""
    log_p = (t["teacher_hidden"].double() @ t["teacher_head"].double().T).log_softmax(-1)
    log_q = (t["student_hidden"].double() @ t["student_head"].double().T).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 100])
def test_chunked_equals_dense_in_loss_and_gradient(chunk: int) -> None:
    t = tensors()
    loss = chunked_loss(
        t["student_hidden"], Head(t["student_head"]), t["teacher_hidden"], Head(t["teacher_head"]), chunk=chunk
    )
    (loss / T).backward()
    expected = dense(t)
    grads = torch.autograd.grad(expected / T, (t["student_hidden"], t["student_head"]))
    torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(t["student_hidden"].grad, grads[0].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(t["student_head"].grad, grads[1].float(), rtol=1e-4, atol=1e-6)


def test_without_gradient_the_value_is_the_same() -> None:
    t = tensors()
    heads = Head(t["student_head"]), Head(t["teacher_head"])
    with_grad = chunked_loss(t["student_hidden"], heads[0], t["teacher_hidden"], heads[1], chunk=8)
    with torch.no_grad():
        without = chunked_loss(t["student_hidden"], heads[0], t["teacher_hidden"], heads[1], chunk=8)
    assert torch.equal(with_grad.detach(), without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_give_exactly_zero_loss_and_gradient(dtype: torch.dtype) -> None:
    logits = (torch.randn(8, 32_000, generator=torch.Generator().manual_seed(1)) * 5).to(dtype).float()
    student = logits.clone().requires_grad_()
    loss = forward_kl(student, logits)
    loss.sum().backward()
    assert torch.equal(loss.detach(), torch.zeros(8))
    assert torch.equal(student.grad, torch.zeros_like(logits))


def test_nearly_equal_logits_never_give_a_negative_loss() -> None:
    logits = torch.randn(256, 32_000, generator=torch.Generator().manual_seed(2)) * 5
    noise = torch.randn(256, 32_000, generator=torch.Generator().manual_seed(3)) * 1e-6
    assert (forward_kl(logits + noise, logits) >= 0).all()


def test_a_teacher_probability_that_underflows_contributes_nothing() -> None:
    teacher = torch.tensor([[0.0, -1e4]])
    assert torch.equal(forward_kl(torch.tensor([[0.0, -2e4]]), teacher), torch.zeros(1))
    assert torch.isfinite(forward_kl(torch.tensor([[0.0, float("-inf")]]), teacher)).all()


def test_known_value() -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) = ln 2 - ln 3 / 2."""
    student = torch.tensor([[0.25, 0.75]]).log()
    assert forward_kl(student, torch.zeros(1, 2)).item() == pytest.approx(0.143841, abs=1e-6)


def test_bias_scale_and_softcap_are_differentiated() -> None:
    t = tensors(4)
    bias = torch.randn(V, generator=torch.Generator().manual_seed(5)).requires_grad_()
    head = Head(t["student_head"], bias, scale=0.5, softcap=10.0)
    loss = chunked_loss(t["student_hidden"], head, t["teacher_hidden"], Head(t["teacher_head"]), chunk=16)
    loss.backward()
    raw = (t["student_hidden"] @ t["student_head"].T + bias) * 0.5
    expected = forward_kl(10.0 * torch.tanh(raw / 10.0), t["teacher_hidden"] @ t["teacher_head"].T).sum()
    grads = torch.autograd.grad(expected, (t["student_hidden"], t["student_head"], bias))
    for actual, wanted in zip((t["student_hidden"].grad, t["student_head"].grad, bias.grad), grads, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_no_tensor_of_tokens_times_vocabulary_outlives_a_chunk() -> None:
    """Everything that autograd keeps for the backward pass is of the size of hidden states and head."""
    t = tensors()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        chunked_loss(
            t["student_hidden"], Head(t["student_head"]), t["teacher_hidden"], Head(t["teacher_head"]), chunk=4
        )
    assert kept
    assert max(kept) == V * H < T * V
