"""Whether a training has room, in memory and on disk, on this machine or on one that is named. GB = 1e9 bytes.

What surely is needed is refused where it is more than there is; activations and a chunk's logits come on top.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import torch

from qad.command.planning.scale import Need, Shape, need
from qad.errors import SourceError, UsageError
from qad.model.loader import load_skeleton
from qad.recipes.job import Job
from qad.recipes.recipe import Train

_CERTAIN = ("student", "masters", "gradients", "moments", "teacher")


def shapes(job: Job) -> tuple[Shape, Shape | None] | None:
    """Of the student and of another teacher; None for a model whose parts are not told apart."""
    try:
        student = Shape.of(load_skeleton(job.source), job.selection, job.recipe.train)
        return student, None if job.teacher is job.source else Shape.of(load_skeleton(job.teacher), None)
    except SourceError:
        return None


def require_room(job: Job, out: Path | None = None) -> None:
    """Raises UsageError where the recipe's training cannot fit into this machine. out: of a run; arms that are there are not made
    again."""
    train = job.recipe.train
    if train is None or (out and all((out / "arms" / method).is_dir() for method in train.methods)):
        return
    found = shapes(job)
    if found is None:
        return
    if train.optimizer == "adamw_offloaded" and not torch.cuda.is_available():  # its moments are in the same memory
        train = train.model_copy(update={"optimizer": "adamw"})
    require_memory(found, train, job.dtype, *_memory())
    asked = (out or Path.cwd()).absolute()
    place = next(folder for folder in (asked, *asked.parents) if folder.is_dir())
    free, size = shutil.disk_usage(place).free, _disk(found[0], train) - _bytes(out)
    if size > free:
        raise UsageError(
            f"the disk of {place} is too small: arms, checkpoints and resumable states take {size / 1e9:.3g} GB, "
            f"{free / 1e9:.3g} GB are free: choose another --out, or make room"
        )


def require_memory(found: tuple[Shape, Shape | None], train: Train, dtype: str, memory: float, ranks: int, name: str) -> None:
    """The same of memory alone. memory: bytes of each of `ranks` processes. name: of the machine, for the message."""
    shape, teacher = found
    taken = _certain(need(shape, train, dtype, ranks, teacher))
    if taken <= memory:
        return
    lighter = train.model_copy(update={"optimizer": "adamw8bit"})
    saved = taken - _certain(need(shape, lighter, dtype, ranks, teacher))
    left = "" if taken - saved > memory else ", and then it fits"
    remedy = f"train.optimizer: adamw8bit saves {saved / 1e9:.3g} GB{left}; " if saved > 0 else ""
    raise UsageError(
        f"training does not fit: {taken / 1e9:.3g} GB and activations on {memory / 1e9:.3g} GB of {name}: {remedy}"
        "fewer parameters in train.trainable take less; `qad plan --gpu NAME --gpus N` asks for another machine"
    )


def _certain(found: Need) -> float:
    return sum(found.parts[name] for name in _CERTAIN)


def _memory() -> tuple[float, int, str]:
    """Bytes a process of this machine may have, the number of processes, and what to call it."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory), ranks, "this GPU"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (psutil.virtual_memory().total + psutil.swap_memory().total) / here, ranks, "this machine"


def _disk(shape: Shape, train: Train) -> float:
    """Masters of every trained arm in FP32, two states while one replaces another, checkpoints of half a byte a parameter."""
    state = 4 * shape.parameters + (2 if train.optimizer == "adamw8bit" else 8) * shape.trained
    return len(train.methods) * (4 + 0.5) * shape.parameters + 2 * state + 0.5 * shape.parameters


def _bytes(folder: Path | None) -> int:
    """What a run folder has taken already, of an interrupted training too."""
    files = folder.rglob("*") if folder and folder.is_dir() else ()
    return sum(path.stat().st_size for path in files if path.is_file())
