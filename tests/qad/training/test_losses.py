"""Token losses: known values, exact zeros, gradients; the shortened teacher."""

from __future__ import annotations

import math

import pytest
import torch

from qad.training.losses import LOSSES, TopK, at_temperature, cross_entropy, forward_kl, top_k_forward_kl

DISTANCES = ["forward_kl", "reverse_kl", "jsd", "mse"]
NO_LABELS = torch.full((8,), -100)


def logits(rows: int, vocabulary: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 5).to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_give_exactly_zero_loss_and_gradient(dtype: torch.dtype) -> None:
    teacher = logits(8, 32_000, 1, dtype)
    student = teacher.clone().requires_grad_()
    loss = forward_kl(student, teacher)
    loss.sum().backward()
    assert torch.equal(loss.detach(), torch.zeros(8))
    assert torch.equal(student.grad, torch.zeros_like(teacher))


@pytest.mark.parametrize("name", DISTANCES)
def test_every_distance_is_zero_for_equal_logits_and_never_negative(name: str) -> None:
    teacher = logits(8, 1000, 2)
    student = teacher.clone().requires_grad_()
    value = LOSSES[name](student, teacher, NO_LABELS)
    assert torch.allclose(value, torch.zeros(8), atol=1e-6)
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert grad.abs().max() < 1e-6
    near = teacher + 1e-6 * logits(8, 1000, 3)
    assert (LOSSES[name](near, teacher, NO_LABELS) >= 0).all()
    assert (LOSSES[name](logits(8, 1000, 4), teacher, NO_LABELS) > 0.1).all()


@pytest.mark.parametrize("name", DISTANCES)
def test_gradients_are_those_of_the_definition_in_float64(name: str) -> None:
    definition = {
        "forward_kl": lambda s, t: (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(),
        "reverse_kl": lambda s, t: (s.softmax(-1) * (s.log_softmax(-1) - t.log_softmax(-1))).sum(),
        "jsd": lambda s, t: _jensen_shannon(s.softmax(-1), t.softmax(-1)),
        "mse": lambda s, t: ((s - t) ** 2).sum() / s.shape[-1],
    }[name]
    teacher, student = logits(8, 300, 5), logits(8, 300, 6).requires_grad_()
    exact = student.detach().double().requires_grad_()
    wanted = definition(exact, teacher.double())
    value = LOSSES[name](student, teacher, NO_LABELS).sum()
    torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(value, student)[0].double(), torch.autograd.grad(wanted, exact)[0], rtol=1e-4, atol=5e-6
    )


def _jensen_shannon(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    m = (p + q) / 2
    return 0.5 * ((p * (p / m).log()).sum() + (q * (q / m).log()).sum())


def test_a_teacher_probability_that_underflows_contributes_nothing() -> None:
    teacher = torch.tensor([[0.0, -1e4]])
    assert torch.equal(forward_kl(torch.tensor([[0.0, -2e4]]), teacher), torch.zeros(1))
    assert torch.isfinite(forward_kl(torch.tensor([[0.0, float("-inf")]]), teacher)).all()


def test_known_values() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4)."""
    student, teacher, none = torch.tensor([[0.25, 0.75]]).log(), torch.zeros(1, 2), torch.tensor([-100])
    assert forward_kl(student, teacher).item() == pytest.approx(math.log(2) - math.log(3) / 2, abs=1e-6)
    assert LOSSES["reverse_kl"](student, teacher, none).item() == pytest.approx(0.75 * math.log(3) - math.log(2), abs=1e-6)
    assert LOSSES["jsd"](student, teacher, none).item() == pytest.approx(0.03382, abs=1e-5)
    assert cross_entropy(student, None, torch.tensor([1])).item() == pytest.approx(math.log(4 / 3), abs=1e-6)


def test_cross_entropy_skips_positions_without_a_next_token() -> None:
    student = logits(3, 50, 7).requires_grad_()
    loss = cross_entropy(student, None, torch.tensor([4, -100, 9]))
    assert loss[1].item() == 0.0
    loss.sum().backward()
    assert torch.equal(student.grad[1], torch.zeros(50))
    assert student.grad[0].abs().sum() > 0


def test_temperature_softens_both_and_keeps_the_size_of_gradients() -> None:
    student, teacher = logits(8, 100, 8), logits(8, 100, 9)
    softened = at_temperature(forward_kl, 2.0)(student, teacher, NO_LABELS)
    assert torch.equal(softened, 4.0 * forward_kl(student / 2.0, teacher / 2.0))
    assert at_temperature(forward_kl, 1.0) is forward_kl


def test_a_shortened_teacher_is_exact_at_the_whole_vocabulary_and_a_lower_bound_below() -> None:
    student, teacher = logits(8, 200, 10), logits(8, 200, 11)
    full = forward_kl(student, teacher)
    torch.testing.assert_close(top_k_forward_kl(student, TopK.of(teacher, 200)), full, rtol=1e-6, atol=1e-6)
    bounds = [top_k_forward_kl(student, TopK.of(teacher, k)) for k in (1, 4, 16, 64, 199)]
    for smaller, larger in zip(bounds, [*bounds[1:], full], strict=True):
        assert (smaller <= larger + 1e-5).all()
    assert torch.allclose(top_k_forward_kl(teacher, TopK.of(teacher, 16)), torch.zeros(8), atol=1e-6)


def test_a_shortened_teacher_keeps_all_mass() -> None:
    short = TopK.of(logits(8, 200, 12), 7)
    total = short.log_p_tK.exp().sum(-1) + short.log_tail_t.exp()
    torch.testing.assert_close(total, torch.ones(8))
    student = logits(8, 200, 13).requires_grad_()
    top_k_forward_kl(student, short).sum().backward()
    torch.testing.assert_close(student.grad.sum(-1), torch.zeros(8), rtol=0, atol=1e-5)
