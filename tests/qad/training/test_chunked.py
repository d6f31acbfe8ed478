"""The loss over chunks: equal to the dense one, whatever the chunk; nothing of [tokens, vocabulary] outlives a chunk."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from qad.training import chunked
from qad.training.chunked import CachedTopK, NoTeacher, TeacherLogits, chunked_loss, loss_bytes
from qad.training.head import Head, Weights
from qad.training.losses import LOSSES, TopK, cross_entropy, forward_kl, top_k_forward_kl

T, V, H = 37, 512, 32


def head_of(weight_VH: torch.Tensor, bias_V: torch.Tensor | None = None, **settings: float) -> Head:
    return Head(Weights(weight_VH, bias_V), **settings)


@dataclasses.dataclass
class Case:
    student: torch.Tensor
    student_head: torch.Tensor
    teacher: torch.Tensor
    teacher_head: torch.Tensor

    @property
    def targets(self) -> TeacherLogits:
        return TeacherLogits(self.teacher, head_of(self.teacher_head))

    def dense(self) -> torch.Tensor:
        """The definition, in float64."""
        log_p = (self.teacher.double() @ self.teacher_head.double().T).log_softmax(-1)
        log_q = (self.student.double() @ self.student_head.double().T).log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum()


def case(seed: int = 0, tokens: int = T, vocabulary: int = V) -> Case:
    g = torch.Generator().manual_seed(seed)
    sizes = [(tokens, H), (vocabulary, H), (tokens, H), (vocabulary, H)]
    student, student_head, teacher, teacher_head = (torch.randn(*size, generator=g) * 0.5 for size in sizes)
    return Case(student.requires_grad_(), student_head.requires_grad_(), teacher, teacher_head)


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 100])
def test_chunked_equals_dense_in_loss_and_gradient(chunk: int) -> None:
    c = case()
    loss = chunked_loss(c.student, head_of(c.student_head), c.targets, chunk=chunk)
    (loss / T).backward()
    expected = c.dense()
    grads = torch.autograd.grad(expected / T, (c.student, c.student_head))
    torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(c.student.grad, grads[0].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(c.student_head.grad, grads[1].float(), rtol=1e-4, atol=1e-6)


def test_c5_chunked_equals_dense_at_a_wide_vocabulary_and_keeps_nothing_of_its_width() -> None:
    """V=4096, T=512."""
    c = case(1, tokens=512, vocabulary=4096)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        loss = chunked_loss(c.student, head_of(c.student_head), c.targets, chunk=64)
    assert sum(shape == (32, 4096) for shape in kept) == 2 * 16  # log_q and p, freed chunk by chunk
    assert {tuple(shape) for shape in kept} == {(32, 4096), (512, H), (4096, H)}
    (loss / 512).backward()
    expected = c.dense()
    grads = torch.autograd.grad(expected / 512, (c.student, c.student_head))
    torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(c.student.grad, grads[0].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(c.student_head.grad, grads[1].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_how_many_tokens_are_in_fp32_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (1000, 64, 5):
        monkeypatch.setattr(chunked, "ROWS", rows)
        c = case(2, tokens=131)
        student, head = (tensor.detach().to(dtype).requires_grad_() for tensor in (c.student, c.student_head))
        targets = TeacherLogits(c.teacher.to(dtype), head_of(c.teacher_head.to(dtype)))
        loss = chunked_loss(student, head_of(head), targets, chunk=100)
        loss.backward()
        found.append((loss.detach(), student.grad, head.grad))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_without_gradient_the_value_is_the_same() -> None:
    c = case()
    with_grad = chunked_loss(c.student, head_of(c.student_head), c.targets, chunk=8)
    with torch.no_grad():
        without = chunked_loss(c.student, head_of(c.student_head), c.targets, chunk=8)
    assert torch.equal(with_grad.detach(), without)


def test_bias_scale_and_softcap_are_differentiated() -> None:
    c = case(4)
    bias = torch.randn(V, generator=torch.Generator().manual_seed(5)).requires_grad_()
    head = head_of(c.student_head, bias, scale=0.5, softcap=10.0)
    chunked_loss(c.student, head, c.targets, chunk=16).backward()
    raw = (c.student @ c.student_head.T + bias) * 0.5
    expected = forward_kl(10.0 * torch.tanh(raw / 10.0), c.teacher @ c.teacher_head.T).sum()
    grads = torch.autograd.grad(expected, (c.student, c.student_head, bias))
    for actual, wanted in zip((c.student.grad, c.student_head.grad, bias.grad), grads, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "forward_kl"])
def test_every_loss_runs_in_chunks(name: str) -> None:
    c = case(6)
    labels = torch.arange(T) % V
    chunked_loss(c.student, head_of(c.student_head), c.targets, labels, LOSSES[name], chunk=8).backward()
    expected = LOSSES[name](c.student @ c.student_head.T, c.teacher @ c.teacher_head.T, labels).sum()
    grads = torch.autograd.grad(expected, (c.student, c.student_head))
    torch.testing.assert_close(c.student.grad, grads[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(c.student_head.grad, grads[1], rtol=1e-4, atol=1e-5)


def test_labels_alone_need_no_teacher_and_a_cache_replaces_it() -> None:
    c = case(7)
    labels = torch.arange(T) % V
    loss = chunked_loss(c.student, head_of(c.student_head), NoTeacher(), labels, cross_entropy, chunk=8)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(c.student @ c.student_head.T, labels) * T)
    cached = CachedTopK(TopK.of(c.teacher @ c.teacher_head.T, V))
    loss = chunked_loss(c.student, head_of(c.student_head), cached, None, top_k_forward_kl, chunk=8)
    torch.testing.assert_close(loss, c.dense().float(), rtol=1e-5, atol=0)


def test_a_frozen_head_costs_no_gradient() -> None:
    c = case(8)
    chunked_loss(c.student, head_of(c.student_head.detach()), c.targets, chunk=8).backward()
    trained = case(8)
    chunked_loss(trained.student, head_of(trained.student_head), trained.targets, chunk=8).backward()
    assert torch.equal(c.student.grad, trained.student.grad)


def test_c1_rows_beyond_the_shared_vocabulary_take_no_part_and_get_no_gradient() -> None:
    """Teacher V=576, student V=512, tokenizer of 500."""
    c = case(9)
    teacher_head = torch.randn(576, H, generator=torch.Generator().manual_seed(10)) * 0.5
    targets = TeacherLogits(c.teacher, head_of(teacher_head).sharing(500))
    loss = chunked_loss(c.student, head_of(c.student_head).sharing(500), targets, chunk=8)
    loss.backward()
    expected = forward_kl((c.student @ c.student_head.T)[:, :500], (c.teacher @ teacher_head.T)[:, :500]).sum()
    grads = torch.autograd.grad(expected, (c.student, c.student_head))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(c.student.grad, grads[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(c.student_head.grad, grads[1], rtol=1e-4, atol=1e-5)
    assert torch.equal(c.student_head.grad[500:], torch.zeros(12, H))


_PEAK = """
import resource, sys, torch
from qad.training.chunked import TeacherLogits, chunked_loss
from qad.training.head import Head, Weights
tokens, vocabulary, hidden, chunk = {tokens}, 151_936, 64, {chunk}
torch.set_num_threads(2)
def head_of(weight):
    return Head(Weights(weight))
