"""The training loop: a student whose forward is the deployed model, a frozen teacher, every counted token.

One step
    teacher  hidden_TH  (compute dtype, no gradient; none with QAT or a teacher cache)
    student  hidden_TH  (compute dtype; weights decoded NVFP4, inputs of the selected Linears fake-quantized)
    loss     sum over the step's counted tokens / their number, whatever the micro-batches
    update   clip, AdamW on the FP32 masters, deploy

Data order, schedule and scales are functions of (seed, step) and the masters, so a state is masters, moments and
the step, and a resumed run continues with the bits of an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qad.errors import TrainingError
from qad.numerics.compiled import compilation
from qad.place import write_whole, writing
from qad.progress import Progress as Bar
from qad.recipes.recipe import Train
from qad.text.windows import WindowSet
from qad.training.objective import Objective, Validation
from qad.training.optim import learning_rate, make_optimizer, set_learning_rate
from qad.training.ranks.group import here
from qad.training.saturation import UNCOUNTED
from qad.training.state import load_state, save_aside, save_state
from qad.training.student import Student
from qad.training.undisturbed import undisturbed

_NOT_FINITE = 3  # steps in a row whose loss or gradient is no number, after which nothing is to be hoped for
_PIECE = 1 << 18  # elements of a gradient in FP64 at a time: a cache's worth
_STUCK = 0.01  # share of moved masters below which nothing is learned; weights that are exactly 0 always move


@dataclasses.dataclass
class Progress:
    """What a run knows about itself besides masters and moments.

    val_kl: nats per token at the PTQ start, of the kept checkpoint (`best_step`) and at the last validation. val_loss: the
    same of what picks the best one: equal for QAD, cross-entropy for QAT. saturation: of the kept one (qad.training.saturation).
    """

    step: int = 0
    best_step: int = 0
    val_kl_start: float = math.inf
    val_kl_best: float = math.inf
    val_kl_last: float = math.inf
    val_loss_start: float = math.inf
    val_loss_best: float = math.inf
    val_loss_last: float = math.inf
    validations_since_best: int = 0
    steps_without_tokens: int = 0
    moved_masters: float | None = None
    moved_deployed: float | None = None
    saturation: dict[str, float | None] = dataclasses.field(default_factory=dict)


class Trainer:
    """Trains a student inside a stage folder; everything there but the finished arm is working state."""

    def __init__(
        self,
        student: Student,
        objective: Objective,
        train: WindowSet,
        validation: WindowSet,
        config: Train,
        seed: int,
        folder: Path,
        log: Path,
        watch: Callable[[dict[str, Any]], object] = lambda row: None,
    ) -> None:
        self.student, self.objective, self.config, self.seed = student, objective, config, seed
        self.train_windows, self.validation_windows = train, validation
        self.folder, self.log, self.watch = folder, log, watch
        self.progress = Progress()
        self._not_finite = 0  # steps in a row
        self.ranks = here()
        self._saved = time.monotonic()
        self._saved_step = -1
        self._whole = False  # masters, moments and progress are those of one finished step
        first_names = {student.first_names[name]: master for name, master in student.masters.items()}
        self.optimizer = make_optimizer(config, first_names)
        if config.activation_checkpointing:
            student.checkpoint_activations()

    def run(self) -> dict[str, Tensor] | None:
        """Train to the last step, or until patience ends, resuming where the folder holds a state.

        Returns the masters of the best checkpoint, whole, to the first of several ranks; None where that is the PTQ start, whose
        weights are the source's. Raises TrainingError where the loss stays NaN or infinite; the last good state is saved.
        """
        with compilation(True), self.ranks.signals_held():
            if not self._resume():
                self._validated(first=True)
            done = self.progress.step * self.config.tokens_per_step
            with Bar("train", self.config.tokens_used, "tok", done) as bar:
                try:
                    while self.progress.step < self.config.steps and not self._out_of_patience():
                        self._advance(bar)
                except KeyboardInterrupt:
                    if self._whole:
                        self._save()
                    raise
            self._watch_movement()
        self._warn_of_the_end()
        best = self.folder / "best.safetensors"
        return load_file(best) if self.ranks.first and best.is_file() else None

    # --- one step ---

    def _advance(self, bar: Bar) -> None:
        started = time.perf_counter()
        step = self.progress.step + 1
        lr = learning_rate(self.config, step)
        set_learning_rate(self.optimizer, lr)
        self.student.quantize_inputs(step > self.config.weight_only_steps)
        loss = self._backward(step)
        with undisturbed() as lifted:
            self._whole = False
            if loss is None:
                self.progress.steps_without_tokens += 1
            elif self._finite(step, loss, lr):
                self.optimizer.step()
                self.student.deploy()
            else:
                loss = None
            self.optimizer.zero_grad(set_to_none=True)
            self.progress.step = step
            rate = self.config.tokens_per_step / (time.perf_counter() - started)
            last = step == self.config.steps
            found = None
            # What changed nothing is not validated again.
            if (step % self.config.validate_every == 0 and not self._not_finite) or last:
                with lifted():
                    found = self._validated()
            self._record(step, loss, lr, round(rate, 1), found)
            if last or self._save_is_due(step):
                self._save()
            self._whole = True
        self.ranks.heed()
        shown = {"step": f"{step}/{self.config.steps}", "val_kl": f"{self.progress.val_kl_last:.4f}"}
        name = "kl" if self.objective.name == "forward_kl" else self.objective.name
        bar.note({**shown, name: "-" if loss is None else f"{loss:.4f}"})
        bar.update(self.config.tokens_per_step)

    def _save_is_due(self, step: int) -> bool:
        if self.config.save_minutes is None:
            return step % self.config.save_every == 0
        due = time.monotonic() - self._saved >= 60 * self.config.save_minutes
        return self.ranks.of_first(due)

    def _finite(self, step: int, loss: float, lr: float) -> bool:
        """Clip the gradients, and whether they are numbers, as the loss is: else the step changes nothing, and after a few of
        them training ends with the masters of the last good one."""
        masters = [master for master in self.student.masters.values() if master.requires_grad]
        norm = self._clipped(masters)
        if math.isfinite(loss) and math.isfinite(norm):
            self._not_finite = 0
            return True
        self._not_finite += 1
        told = f"loss {loss:g}, norm of the gradient {norm:g}"
        if self._not_finite < min(_NOT_FINITE, self.config.steps):
            warnings.warn(f"step {step}: {told}: it changes nothing", stacklevel=3)
            return False
        self.progress.step = step - self._not_finite
        self._save()
        raise TrainingError(
            f"training ended at step {step}: {told}, for {self._not_finite} steps on end (learning rate {lr:g}). The state of "
            f"step {self.progress.step} is kept in {self.folder}. Lower train.lr or train.clip, add train.warmup_steps, or set "
            "dtype to float32; an original that writes NaN itself has to be mended first"
        )

    def _clipped(self, masters: list[Tensor]) -> float:
        """Clip the gradients by the norm of all, which is returned.

        Squares are summed in FP64 and the norm is rounded to FP32: the order in which any number of ranks sums them reaches
        the last bits of FP64 alone.
        """
        device = self.objective.device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for master in masters:
            if master.grad is not None:
                for piece in master.grad.flatten().split(_PIECE):
                    squares += torch.dot(exact := piece.double(), exact)
        norm = torch.tensor(math.sqrt(self.ranks.add(float(squares))[0]), dtype=torch.float32, device=device)
        torch.nn.utils.clip_grads_with_norm_(masters, self.config.clip, norm)
        return float(norm)

    def _backward(self, step: int) -> float | None:
        """Gradients of the step's mean loss into the masters; returns the mean, None for a step without a counted token.

        The mean is over all counted tokens of the step: a mean of micro-batch means would let short answers dominate. Of several
        ranks each takes its part of the windows.
        """
        batch = step, self.config.batch_size, self.seed
        counted = int(self.train_windows.counts[self.train_windows.indices(*batch)].sum())
        index = self.train_windows.indices(*batch, self.ranks.rank, self.ranks.size)
        if counted == 0:
            warnings.warn(f"step {step} has no supervised token and changes nothing", stacklevel=2)
            return None
        total = torch.zeros((), dtype=torch.float64, device=self.objective.device)  # read once a step, not once a micro-batch
        for micro in index.split(self.config.micro_batch_size or len(index)):
            loss = self.objective.loss(self.train_windows, micro) / counted
            loss.backward()
            total += loss.detach()
        return self.ranks.add(float(total))[0]

    # --- validation ---

    def _validated(self, first: bool = False) -> Validation:
        """Validate the student as deployed, and keep the masters where they are the best so far."""
        self.student.quantize_inputs(True)
        with self.student.saturation.counting():
            found = self.objective.validate(self.validation_windows, self.student.saturation.aside)
        progress = self.progress
        progress.val_kl_last, progress.val_loss_last = found.kl, found.loss
        if first:
            progress.val_kl_start, progress.val_loss_start = found.kl, found.loss
            if self.ranks.first:
                self.log.unlink(missing_ok=True)
            self._record(0, None, self.config.lr, None, found)
        else:
            progress.validations_since_best += 1
            if progress.moved_masters is None:
                self._watch_movement()
        if first or found.loss < progress.val_loss_best:
            progress.val_kl_best, progress.val_loss_best, progress.best_step = found.kl, found.loss, progress.step
            progress.saturation, progress.validations_since_best = self.student.saturation.shares, 0
            if not first:
                masters = {name: master.detach() for name, master in self.student.masters.items()}
                save_aside(masters, self.folder / "best.safetensors", self.student.lengths)
        return found

    def _watch_movement(self) -> None:
        """At the first validation, when there is time to stop, and at the end: it costs a pass over all weights."""
        moved = self.student.moved()
        first = self.progress.moved_masters is None
        self.progress.moved_masters, self.progress.moved_deployed = moved["masters"], moved["deployed"]
        if first and moved["masters"] < _STUCK:
            warnings.warn(
                f"{moved['masters']:.2%} of the weights have moved in {self.progress.step} steps: the learning rate "
                f"{self.config.lr} or the gradient is too small",
                stacklevel=3,
            )

    def _out_of_patience(self) -> bool:
        return self.config.patience is not None and self.progress.validations_since_best >= self.config.patience

    def _warn_of_the_end(self) -> None:
        progress, judged = self.progress, "KL" if self.objective.teaches else "cross-entropy"
        if progress.best_step == 0:
            warnings.warn(
                f"validation {judged} never fell below its PTQ start ({progress.val_loss_start:.4f}): the PTQ weights are "
                "kept. Try another learning rate or more tokens",
                stacklevel=3,
            )
        elif progress.val_loss_last > progress.val_loss_start:
            warnings.warn(
                f"validation {judged} ended at {progress.val_loss_last:.4f}, above its PTQ start "
                f"{progress.val_loss_start:.4f}; kept is step {progress.best_step}. The learning rate is too high",
                stacklevel=3,
            )
        if progress.moved_deployed == 0.0:
            warnings.warn(
                "not one quantized value differs from the PTQ arm's: the learning rate is too small for 4 bits", stacklevel=3
            )

    # --- state ---

    def _save(self) -> None:
        """The state of the last finished step, where it is not there yet."""
        step = self.progress.step
        if step != self._saved_step:
            progress, lengths = dataclasses.asdict(self.progress), self.student.lengths
            save_state(self.folder, step, self.student.masters, self.optimizer, progress, lengths)
        self._saved, self._saved_step = time.monotonic(), step

    def _record(self, step: int, loss: float | None, lr: float, rate: float | None, found: Validation | None) -> None:
        """One line of metrics.jsonl. `kl` is the training loss where that is the forward KL; another one has its name."""
        if not self.ranks.first:
            return
        name = self.objective.name
        row = {
            "step": step,
            "tokens": step * self.config.tokens_per_step,
            "kl": None,
            "lr": lr,
            "tokens_per_s": rate,
            "val_kl": found and found.kl,
            **(self.student.saturation.shares if found else UNCOUNTED),
            "kl" if name == "forward_kl" else name: loss,
        }
        if not self.objective.teaches:
            row["val_cross_entropy"] = found and found.loss
        with writing(self.log), self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.watch(row)

    def _resume(self) -> bool:
        found = load_state(self.folder, self.student.masters, self.optimizer, self.student.lengths)
        if found is None:
            if self.ranks.first:
                (self.folder / "best.safetensors").unlink(missing_ok=True)
            return False
        progress, masters = found
        self._whole = True
        self.progress = Progress(**progress)
        self._saved_step = self.progress.step
        self.student.load_masters(masters)
        if self.ranks.first and self.log.is_file():
            rows = [row for row in self.log.read_text(encoding="utf-8").split("\n")[:-1] if _step_of(row) <= self.progress.step]
            write_whole(self.log, "".join(row + "\n" for row in rows))
        return True


def _step_of(row: str) -> float:
    """A line cut off by a kill counts as later than any state."""
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError):
        return math.inf
