"""What a run would fail at after hours of training is asked before: layout, engine, load tool, the tasks' data, the tracker."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from harness.accuracy.section import Scoring
from harness.engines.environment import engine_python, installed
from harness.engines.registered import ENGINES
from harness.fidelity.section import require_test_text
from harness.measure.throughput import Serving, load_pythons
from harness.serving.drivers import choose_driver
from qad.command.tracking import require_tracker
from qad.errors import UsageError
from qad.recipes.job import Job
from qad.text.data import Generations


def require_measurable(job: Job, out: Path | None = None) -> None:
    """Raises QadError where the recipe asks for a measurement that this machine cannot make. out: the run folder; tasks whose
    every record is in it need no data any more."""
    require_tracker(job.recipe.track)
    _require_layout(job)
    _require_engine(job)
    _require_tasks(job, out)
    _require_test_text(job)


def _require_layout(job: Job) -> None:
    """transformers opens the compressed-tensors layout with that library, which decompresses to BF16 only."""
    measure = job.recipe.measure
    if job.recipe.export.layout == "modelopt" or not (measure.fidelity or measure.accuracy or measure.throughput):
        return
    if importlib.util.find_spec("compressed_tensors") is None:
        raise UsageError("measuring the compressed-tensors layout needs that library: pip install compressed-tensors")
    if job.dtype != "bfloat16":
        raise UsageError(
            f"the compressed-tensors library computes in bfloat16 only, dtype is {job.dtype}: set dtype to bfloat16, or "
            "export.layout to modelopt and `qad convert` the result"
        )


def _require_engine(job: Job) -> None:
    """An engine that the recipe names; what `auto` finds is found when it is needed."""
    measure = job.recipe.measure
    if measure.engine not in ENGINES or not (measure.memory or measure.throughput):
        return
    installed(measure.engine, engine_python(measure.engine))
    if measure.throughput:
        choose_driver(None, load_pythons(Serving(measure.engine)))


def _require_tasks(job: Job, out: Path | None) -> None:
    section = job.recipe.measure.accuracy
    arms = ("bf16", *job.recipe.quantized)
    if section is None or (out and all((out / "measure" / arm / "accuracy.json").is_file() for arm in arms)):
        return
    Scoring.of(section, job.recipe.seed).require_data()


def _require_test_text(job: Job) -> None:
    """Documents enough for the distance; what the teacher is to write is not there yet."""
    section = job.recipe.measure.fidelity
    if section is None or any(isinstance(source, Generations) for source in section.data.root):
        return
    require_test_text(section, job.text["test"], job.tokenizer, job.recipe.seed, job.source, job.dtype)
