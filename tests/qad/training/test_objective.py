"""What is trained towards and judged by: masks, padding, vocabularies, accumulation; no activation rounding in the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from padding import padded

from qad.arms.arm import open_arm, write_arm
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.errors import DataError
from qad.model.loader import load_model, load_skeleton, load_tokenizer
from qad.model.source import Checkpoint, open_checkpoint
from qad.recipes.job import shared_vocabulary
from qad.recipes.recipe import Train
from qad.text.windows import Windows
from qad.training.objective import Objective
from qad.training.student import Student


@pytest.fixture(scope="module")
def source(tiny_llama_dir: Path) -> Checkpoint:
    return open_checkpoint(tiny_llama_dir)


def make_student(source: Checkpoint, folder: Path, trainable: set[str] | None = None) -> Student:
    """W4A16, so that sums are reproducible to rounding; the noise floor of W4A4 is another matter."""
    if not folder.exists():
        selection = select(load_skeleton(source), "W4A16_NVFP4")
        run_stage("arm", folder, {}, {}, lambda f: write_arm(f, "ptq", source, selection, {}))
    return Student(open_arm(folder), load_model(source, "float32", "cpu"), trainable)


def config(**values: object) -> Train:
    return Train.model_validate({"data": "python-docs", "tokens": 512, "seq_len": 32, "chunk": 16, **values})


def make_objective(student: Student, source: Checkpoint, method: str = "qad", **values: object) -> Objective:
    teacher = load_model(source, "float32", "cpu")
    return Objective(student.model, teacher, config(**values), method, teacher.config.vocab_size)


def windows(rows: int = 4, tokens: int = 32, supervised: torch.Tensor | None = None) -> Windows:
    """Two documents a window, of uneven length."""
    ids = torch.randint(3, 500, (rows, tokens), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.cat([torch.arange(5 + row), torch.arange(tokens - 5 - row)]) for row in range(rows)])
    return Windows.of(ids, positions, supervised)


def gradients(student: Student, objective: Objective, w: Windows, micro: int) -> tuple[float, dict[str, torch.Tensor]]:
    """As the trainer does it: normalised by the counted tokens of the whole step."""
    counted, total = int(w.counted_ST.sum()), 0.0
    for index in torch.arange(len(w)).split(micro):
        loss = objective.loss(w, index) / counted
        loss.backward()
        total += loss.item()
    grads = {name: master.grad.clone() for name, master in student.masters.items()}
    for master in student.masters.values():
        master.grad = None
    return total, grads


def assert_same(a: tuple[float, dict[str, torch.Tensor]], b: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert a[0] == pytest.approx(b[0], rel=1e-6)
    for name, grad in a[1].items():
        torch.testing.assert_close(grad, b[1][name], rtol=0, atol=1e-6 * max(1.0, float(grad.abs().max())), msg=name)


@pytest.fixture
def student(source: Checkpoint, tmp_path: Path) -> Student:
    return make_student(source, tmp_path / "arm")


@pytest.mark.parametrize("method", ["qad", "qat"])
def test_c3_accumulation_changes_neither_loss_nor_gradient(student: Student, source: Checkpoint, method: str) -> None:
    """Batch 4 x 1 and 1 x 4, windows of uneven supervision, so that a mean of means would differ."""
    supervised = torch.rand(4, 32, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.1], [0.3], [0.6], [0.9]])
    objective, w = make_objective(student, source, method), windows(supervised=supervised)
    assert len({int(n) for n in w.counted_ST.sum(-1)}) == 4
    whole, parts = gradients(student, objective, w, 4), gradients(student, objective, w, 1)
    assert_same(whole, parts)
    means = [objective.loss(w, torch.tensor([i])).item() / int(w.counted_ST[i].sum()) for i in range(4)]
    assert abs(sum(means) / 4 - whole[0]) > 1e-3 * whole[0]


def test_c3_two_ranks_sum_to_the_whole(student: Student, source: Checkpoint) -> None:
    """Each rank takes its part of the step's windows and divides by the count of all ranks; gradients are summed."""
    supervised = torch.rand(4, 32, generator=torch.Generator().manual_seed(1)) < 0.4
    objective, w = make_objective(student, source), windows(supervised=supervised)
    whole = gradients(student, objective, w, 4)
    for rank in range(2):
        (objective.loss(w, w.indices(1, 4, 0, rank, ranks=2)) / w.counted).backward()
    assert_same(whole, (whole[0], {name: master.grad for name, master in student.masters.items()}))


@pytest.mark.parametrize(("left", "right"), [(64, 0), (0, 64), (64, 64)])
@pytest.mark.parametrize("method", ["qad", "qat"])
def test_c2_padding_changes_neither_loss_nor_gradient(
    student: Student, source: Checkpoint, left: int, right: int, method: str
) -> None:
    """0 or 64 extra padding tokens on either side."""
    objective, w = make_objective(student, source, method), windows()
    assert_same(gradients(student, objective, w, 4), gradients(student, objective, padded(w, left, right, 0), 4))


