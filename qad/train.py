"""The QAD loop: a frozen BF16 teacher, a student whose forward is the deployed model, forward KL over every token.

One step
    teacher  hidden_TH  (compute dtype, no gradient)
    student  hidden_TH  (compute dtype; weights decoded NVFP4, inputs of the selected Linears fake-quantized)
    loss     sum of KL over the step's tokens / number of the step's tokens
    update   clip, AdamW on the FP32 masters, deploy

Data order, schedule and scales are functions of (seed, step) and the masters, so a state is masters, moments and
the step, and a resumed run continues with the bits of an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from qad.compiled import compilation
from qad.config import Train
from qad.errors import ArtifactError
from qad.losses import Head, chunked_loss
from qad.packing import Windows
from qad.student import Student


@dataclasses.dataclass
class Progress:
    """What a run knows about itself besides masters and moments. KLs in nats per token."""

    step: int = 0
    val_kl_start: float = math.inf
    val_kl_best: float = math.inf
    best_step: int = 0
    val_kl_last: float = math.inf


class Trainer:
    """Trains a student inside a stage folder; everything there but the finished arm is working state."""

    def __init__(
        self,
        student: Student,
        teacher: Any,
        train: Windows,
        validation: Windows,
        config: Train,
        folder: Path,
        log: Path,
    ) -> None:
        self.student, self.teacher, self.config = student, teacher, config
        self.train_windows, self.validation_windows = train, validation
        self.folder, self.log = folder, log
        self.progress = Progress()
        self.student_head, self.teacher_head = Head.of(student.model), Head.of(teacher)
        if self.student_head.weight_VH.shape[0] != self.teacher_head.weight_VH.shape[0]:
            raise ArtifactError("teacher and student have vocabularies of different size")
        self.optimizer = torch.optim.AdamW(
            list(student.masters.values()), lr=config.lr, betas=config.betas, weight_decay=0.0, fused=True
        )

    def run(self) -> dict[str, Tensor] | None:
        """Train to the last step, resuming where the folder holds a state.

        Returns the masters of the best checkpoint; None where that is the PTQ start, whose weights are the source's.
        """
        with compilation(True):
            if not self._resume():
                self._validated(first=True)
            bar = tqdm(
                total=self.config.tokens_used, initial=self.progress.step * self.config.tokens_per_step, unit="tok",
                unit_scale=True, desc="QAD", mininterval=2.0, smoothing=0.1,
            )  # fmt: skip
            with bar:
                while self.progress.step < self.config.steps:
                    self._advance(bar)
        if self.progress.val_kl_best >= self.progress.val_kl_start:
            warnings.warn(
                f"validation KL never fell below its PTQ start ({self.progress.val_kl_start:.4f}): the PTQ weights are "
                "kept. Try another learning rate or more tokens",
                stacklevel=2,
            )
        elif self.progress.val_kl_last > self.progress.val_kl_start:
            warnings.warn(
                f"validation KL ended at {self.progress.val_kl_last:.4f}, above its PTQ start "
                f"{self.progress.val_kl_start:.4f}; kept is step {self.progress.best_step}. The learning rate is too high",
                stacklevel=2,
            )
        best = self.folder / "best.safetensors"
        return load_file(best) if best.is_file() else None

    # --- one step ---

    def _advance(self, bar: Any) -> None:
        started = time.perf_counter()
        step = self.progress.step + 1
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        kl = self._backward(step)
        torch.nn.utils.clip_grad_norm_(list(self.student.masters.values()), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.student.deploy()
        self.progress.step = step
        rate = self.config.tokens_per_step / (time.perf_counter() - started)
        last = step == self.config.steps
        val_kl = self._validated() if step % self.config.validate_every == 0 or last else None
        self._record({"step": step, "tokens": step * self.config.tokens_per_step, "kl": kl, "lr": lr,
                      "tokens_per_s": round(rate, 1), "val_kl": val_kl})  # fmt: skip
        if step % self.config.save_every == 0 or last:
            self._save()
        shown = {"step": f"{step}/{self.config.steps}", "kl": f"{kl:.4f}", "val_kl": f"{self.progress.val_kl_last:.4f}"}
        bar.set_postfix(shown, refresh=False)
        bar.update(self.config.tokens_per_step)

    def _backward(self, step: int) -> float:
        """Gradients of the step's mean KL into the masters; returns the mean."""
        size = self.config.batch_size
        batch = slice((step - 1) * size, step * size)
        ids, positions = self.train_windows.input_ids_ST[batch], self.train_windows.position_ids_ST[batch]
        micro = self.config.micro_batch_size or size
        total = 0.0
        for ids_bT, positions_bT in zip(ids.split(micro), positions.split(micro), strict=True):
            loss = self._loss(ids_bT, positions_bT) / ids.numel()
            loss.backward()
            total += float(loss.detach())
        return total

    def _loss(self, ids_bT: Tensor, positions_bT: Tensor) -> Tensor:
        """Summed KL of a micro-batch."""
        device = self.student_head.weight_VH.device
        inputs = {"input_ids": ids_bT.to(device), "position_ids": positions_bT.to(device), "use_cache": False}
        with torch.no_grad():
            teacher_bTH = self.teacher.base_model(**inputs).last_hidden_state
        student_bTH = self.student.model.base_model(**inputs).last_hidden_state
        return chunked_loss(
            student_bTH.flatten(0, 1), self.student_head, teacher_bTH.flatten(0, 1), self.teacher_head,
            chunk=self.config.chunk,
        )  # fmt: skip

    # --- validation ---

    @torch.no_grad()
    def validate(self) -> float:
        """Mean KL per token on the validation split."""
        windows, total = self.validation_windows, 0.0
        for ids, positions in zip(windows.input_ids_ST.split(4), windows.position_ids_ST.split(4), strict=True):
            total += float(self._loss(ids, positions))
        return total / windows.tokens

    def _validated(self, first: bool = False) -> float:
        """Validate, and keep the masters where they are the best so far."""
        val_kl = self.validate()
        progress = self.progress
        progress.val_kl_last = val_kl
        if first:
            progress.val_kl_start = progress.val_kl_best = val_kl
            self.log.unlink(missing_ok=True)
            self._record({"step": 0, "tokens": 0, "kl": None, "lr": self.config.lr, "tokens_per_s": None,
                          "val_kl": val_kl})  # fmt: skip
        elif val_kl < progress.val_kl_best:
            progress.val_kl_best, progress.best_step = val_kl, progress.step
            _save_aside(self._masters(), self.folder / "best.safetensors")
        return val_kl

    # --- state ---

    def _masters(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self.student.masters.items()}

    def _record(self, row: dict[str, Any]) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _save(self) -> None:
        """Masters, moments and progress under the step's own name; the older state goes once the new one is whole."""
        state = self.folder / f"state-{self.progress.step:08d}"
        aside = self.folder / "state.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        tensors = {f"master.{name}": master.detach() for name, master in self.student.masters.items()}
        for name, master in self.student.masters.items():
            moments = self.optimizer.state[master]
            tensors[f"exp_avg.{name}"], tensors[f"exp_avg_sq.{name}"] = moments["exp_avg"], moments["exp_avg_sq"]
        save_file(tensors, aside / "tensors.safetensors")
        (aside / "progress.json").write_text(json.dumps(dataclasses.asdict(self.progress)) + "\n", encoding="utf-8")
        aside.rename(state)
        for older in self.folder.glob("state-*"):
            if older != state:
                shutil.rmtree(older)

    def _resume(self) -> bool:
        states = sorted(self.folder.glob("state-*"))
        if not states:
            (self.folder / "best.safetensors").unlink(missing_ok=True)
            return False
        self.progress = Progress(**json.loads((states[-1] / "progress.json").read_text(encoding="utf-8")))
        tensors = load_file(states[-1] / "tensors.safetensors")
        names = list(self.student.masters)
        missing = [n for n in names for kind in ("master", "exp_avg", "exp_avg_sq") if f"{kind}.{n}" not in tensors]
        if missing:
            raise ArtifactError(f"{states[-1]} lacks the state of {missing[0]}: remove {self.folder} and train again")
        self.student.load_masters({name: tensors[f"master.{name}"] for name in names})
        for name, master in self.student.masters.items():
            self.optimizer.state[master] = {
                "step": torch.tensor(float(self.progress.step)),
                "exp_avg": tensors[f"exp_avg.{name}"].to(master.device),
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(master.device),
            }
        if self.log.is_file():
            rows = [
                row for row in self.log.read_text(encoding="utf-8").splitlines() if _step_of(row) <= self.progress.step
            ]
            self.log.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
        return True

    def discard_state(self) -> None:
        """Remove everything that only served to resume."""
        for path in (*self.folder.glob("state*"), *self.folder.glob("best.safetensors*")):
            if path.name == "stage.json":
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def learning_rate(config: Train, step: int) -> float:
    """Rate of step 1, 2, ...: linear warm-up, then constant, or down to zero linearly or as a cosine."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr


def _step_of(row: str) -> float:
    """A line cut off by a kill counts as later than any state."""
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError):
        return math.inf


def _save_aside(tensors: dict[str, Tensor], path: Path) -> None:
    aside = path.with_name(path.name + ".tmp")
    save_file(tensors, aside)
    aside.replace(path)
