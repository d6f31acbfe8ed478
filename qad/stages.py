"""The stages that make arms. Everything that can be wrong is found in `prepare`, before hours are spent."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from qad.arm import KIND, open_arm, write_arm
from qad.artifact import Artifact, open_artifact, run_stage
from qad.calibrate import calibrate
from qad.config import Recipe
from qad.errors import SourceError
from qad.loader import default_device, load_model, load_skeleton, load_tokenizer, resolve_dtype
from qad.packing import Windows, pack
from qad.selection import Selection, describe, select
from qad.source import Checkpoint, open_checkpoint
from qad.student import Student
from qad.text import Document, documents, require_disjoint
from qad.train import Trainer

METRICS = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Job:
    """A recipe with everything it names found and checked; nothing has been computed yet."""

    recipe: Recipe
    source: Checkpoint
    selection: Selection
    tokenizer: Any
    device: str
    dtype: str
    text: dict[str, list[Document]]

    @property
    def compute(self) -> dict[str, Any]:
        """What every computed stage depends on beside its own section."""
        return {"seed": self.recipe.seed, "dtype": self.dtype, "device": self.device}

    def calibration_windows(self) -> Windows:
        section = self.recipe.calibrate
        return pack(
            self.text["calibration"], self.tokenizer, section.samples, section.seq_len, self.recipe.seed, "calibration"
        )

    def train_windows(self) -> Windows:
        section = self.recipe.train
        return pack(self.text["train"], self.tokenizer, section.windows, section.seq_len, self.recipe.seed, "training")

    def validation_windows(self) -> Windows:
        section = self.recipe.train
        windows = max(1, section.validation_tokens // section.seq_len)
        return pack(self.text["validation"], self.tokenizer, windows, section.seq_len, self.recipe.seed, "validation")


def prepare(recipe: Recipe, say: Callable[[str], None] = lambda line: None) -> Job:
    """Find and check everything a recipe names, and say what will be quantized. Raises QadError."""
    source = open_checkpoint(recipe.model)
    tokenizer = load_tokenizer(source.folder)
    section = recipe.quantize
    selection = select(load_skeleton(source), section.format, section.include, section.exclude)
    _require_tensors(source, selection)
    device = default_device()
    dtype = resolve_dtype(recipe.dtype, device)
    say(f"model  {source.display_name}")
    for line in describe(selection):
        say(f"       {line}")
    say(f"       computed in {dtype} on {device}")
    return Job(recipe, source, selection, tokenizer, device, dtype, _read_text(recipe))


def _read_text(recipe: Recipe) -> dict[str, list[Document]]:
    text = {
        "calibration": documents(recipe.calibrate.data, "calibration"),
        "train": documents(recipe.train.data, "train"),
        "validation": documents(recipe.train.validation_data or recipe.train.data, "validation"),
    }
    if recipe.measure.fidelity:
        text["test"] = documents(recipe.measure.fidelity.data, "test")
    require_disjoint(text)
    return text


def _require_tensors(source: Checkpoint, selection: Selection) -> None:
    for name, (n, k) in selection.modules.items():
        info = source.tensors.get(f"{name}.weight")
        if info is None:
            raise SourceError(f"{source.folder} has no tensor {name}.weight, which its architecture asks for")
        if info.shape != (n, k):
            raise SourceError(
                f"{name}.weight has shape {info.shape}, config.json asks for {(n, k)}: files do not belong together"
            )


def bf16_arm(job: Job, out: Path, replace: bool = False) -> Artifact:
    """The source itself, as an arm."""
    inputs = {"source": job.source.digest}
    return run_stage(
        KIND, out, {"arm": "bf16"}, inputs, lambda f: write_arm(f, "bf16", job.source, None, {}), replace=replace
    )


def ptq_arm(job: Job, out: Path, replace: bool = False) -> Artifact:
    """Calibrate the unquantized model; its weights stay the source's."""
    windows = job.calibration_windows()
    section = job.recipe.section("calibrate")
    config = {"arm": "ptq", "quantize": job.recipe.section("quantize"), "calibrate": section, **job.compute}
    inputs = {"source": job.source.digest, "text": windows.digest}

    def work(folder: Path) -> None:
        require_finite(job.source)
        scales: dict[str, torch.Tensor] = {}
        if job.selection.quantizes_activations:
            model = load_model(job.source, job.dtype, job.device)
            with tqdm(total=windows.tokens, unit="tok", unit_scale=True, desc="calibrate", mininterval=2.0) as bar:
                scales = calibrate(model, job.selection, windows, job.recipe.calibrate.headroom, bar.update)
        write_arm(folder, "ptq", job.source, job.selection, scales, tokens={"calibration": windows.tokens})

    return run_stage(KIND, out, config, inputs, work, replace=replace)


def qad_arm(job: Job, ptq: Path, out: Path, log: Path | None = None, replace: bool = False) -> Artifact:
    """Train from a PTQ arm. `log`: where metrics.jsonl grows while training (default: inside the arm)."""
    train, validation = job.train_windows(), job.validation_windows()
    config = {"arm": job.recipe.train.method, "train": job.recipe.section("train"), **job.compute}
    start = open_arm(ptq)
    inputs = {
        "source": job.source.digest,
        "ptq": open_artifact(ptq, KIND).digest,
        "train": train.digest,
        "validation": validation.digest,
    }

    def work(folder: Path) -> None:
        live = log or folder / METRICS
        teacher = load_model(job.source, job.dtype, job.device)
        student = Student(start, load_model(job.source, job.dtype, job.device))
        trainer = Trainer(student, teacher, train, validation, job.recipe.train, folder, live)
        masters = trainer.run()
        trainer.discard_state()
        progress = dataclasses.asdict(trainer.progress)
        tokens = {"train": train.tokens, "validation": validation.tokens}
        write_arm(folder, job.recipe.train.method, job.source, start.selection, start.input_scales, masters,
                  training=progress, tokens=tokens)  # fmt: skip
        if live != folder / METRICS:
            shutil.copyfile(live, folder / METRICS)

    return run_stage(KIND, out, config, inputs, work, resumable=True, replace=replace)


def require_finite(source: Checkpoint) -> None:
    """Raises SourceError naming tensor and index for the first NaN or Inf among all floating-point weights."""
    for name, info in source.tensors.items():
        if info.dtype not in ("BF16", "F16", "F32"):
            continue
        weight = source.get(name)
        if not torch.isfinite(weight.abs().amax()):
            index = tuple((~torch.isfinite(weight)).nonzero()[0].tolist())
            raise SourceError(
                f"{name} holds {weight[index].item()} at index {list(index)}: the source is damaged, fetch or train it again"
            )


def require_enough_text(job: Job) -> dict[str, int]:
    """Pack every role once, so that a text too short is found before the first stage. Returns tokens by role."""
    windows: Sequence[tuple[str, Windows]] = (
        ("calibration", job.calibration_windows()),
        ("train", job.train_windows()),
        ("validation", job.validation_windows()),
    )
    return {role: packed.tokens for role, packed in windows}
