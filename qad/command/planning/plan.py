"""What a recipe would do, before it is done: what is quantized, which text, how many steps, how much memory and disk.

What a training takes of a machine is `scale`'s to say. GB = 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from qad.command.planning.init import gpu_bytes
from qad.command.planning.machine import require_memory, require_room, shapes
from qad.command.planning.preflight import require_measurable
from qad.command.planning.scale import config_alone, config_shape, gigabytes, scale_lines
from qad.numerics.formats import FORMATS
from qad.recipes.job import Job, prepare, require_enough_text
from qad.recipes.quantize import BF16
from qad.recipes.recipe import Measure, Recipe, Train
from qad.text.data import Generations
from qad.training.search.sensitivity import units_of


def plan(recipe: Recipe, say: Callable[[str], None], gpu: str | None = None, gpus: int = 1) -> None:
    """Find and check everything the recipe names, as `qad run` would, and print what it would do.

    Raises QadError where that could not be finished, on this machine or on `gpus` of the GPU that is named.
    """
    memory = gpu_bytes(gpu) if gpu else 0.0
    folder = Path(recipe.model).expanduser()
    if folder.is_dir() and config_alone(folder):
        _plan_config(folder, recipe, say)
        return
    job = prepare(recipe, say)
    train = recipe.train
    require_measurable(job)
    sources = [recipe.calibrate.data] if recipe.calibrate else []
    sources += [train.data, train.validation_data or train.data] if train else []
    if any(isinstance(part, Generations) for data in sources for part in data.root):
        say("text   is partly the teacher's own, which the run writes first")
    else:
        require_enough_text(job, say)
    for line in _search(job):
        say(line)
    for line in (*_training(train), *_disk(job)) if train else _disk(job):
        say(line)
    found = shapes(job) if train else None
    if train and found:
        for line in scale_lines(found[0], train, job.dtype, found[1]):
            say(line)
    for line in _measurements(recipe.measure):
        say(line)
    if gpu is None:
        require_room(job)
    elif train and found:
        require_memory(found, train, job.dtype, memory, gpus, gpu)


def _measurements(measure: Measure) -> Iterator[str]:
    """What `qad run` measures of every arm."""
    fidelity, accuracy, speed = measure.fidelity, measure.accuracy, measure.throughput
    kinds = ["memory"] * measure.memory
    kinds += [f"fidelity ({fidelity.tokens:,} tokens of {fidelity.data.name})"] if fidelity else []
    if accuracy:
        few = f", {accuracy.limit} items each" if accuracy.limit else ""
        kinds.append(f"accuracy ({accuracy.suite or ', '.join(accuracy.tasks)}{few})")
    if speed:
        kinds.append(f"throughput ({speed.input_tokens} + {speed.output_tokens} tokens)")
    yield f"measure {', '.join(kinds) or 'nothing'}"


def _plan_config(folder: Path, recipe: Recipe, say: Callable[[str], None]) -> None:
    """What can be said where weights and tokenizer are not there yet."""
    say(f"model  {folder.name}: config.json alone, so text, weights and tokenizer are not looked at")
    shape, quantized = config_shape(folder, recipe)
    say(f"       {quantized}")
    if recipe.train:
        for line in (*_training(recipe.train), *scale_lines(shape, recipe.train, recipe.dtype)):
            say(line)


def _search(job: Job) -> Iterator[str]:
    section = job.recipe.quantize.search
    if section:
        units, formats = len(units_of(job.selection, 1.0)), len([format for format in section.formats if format != BF16])
        passes = f"{units * formats:,} passes over {section.tokens:,} tokens, about half of each"
        how = passes if section.by == "kl" else f"estimated from backward passes over {section.tokens:,} tokens"
        yield f"search {units} units in {formats} formats for {section.bits:g} bits a weight: {how}"


def _training(train: Train) -> Iterator[str]:
    rate = f"learning rate {train.lr:g} {train.schedule}, {train.warmup_steps} warm-up steps"
    for method in train.methods:
        loss = "cross-entropy" if method == "qat" else train.loss
        yield (
            f"train  {method}: {loss}, {train.steps:,} steps of {train.tokens_per_step:,} tokens = {train.tokens_used:,} tokens, "
            f"{rate}"
        )


def _disk(job: Job) -> Iterator[str]:
    parameters = _parameters(job)
    selected = job.selection.modules.items()
    quantized = sum(FORMATS[job.selection.format_of(module)].bytes(*shape) for module, shape in selected)
    rest = sum(size for name, size in parameters.items() if name.rpartition(".")[0] not in job.selection.modules)
    checkpoint = quantized + 2 * rest
    total = sum(parameters.values())
    smaller = f"{2 * total / checkpoint:.2f}x smaller than {gigabytes(2 * total)} in BF16"
    trained = f", trained arm {gigabytes(4 * total)}, resumable state up to {gigabytes(24 * total)} while it is replaced"
    yield f"disk   checkpoint {gigabytes(checkpoint)} ({smaller}){trained if job.recipe.train else ''}"


def _parameters(job: Job) -> dict[str, int]:
    """Elements by name, a tied head once."""
    tied = {job.source.head} if job.source.tied_embeddings else set()
    return {name: math.prod(info.shape) for name, info in job.source.tensors.items() if name not in tied}
