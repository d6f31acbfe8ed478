"""The resumable state of a training run: masters, optimizer moments and progress, in safetensors and JSON.

Data order, schedule and scales are functions of (seed, step) and the masters, so nothing else is needed for a resumed
run to go on with the bits of an uninterrupted one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qad.errors import ArtifactError
from qad.place import write_whole


def save_state(
    folder: Path, step: int, masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Write FOLDER/state-STEP whole, then remove the older one."""
    state, aside = folder / f"state-{step:08d}", folder / "state.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    tensors = {f"master.{name}": master.detach() for name, master in masters.items()}
    tensors |= {key: tensor.detach() for key, tensor in _moments(masters, optimizer)}
    save_file(tensors, aside / "tensors.safetensors")
    write_whole(aside / "progress.json", json.dumps(progress) + "\n")
    aside.rename(state)
    for older in folder.glob("state-*"):
        if older != state:
            shutil.rmtree(older)


def load_state(
    folder: Path, masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Progress and masters of the newest state, the optimizer's moments restored in place; None where there is none.

    Raises ArtifactError for a state that lacks anything.
    """
    states = sorted(folder.glob("state-*"))
    if not states:
        return None
    tensors = load_file(states[-1] / "tensors.safetensors")
    _create_moments(masters, optimizer)
    wanted = {f"master.{name}" for name in masters} | {key for key, _ in _moments(masters, optimizer)}
    missing = sorted(wanted - tensors.keys())
    if missing:
        raise ArtifactError(f"{states[-1]} lacks the state of {missing[0]}: remove {folder} and train again")
    with torch.no_grad():
        for key, moment in _moments(masters, optimizer):
            moment.copy_(tensors[key])
    progress = json.loads((states[-1] / "progress.json").read_text(encoding="utf-8"))
    return progress, {name: tensors[f"master.{name}"] for name in masters}


def discard_state(folder: Path) -> None:
    """Remove everything that only served to resume."""
    for path in (*folder.glob("state*"), *folder.glob("best.safetensors*")):
        if path.name == "stage.json":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_aside(tensors: dict[str, Tensor], path: Path) -> None:
    """Write beside, then rename."""
    aside = path.with_name(path.name + ".tmp")
    save_file(tensors, aside)
    aside.replace(path)


def _create_moments(masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """An Adam step with zero gradients creates every moment and moves nothing."""
    for master in masters.values():
        if master.requires_grad:
            master.grad = torch.zeros_like(master)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _moments(masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the optimizer's state under KIND.MASTER; quantized moments by their parts."""
    for name, master in masters.items():
        for kind, value in optimizer.state.get(master, {}).items():
            if hasattr(value, "__tensor_flatten__"):
                parts, _ = value.__tensor_flatten__()
                yield from ((f"{kind}:{part}.{name}", getattr(value, part)) for part in parts)
            else:
                yield f"{kind}.{name}", value
