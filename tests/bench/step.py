"""`make bench`: a QAD step against a plain distillation step of the same model, interleaved, the ratio of one run.

Plain: the same teacher, loss, clip and AdamW on FP32 weights that are trained as they are; nothing is quantized.

    python tests/bench/step.py models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from qad.arm import open_arm
from qad.compiled import compilation
from qad.config import parse_recipe
from qad.loader import load_model
from qad.objective import Objective
from qad.optim import make_optimizer
from qad.stages import Job, prepare, ptq_arm
from qad.student import Student


class Stepper:
    """One side of the comparison: forward, backward, clip, update and, for QAD, deploy."""

    def __init__(self, job: Job, model: Any, student: Student | None) -> None:
        config = job.recipe.train
        teacher = load_model(job.teacher, job.dtype, job.device)
        self.student, self.config, self.windows = student, config, job.train_windows()
        self.weights = student.masters if student else dict(model.named_parameters())
        for weight in self.weights.values():
            weight.requires_grad_()
        self.objective = Objective(model, teacher, config, "qad", job.shared_ids)
        self.optimizer = make_optimizer(config, self.weights)

    def seconds(self, step: int) -> float:
        started = time.perf_counter()
        index = self.windows.indices(step, self.config.batch_size, 0)
        (self.objective.loss(self.windows, index) / self.config.tokens_per_step).backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.student:
            self.student.deploy()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    batch = args.tokens_per_step // 256
    job = prepare(parse_recipe({
        "model": args.model,
        "calibrate": {"data": "python-docs", "samples": 4, "seq_len": 64},
        "train": {"data": "python-docs", "tokens": (args.steps + 2) * batch * 256, "seq_len": 256, "batch_size": batch},
    }, "bench"))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ptq_arm(job, Path(folder) / "ptq")
        model = load_model(job.source, job.dtype, job.device)
        student = Student(open_arm(Path(folder) / "ptq"), model)
        sides = {
            "QAD": Stepper(job, model, student),
            "plain": Stepper(job, load_model(job.source, job.dtype, job.device), None),
        }
        with compilation(True):
            times: dict[str, list[float]] = {name: [] for name in sides}
            for step in range(1, args.steps + 3):
                for name, side in sides.items():
                    seconds = side.seconds(step)
                    if step > 2:  # the first two compile and warm up
                        times[name].append(seconds)
    ratios = [q / p for q, p in zip(times["QAD"], times["plain"], strict=True)]
    print(f"step of {batch * 256} tokens in {job.dtype}: QAD / plain distillation {statistics.median(ratios):.2f}x "
          f"(range {min(ratios):.2f}-{max(ratios):.2f}, {len(ratios)} interleaved pairs)")  # fmt: skip


if __name__ == "__main__":
    main()
