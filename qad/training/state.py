"""The resumable state of a training run: masters, optimizer moments and progress, in safetensors and JSON.

Data order, schedule and scales are functions of (seed, step) and the masters, so nothing else is needed for a resumed
run to go on with the bits of an uninterrupted one. Ranks write rows of one file and read rows of it, be they as many or not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qad.errors import ArtifactError
from qad.place import write_whole
from qad.training.ranks.group import here
from qad.training.ranks.rows import write_rows


def save_state(
    folder: Path,
    step: int,
    masters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    lengths: Mapping[str, int],
) -> None:
    """Write FOLDER/state-STEP whole, then remove the older one. lengths: rows of the whole masters; ranks hold some of each."""
    state, aside, ranks = folder / f"state-{step:08d}", folder / "state.partial", here()
    if ranks.first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    ranks.wait()
    tensors = {f"master.{name}": master.detach() for name, master in masters.items()}
    tensors |= {key: tensor.detach() for key, tensor in _moments(masters, optimizer)}
    write_rows(aside / "tensors.safetensors", tensors, _lengths(tensors, masters, lengths), ranks)
    if ranks.first:
        write_whole(aside / "progress.json", json.dumps(progress) + "\n")
        aside.rename(state)
        for older in folder.glob("state-*"):
            if older != state:
                shutil.rmtree(older)
    ranks.wait()


def load_state(
    folder: Path, masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, lengths: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Progress and masters of the newest state, the optimizer's moments restored in place; None where there is none. lengths: as
    for `save_state`; how many ranks wrote it does not matter.

    Raises ArtifactError for a state that lacks anything.
    """
    ranks = here()
    states = ranks.of_first([path.name for path in sorted(folder.glob("state-*"))])
    if not states:
        return None
    state = folder / states[-1]
    _create_moments(masters, optimizer)
    wanted = {f"master.{name}": master for name, master in masters.items()} | dict(_moments(masters, optimizer))
    by_rows = _lengths(wanted, masters, lengths)
    with safe_open(state / "tensors.safetensors", framework="pt") as file:
        missing = sorted(wanted.keys() - set(file.keys()))
        if missing:
            raise ArtifactError(f"{state} lacks the state of {missing[0]}: remove {folder} and train again")

        def stored(key: str) -> Tensor:
            tensor: Tensor = file.get_tensor(key)
            return tensor[ranks.rows(by_rows[key])] if key in by_rows else tensor

        with torch.no_grad():
            for key, moment in _moments(masters, optimizer):
                moment.copy_(stored(key))
        found = {name: stored(f"master.{name}") for name in masters}
    return json.loads((state / "progress.json").read_text(encoding="utf-8")), found


def discard_state(folder: Path) -> None:
    """Remove everything that only served to resume."""
    for path in (*folder.glob("state*"), *folder.glob("best.safetensors*")):
        if path.name == "stage.json":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_aside(masters: Mapping[str, Tensor], path: Path, lengths: Mapping[str, int]) -> None:
    """Write beside, then rename. lengths: as for `save_state`."""
    aside, ranks = path.with_name(path.name + ".tmp"), here()
    write_rows(aside, masters, _lengths(masters, {}, lengths), ranks)
    if ranks.first:
        aside.replace(path)
    ranks.wait()


def _lengths(tensors: Mapping[str, Tensor], masters: Mapping[str, Tensor], lengths: Mapping[str, int]) -> dict[str, int]:
    """Of masters, and of moments that lie as their master does, under NAME or KIND.NAME: rows of the whole."""
    if here().alone:
        return {}
    found = {}
    for key, tensor in tensors.items():
        name = key if key in lengths else key.partition(".")[2]
        if name not in masters or masters[name].shape == tensor.shape:
            found[key] = lengths[name]
    return found


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
