"""What a student is trained towards and what it is judged by.

    method qad   a token loss between student and frozen teacher (forward KL by default)
    method qat   cross-entropy on the text itself, no teacher
    validation   forward KL from the teacher at temperature 1, whatever was trained (cross-entropy does not tell QAT
                 from QAD), with the student as it would be deployed

Only counted positions are evaluated: everything by default, assistant turns on request, padding never.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from qad.model.attention import train_with
from qad.recipes.recipe import Train
from qad.text.windows import NO_LABEL, Windows, WindowSet
from qad.training.chunked import CachedTopK, NoTeacher, Targets, TeacherLogits, chunked_loss, default_chunk
from qad.training.head import Head
from qad.training.losses import LOSSES, TokenLoss, at_temperature, cross_entropy, forward_kl, top_k_forward_kl
from qad.training.ranks.group import here
from qad.training.ranks.shards import gathered
from qad.training.teacher_cache import TeacherCache

_Against = tuple[Targets, TokenLoss]
_KEPT_BYTES = 1 << 31  # teacher hidden states of the validation windows are kept up to this size


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A micro-batch: its windows and where they stand among all of them."""

    batch: Windows
    index: Tensor

    def model_inputs(self, device: torch.device) -> dict[str, object]:
        return self.batch.model_inputs(device)

    def counted(self, hidden_BTH: Tensor) -> Tensor:
        """[B, T, H] -> [counted tokens, H]."""
        counted_BT = self.batch.counted_ST
        return hidden_BTH.flatten(0, 1) if counted_BT.all() else hidden_BTH[counted_BT.to(hidden_BTH.device)]

    def labels(self) -> Tensor:
        """int64 [counted tokens], -100 where a document ends."""
        return self.batch.labels_ST[self.batch.counted_ST]


@dataclasses.dataclass(frozen=True)
class Validation:
    """kl: mean forward KL from the teacher, nats per counted token. loss: what picks the best checkpoint, the KL for QAD
    and the cross-entropy per next token for QAT, whose aim the KL is not."""

    kl: float
    loss: float


class Objective:
    """Losses of micro-batches, summed over their counted tokens."""

    def __init__(
        self, student: Any, teacher: Any, config: Train, method: str, shared: int, cache: TeacherCache | None = None
    ) -> None:
        self.student, self.teacher, self.config = student, teacher, config
        train_with(config.attention, student.device.type, student, teacher)
        self.student_head, self.teacher_head = Head.of(student).sharing(shared), Head.of(teacher).sharing(shared)
        self.cache = cache
        self.token_loss: TokenLoss = at_temperature(LOSSES[config.loss], config.temperature)
        if method == "qat":
            self.token_loss = cross_entropy
        elif cache is not None:
            self.token_loss = top_k_forward_kl
        self.teaches = method != "qat"
        self.name = "cross_entropy" if method == "qat" else config.loss
        self._kept: dict[int, Tensor] = {}
        self._validated = 0  # bytes of hidden states, as if all positions counted

    @property
    def device(self) -> torch.device:
        return self.student_head.weight_VH.device

    def loss(self, windows: WindowSet, index: Tensor) -> Tensor:
        """Sum of the training loss over the counted tokens of windows[index], differentiable in the student."""
        inputs = Inputs(windows.at(index), index)
        return self._compare(inputs, (self._targets(inputs), self.token_loss))[0]

    @torch.no_grad()
    def validate(
        self, windows: WindowSet, aside: Callable[[], AbstractContextManager[None]] = nullcontext, batch: int = 4
    ) -> Validation:
        """Judge the student on a whole split. Ranks take turns; `aside` is around what one computes only because others do."""
        batches, ranks = torch.arange(len(windows)).split(batch), here()
        sums = torch.zeros(3, len(batches), dtype=torch.float64)
        for number in ranks.part(range(len(batches))):
            if number is None:
                with aside():
                    self._judge(windows, batches[0], -1)
            else:
                sums[:, number] = torch.tensor(self._judge(windows, batches[number], number), dtype=torch.float64)
            ranks.heed()
        kl = cross_entropies = 0.0
        kls, entropies, labelled = ranks.summed(sums).tolist()
        for number in range(len(batches)):  # one after the other, whoever had them
            kl, cross_entropies = kl + kls[number], cross_entropies + entropies[number]
        kl /= windows.counted
        return Validation(kl, kl if self.teaches else cross_entropies / max(1.0, sum(labelled)))

    def _judge(self, windows: WindowSet, index: Tensor, number: int) -> tuple[float, float, int]:
        """Sums of KL and, for QAT, cross-entropy, and tokens that have a next one. What is kept is known by its number."""
        inputs = Inputs(windows.at(index), index)
        hidden = self._kept.get(number)
        if hidden is None:
            hidden = self._teacher_hidden(inputs)
            self._validated += len(index) * windows.seq_len * hidden.shape[-1] * hidden.element_size()
            if self._validated <= _KEPT_BYTES:
                self._kept[number] = hidden.cpu()
        against: list[_Against] = [(TeacherLogits(hidden.to(self.device), self.teacher_head), forward_kl)]
        if not self.teaches:
            against.append((NoTeacher(), cross_entropy))
        kl, *entropy = map(float, self._compare(inputs, *against))
        return kl, sum(entropy), int((inputs.labels() != NO_LABEL).sum())

    def _student_hidden(self, inputs: Inputs) -> Tensor:
        return inputs.counted(self.student.base_model(**inputs.model_inputs(self.device)).last_hidden_state)

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at one time."""
        return self.config.chunk or default_chunk(self.device.type, len(self.student_head.weight_VH))

    def _compare(self, inputs: Inputs, *against: _Against) -> list[Tensor]:
        """Summed losses, from one forward pass of the student."""

        def compare() -> list[Tensor]:
            hidden_TH, labels, chunk = self._student_hidden(inputs), inputs.labels(), self.chunk
            return [chunked_loss(hidden_TH, self.student_head, targets, labels, loss, chunk) for targets, loss in against]

        return gathered(self.student, compare)

    def _targets(self, inputs: Inputs) -> Targets:
        if not self.teaches:
            return NoTeacher()
        if self.cache is not None:
            return CachedTopK(self.cache.read(inputs.index, self.device))
        return TeacherLogits(self._teacher_hidden(inputs), self.teacher_head)

    @torch.no_grad()
    def _teacher_hidden(self, inputs: Inputs) -> Tensor:
        teacher = self.teacher
        hidden_BTH = gathered(teacher, lambda: teacher.base_model(**inputs.model_inputs(self.device)).last_hidden_state)
        return inputs.counted(hidden_BTH)
