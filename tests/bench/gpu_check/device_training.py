"""A distillation by the product's own trainer on a device: what it recovers, and what a step costs beside a plain one.

Everything is made here: text of the standard library, a tokenizer, the BF16 original, its PTQ and QAD arms, the exported folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_cost import step_ratios
from tiny_teacher import Size, domains, new_llama, train_teacher

from qad.arms.arm import open_arm
from qad.model.loader import DTYPES, load_model
from qad.numerics.compiled import compilation
from qad.recipes.job import Job, prepare
from qad.recipes.load import parse_recipe
from qad.training.stages import ptq_arm, trained_arm


@dataclasses.dataclass(frozen=True)
class Plan:
    """size, teacher_*: the original and its training. steps, batch, seq_len, rates: the distillations, one a learning
    rate. large: of the untrained model that shows the cost of a step. files: modules of the standard library that are read."""

    size: Size
    teacher_steps: int
    teacher_batch: int
    steps: int
    batch: int
    seq_len: int
    rates: tuple[float, ...]
    large: Size
    files: int


GPU = Plan(Size(4096, 384, 8, 6, 1024), 400, 64, 300, 16, 256, (3e-5, 1e-4, 3e-4), Size(4096, 2048, 12, 16, 6144), 10**6)
CPU = Plan(Size(512, 64, 2, 4, 128), 60, 8, 12, 4, 32, (2e-5,), Size(512, 96, 1, 4, 192), 12)


def measure_training(plan: Plan, folder: Path, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Facts of one distillation. Raises QadError where anything of it fails."""
    started = time.monotonic()
    texts = [text for domain in domains(plan.files) for text in domain]
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    original = folder / "original"
    original.mkdir()
    loss = train_teacher(
        original,
        texts,
        plan.size,
        plan.teacher_steps,
        plan.teacher_batch,
        plan.seq_len,
        1e-3 if device == "cuda" else 4e-3,
        device=device,
        say=say,
    )
    trained_s = time.monotonic() - started
    job, ptq = _job(plan, original, text), folder / "ptq"
    ptq_arm(job, ptq)
    distilled = {rate: _distil(_job(plan, original, text, lr=rate), ptq, folder / f"qad-{rate:g}") for rate in plan.rates}
    best = min(distilled, key=lambda rate: distilled[rate]["kl_qad"])
    return {
        "parameters": sum(math.prod(info.shape) for info in job.source.tensors.values()),
        "dtype": job.dtype,
        "teacher_cross_entropy": loss,
        "teacher_seconds": trained_s,
        "steps": job.recipe.train.steps,
        "tokens": job.recipe.train.tokens_used,
        "qad": [{"rate": rate, **facts} for rate, facts in distilled.items()],
        "exported_and_reloaded_equal": _exported_equal(job, folder / f"qad-{best:g}", folder / "export"),
        "step": _step_cost(plan, folder),
    }


def _distil(job: Job, ptq: Path, out: Path) -> dict[str, Any]:
    """One distillation: validation KL of PTQ, of the best checkpoint and its step; seconds, tokens a second (median)."""
    started, log = time.monotonic(), out.with_name(f"{out.name}.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what did not learn shows in the numbers
        trained_arm(job, "qad", ptq, out, log)
    found = open_arm(out).facts["training"]
    rates = [json.loads(line)["tokens_per_s"] for line in log.read_text().splitlines()[3:]]  # the first steps compile
    return {
        "kl_ptq": found["val_kl_start"],
        "kl_qad": found["val_kl_best"],
        "best_step": found["best_step"],
        "tokens_per_s": statistics.median(rates),
        "seconds": time.monotonic() - started,
    }


def _job(plan: Plan, model: Path, text: Path, **train: Any) -> Job:
    length, batch = plan.seq_len, plan.batch
    return prepare(
        parse_recipe(
            {
                "model": str(model),
                "dtype": "bfloat16",
                "calibrate": {"data": str(text), "samples": 32, "seq_len": length},
                "train": {
                    "data": str(text),
                    "tokens": plan.steps * batch * length,
                    "seq_len": length,
                    "batch_size": batch,
                    "schedule": "linear",
                    "warmup_steps": plan.steps // 10,
                    "validate_every": max(1, plan.steps // 4),
                    "save_every": plan.steps,
                    "validation_tokens": 64 * length,
                    "epochs": max(1, plan.steps // 40),
                    **train,
                },
            },
            "gpu-check",
        )
    )


def _exported_equal(job: Job, arm: Path, out: Path) -> bool:
    """Logits of the exported folder, loaded again on the device, against the student's: equal to the bit?"""
    from transformers import AutoModelForCausalLM

    import qad.hf  # noqa: F401 (opens the exported folder)
    from export.writer import export_arm
    from qad.training.student import Student

    export_arm(arm, out)
    student = Student(open_arm(arm), load_model(job.source, job.dtype, job.device)).model
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype=DTYPES[job.dtype]).to(job.device).eval()
    ids_BT = job.validation_windows().at(torch.arange(2)).input_ids_ST.to(job.device)
    with torch.no_grad(), compilation(True):
        return torch.equal(student(input_ids=ids_BT).logits, reloaded(input_ids=ids_BT).logits)


def _step_cost(plan: Plan, folder: Path) -> dict[str, Any]:
    """QAD step over plain distillation step of the same model, interleaved pairs."""
    model, original = folder / "large", folder / "original"
    model.mkdir()
    for file in original.glob("tokenizer*"):
        shutil.copyfile(file, model / file.name)
    new_llama(plan.large).to(torch.bfloat16).save_pretrained(model)  # untrained: a step costs the same
    tokens = 8 * plan.batch * plan.seq_len
    job = _job(plan, model, folder / "text.jsonl", tokens=tokens, warmup_steps=0, epochs=1)
    ptq = folder / "large-ptq"
    ptq_arm(job, ptq)
    ratios = step_ratios(job, ptq, 8)
    return {
        "parameters": sum(math.prod(info.shape) for info in job.source.tensors.values()),
        "tokens": job.recipe.train.tokens_per_step,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