g = torch.Generator().manual_seed(0)
def make(*shape):
    return torch.empty(*shape).normal_(generator=g).to(torch.{dtype})
student, teacher = make(tokens, hidden).requires_grad_(), make(tokens, hidden)
weight, teacher_weight = make(vocabulary, hidden).requires_grad_(), make(vocabulary, hidden)
warm = chunked_loss(student[:1], head_of(weight[:64]), TeacherLogits(teacher[:1], head_of(teacher_weight[:64])), chunk=1)
warm.backward(); weight.grad = student.grad = None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chunked_loss(student, head_of(weight), TeacherLogits(teacher, head_of(teacher_weight)), chunk=chunk).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def _peak_growth(tokens: int, chunk: int, dtype: str) -> int:
    script = _PEAK.format(tokens=tokens, chunk=chunk, dtype=dtype)
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed is no part of the peak, as in a rank
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=given_back)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "dtype", "width"), [(64, "float32", 4), (512, "bfloat16", 2)])
def test_c5_a_step_at_4096_tokens_and_151936_ids_fits_in_its_chunk(chunk: int, dtype: str, width: int) -> None:
    """The process's own peak: what is planned, and 15 %. With tokens grow hidden states and their gradients, not [tokens, V]."""
    tokens, vocabulary, hidden = 4096, 151_936, 64
    whole, eighth = _peak_growth(tokens, chunk, dtype), _peak_growth(tokens // 8, chunk, dtype)
    assert whole < 1.15 * loss_bytes(vocabulary, hidden, chunk, width) + 2 * tokens * hidden * width
    assert whole - eighth < 4 * tokens * hidden * 4 + (48 << 20)
