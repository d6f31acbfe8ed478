"""The balanced model as a folder (qad.training.balance), and the job that goes on from it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qad.arms.origin import BALANCED
from qad.artifact import run_stage
from qad.errors import SourceError
from qad.model.beside import beside
from qad.model.loader import load_model
from qad.model.names import names_of
from qad.model.source import Checkpoint, open_checkpoint
from qad.model.streamed import streamed_model
from qad.numerics.widened import widened_linears
from qad.progress import Progress
from qad.recipes.job import Job
from qad.text.windows import Windows, WindowSet
from qad.training.balance.sites import Factor, Site, exponent_of, factors_of, sites_of
from qad.training.calibrate import forward_to, real_inputs

_KINDS = "balanced"  # in the metadata of the weights
_BATCH = 8  # windows


def balanced(job: Job, out: Path, say: Callable[[str], None] = lambda line: None) -> Job:
    """The job on the balanced original, where `quantize.balance` asks for it; else the job itself.

    out: folder of the balanced model, reused where nothing of it changed. Raises SourceError where no part of the model can be
    balanced.
    """
    windows = job.calibration_windows()
    if not job.recipe.quantize.balance or windows is None:
        return job
    artifact = run_stage(
        BALANCED,
        out,
        {"balance": 1, **job.compute},
        {"source": job.source.digest, "text": windows.digest},
        functools.partial(_make, job, windows),
        replace=True,
    )
    for kind, count in _kinds(artifact.path).items():
        say(f"balance {kind}: {count} sites" if count else f"balance {kind}: not, the model would compute something else")
    return dataclasses.replace(job, source=open_checkpoint(artifact.path))


def _make(job: Job, windows: WindowSet, folder: Path) -> None:
    sites = sites_of(job.source, job.selection)
    kept: set[str] = set()
    if sites:
        with Progress("balance", windows.tokens, "tok") as bar:
            exponents = _exponents(job, sites, windows, bar.update)
        kept = _kinds_that_keep_bits(job, sites, exponents, windows.first(1))
    if not kept:
        raise SourceError(
            f"quantize.balance: nothing of {job.source.display_name} can be balanced without changing what it computes: "
            "leave balance out"
        )
    chosen = [site for site in sites if site.kind in kept]
    counts = {kind: sum(site.kind == kind for site in chosen) for kind in dict.fromkeys(site.kind for site in sites)}
    _write(job.source, factors_of(chosen, exponents), counts, folder)


@torch.no_grad()
def _exponents(job: Job, sites: list[Site], windows: WindowSet, progress: Callable[[int], object]) -> dict[str, Tensor]:
    """log2 s of every site by its observed module, int32, of the channels that are grown."""
    model = _loaded(job, {})
    power: dict[str, Tensor] = {}
    counted: list[Tensor | None] = [None]
    device = next(model.parameters()).device

    def observe(name: str, module: Any, args: tuple[Tensor, ...]) -> None:
        x_tK = real_inputs(args[0], counted[0], module).flatten(0, -2).float()
        sum_K = x_tK.square().sum(0, dtype=torch.float64)
        power[name] = power[name] + sum_K if name in power else sum_K

    with contextlib.ExitStack() as stack:
        for name in (site.observed for site in sites):
            module = model.get_submodule(names_of(model).inner(name))
            stack.callback(module.register_forward_pre_hook(functools.partial(observe, name)).remove)
        forward = stack.enter_context(forward_to(model, [site.observed for site in sites]))
        stack.enter_context(widened_linears(device.type))
        for batch in windows.batches(_BATCH):
            counted[0] = None if batch.counted_ST.all() else batch.counted_ST.to(device)
            forward(**batch.model_inputs(device))
            progress(batch.tokens)
    return {site.observed: exponent_of(power[site.observed].cpu(), site.repeat) for site in sites}


def _kinds_that_keep_bits(job: Job, sites: list[Site], exponents: Mapping[str, Tensor], sample: Windows) -> set[str]:
    kinds = {site.kind for site in sites}
    original = _hidden(_loaded(job, {}), sample)

    def keep(some: Collection[str]) -> bool:
        changed = _loaded(job, factors_of([site for site in sites if site.kind in some], exponents))
        return torch.equal(_hidden(changed, sample), original)

    if not kinds or keep(kinds):
        return kinds
    alone = {kind for kind in sorted(kinds) if keep({kind})}
    return alone if alone and keep(alone) else set()


@torch.no_grad()
def _hidden(model: Any, sample: Windows) -> Tensor:
    """Bits of the last hidden states."""
    device = next(model.parameters()).device
    with widened_linears(device.type):
        hidden: Tensor = model.base_model(**sample.model_inputs(device))[0]
    return hidden.float().cpu().view(torch.int32)


@dataclasses.dataclass(frozen=True)
class _Scaled(Checkpoint):
    """The original, each tensor times its factor."""

    factors: Mapping[str, Factor] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> Tensor:
        tensor = super().get(name)
        return self.factors[name].of(tensor) if name in self.factors else tensor


def _loaded(job: Job, factors: Mapping[str, Factor]) -> Any:
    """The model that the factors make of the original, streamed where that can be."""
    source = job.source
    streamed = (
        streamed_model(_Scaled(source.folder, source.config, source.tensors, factors), job.dtype) if job.device == "cpu" else None
    )
    if streamed is not None:
        return streamed
    model = load_model(source, job.dtype, job.device)
    held = names_of(model).of({name: parameter.detach() for name, parameter in model.named_parameters()})
    for name, factor in factors.items():
        held[name].copy_(factor.of(held[name]))
    return model


def _write(source: Checkpoint, factors: Mapping[str, Factor], kinds: Mapping[str, int], folder: Path) -> None:
    """The original's files, one at a time in memory, under their names; each tells what was balanced."""
    stored = {(info.file, info.stored or name): name for name, info in source.tensors.items()}
    metadata = {"format": "pt", _KINDS: json.dumps(kinds)}
    for path in sorted({info.file for info in source.tensors.values()}):
        tensors: dict[str, Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dictionary
                factor = factors.get(stored.get((path, name), ""))
                tensor = file.get_tensor(name)
                tensors[name] = tensor if factor is None else factor.of(tensor)
        save_file(tensors, folder / path.name, metadata=metadata)
    for index in source.folder.glob("*.safetensors.index.json"):
        (folder / index.name).write_bytes(index.read_bytes())
    beside(source.folder).copy(folder)
    if not source.card.get("model_name"):  # else it would be called after the folder
        front = yaml.safe_dump({**source.card, "model_name": source.display_name}, sort_keys=False, allow_unicode=True)
        (folder / "README.md").write_text(f"---\n{front}---\n", encoding="utf-8")


def _kinds(folder: Path) -> dict[str, int]:
    with safe_open(next(iter(sorted(folder.glob("*.safetensors")))), framework="pt") as file:
        kinds: dict[str, int] = json.loads(file.metadata()[_KINDS])
    return kinds
