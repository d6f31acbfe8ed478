"""Cost of a QAD step beside a plain distillation step of the same model, interleaved in one run.

Plain: the same teacher, loss, clip and AdamW on FP32 masters, which in BF16 are rounded into the model after each step;
nothing is quantized.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from qad.arms.arm import open_arm
from qad.model.loader import load_model
from qad.numerics.compiled import compilation
from qad.recipes.job import Job
from qad.training.objective import Objective
from qad.training.optim import make_optimizer
from qad.training.student import Student


class Stepper:
    """One side of the comparison: forward, backward, clip, update and, for QAD, deploy."""

    def __init__(self, job: Job, model: Any, student: Student | None) -> None:
        config = job.recipe.train
        teacher = load_model(job.teacher, job.dtype, job.device)
        self.student, self.config, self.windows, self.device = student, config, job.train_windows(), job.device
        self.parameters = {} if student else dict(model.named_parameters())
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        # FP32 parameters are their own masters.
        self.masters = (
            student.masters
            if student
            else {
                name: parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
                for name, parameter in self.parameters.items()
            }
        )
        self.objective = Objective(model, teacher, config, "qad", job.shared_ids)
        self.optimizer = make_optimizer(config, self.masters)

    def seconds(self, step: int) -> float:
        self._finish()
        started = time.perf_counter()
        index = self.windows.indices(step, self.config.batch_size, 0)
        (self.objective.loss(self.windows, index) / self.config.tokens_per_step).backward()
        copies = [(m, self.parameters[n]) for n, m in self.masters.items() if self.parameters.get(n, m) is not m]
        for master, parameter in copies:
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.student:
            self.student.deploy()
        with torch.no_grad():
            for master, parameter in copies:
                parameter.copy_(master)
        self._finish()
        return time.perf_counter() - started

    def _finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def step_ratios(job: Job, ptq: Path, steps: int) -> list[float]:
    """Seconds of a QAD step over those of a plain one, interleaved pairs; of `steps` steps the first two compile and warm up."""
    model = load_model(job.source, job.dtype, job.device)
    sides = [
        Stepper(job, model, Student(open_arm(ptq), model)),
        Stepper(job, load_model(job.source, job.dtype, job.device), None),
    ]
    with compilation(True):
        pairs = [[side.seconds(step) for side in sides] for step in range(1, steps + 1)]
    return [qad / plain for qad, plain in pairs[2:]]