def test_c9_a_micro_batch_without_a_supervised_token_contributes_nothing(student: Student, source: Checkpoint) -> None:
    """One fully masked window among good ones."""
    whole = windows()
    counted = whole.counted_ST.clone()
    counted[2] = False
    objective, w = make_objective(student, source), dataclasses.replace(whole, counted_ST=counted)
    loss = objective.loss(w, torch.tensor([2]))
    assert loss.item() == 0.0
    loss.backward()
    assert all(torch.equal(m.grad, torch.zeros_like(m)) for m in student.masters.values())
    for master in student.masters.values():
        master.grad = None
    kept = [0, 1, 3]
    without = Windows.of(w.input_ids_ST[kept], w.position_ids_ST[kept])
    assert_same(gradients(student, objective, w, 1), gradients(student, objective, without, 1))


def test_only_counted_positions_are_evaluated(student: Student, source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    supervised = torch.zeros(4, 32, dtype=torch.bool)
    supervised[:, 20:24] = True
    objective, w = make_objective(student, source), windows(supervised=supervised)
    rows = []
    loss = objective.token_loss
    monkeypatch.setattr(objective, "token_loss", lambda s, t, labels: rows.append(len(s)) or loss(s, t, labels))
    objective.loss(w, torch.arange(4))
    assert sum(rows) == w.counted == 16


def test_c1_the_shared_vocabulary_is_that_of_the_tokenizer_where_padding_differs(tiny_llama_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama_dir)
    known = max(tokenizer.get_vocab().values()) + 1
    assert shared_vocabulary(tokenizer, tokenizer, 512, 512) == 512
    assert shared_vocabulary(tokenizer, tokenizer, 512, 576) == min(known, 512)


@dataclasses.dataclass
class FakeTokenizer:
    vocabulary: dict[str, int]

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def test_c1_an_id_with_two_meanings_is_an_error() -> None:
    ours = FakeTokenizer({"a": 0, "b": 1, "c": 2})
    with pytest.raises(DataError, match="id 1 is 'b' for the student and 'x' for the teacher"):
        shared_vocabulary(ours, FakeTokenizer({"a": 0, "x": 1, "c": 2}), 4, 8)
    with pytest.raises(DataError, match="needs the student's tokenizer"):
        shared_vocabulary(ours, FakeTokenizer({"a": 0, "c": 1, "b": 3}), 4, 8)
    assert shared_vocabulary(ours, FakeTokenizer({"a": 0, "b": 1, "c": 2, "d": 3}), 4, 8) == 3


def test_frozen_parameters_get_no_gradient_and_cost_none(source: Checkpoint, tmp_path: Path) -> None:
    trainable = {"model.layers.1.mlp.down_proj.weight"}
    student = make_student(source, tmp_path / "arm", trainable)
    objective = make_objective(student, source)
    objective.loss(windows(), torch.arange(4)).backward()
    assert {name for name, master in student.masters.items() if master.grad is not None} == trainable
    assert {name for name, p in student.model.named_parameters() if p.requires_grad} == trainable


def test_activation_checkpointing_gives_the_same_bits_without_dropout(source: Checkpoint, tmp_path: Path) -> None:
    w, results = windows(), []
    for checkpointing in (False, True):
        student = make_student(source, tmp_path / "arm")
        if checkpointing:
            student.checkpoint_activations()
        results.append(gradients(student, make_objective(student, source), w, 4))
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            student.model.base_model(w.input_ids_ST, position_ids=w.position_ids_ST, use_cache=False)
        results.append(sum(kept))
    assert results[0][0] == results[2][0]
    assert all(torch.equal(grad, results[2][1][name]) for name, grad in results[0][1].items())
    assert results[3] < 0.5 * results[1]


def test_validation_is_forward_kl_whatever_is_trained(student: Student, source: Checkpoint) -> None:
    w = windows(6)
    values = {make_objective(student, source, "qat").validate(w).kl}
    qat = make_objective(student, source, "qat").validate(w)
    with torch.no_grad():
        logits = student.model(w.input_ids_ST, position_ids=w.position_ids_ST, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), w.labels_ST.flatten()).item()
    assert qat.loss == pytest.approx(expected, rel=1e-5)
    for loss in ("forward_kl", "mse", "reverse_kl", "jsd"):
        values.add(make_objective(student, source, loss=loss).validate(w).kl)
    assert len(values) == 1
    objective = make_objective(student, source)
    first = objective.validate(w).kl
    calls: list[Any] = []
    objective._teacher_hidden = lambda inputs: calls.append(inputs)  # type: ignore[assignment]
    assert objective.validate(w).kl == first
    assert not calls


def test_c6_validation_of_the_teacher_itself_is_zero(source: Checkpoint) -> None:
    model = load_model(source, "bfloat16", "cpu")
    objective = Objective(model, model, config(), "qad", model.config.vocab_size)
    assert objective.validate(windows()).kl == 0.0
