"""Formats for a target of bits (`quantize.search`): each unit's own KL, measured once, then the cheapest sum.

    choice    the formats whose sum of kl is smallest within a cost. That KLs add up is an assumption, near enough while each is
              small (LOG.md has predicted beside measured); it is what makes the choice a knapsack.

The choice becomes ordinary `quantize.formats` and `quantize.exclude`, and everything behind it is as if they had been written by
hand. The measurement is a stage of its own, which another number of bits reuses.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from qad.arms.globs import globs_of
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.errors import UsageError
from qad.model.experts import routed_share
from qad.model.loader import load_model, load_skeleton
from qad.model.names import names_of
from qad.model.source import Checkpoint
from qad.model.streamed import streamed_model
from qad.progress import Progress
from qad.recipes.job import Job
from qad.recipes.quantize import BF16, Quantize
from qad.text.windows import WindowSet
from qad.training.search.fisher import estimated
from qad.training.search.sensitivity import BATCH, Treatment, Unit, sensitivities, units_of

KIND = "search"
SENSITIVITY = "sensitivity.json"


def searched(job: Job, out: Path, say: Callable[[str], None] = lambda line: None) -> Job:
    """The job whose recipe names the formats that its `quantize.search` asks for; the job itself where it asks for none.

    out: folder of the measurement, reused where nothing of it changed. Raises UsageError for a target that no choice meets.
    """
    section, windows = job.recipe.quantize.search, job.calibration_windows()
    if section is None or windows is None:
        return job
    skeleton = load_skeleton(job.source)
    units = units_of(job.selection, routed_share(skeleton.config.get_text_config()))
    kl = _measured(job, windows, units, out)
    shapes = job.selection.modules
    chosen = choose(units, kl, shapes, section.formats, section.bits, section.cost)
    quantize = _written(job.recipe.quantize, units, chosen, [*shapes, *job.selection.excluded])
    selection = select(skeleton, quantize.format, quantize.include, quantize.exclude, quantize.formats)
    stored, active = (effective_bits(units, chosen, shapes, cost) for cost in ("stored", "active"))
    counts = ", ".join(f"{list(chosen.values()).count(format)} {format}" for format in section.formats)
    total = sum(kl.get((name, format), 0.0) for name, format in chosen.items())
    say(f"search {len(units)} units: {counts}; {stored:.2f} bits a weight stored, {active:.2f} read by a token")
    say(f"       sum of their KLs {total:.4f} nats a token")
    return dataclasses.replace(job, recipe=job.recipe.model_copy(update={"quantize": quantize}), selection=selection)


def _measured(job: Job, windows: WindowSet, units: Sequence[Unit], out: Path) -> dict[tuple[str, str], float]:
    """Of the first `search.tokens` tokens of the calibration text."""
    section = job.recipe.quantize.search
    assert section is not None
    formats = [format for format in section.formats if format != BF16]
    count = max(1, min(len(windows), section.tokens // windows.seq_len))
    config = {
        "units": [unit.name for unit in units],
        "formats": formats,
        "scales": job.recipe.quantize.scales,
        "windows": count,
        "by": section.by,
        "headroom": job.recipe.calibrate.headroom if job.recipe.calibrate else None,
        **job.compute,
    }

    def work(folder: Path) -> None:
        headroom = job.recipe.calibrate.headroom if job.recipe.calibrate else 1.0
        treatment = Treatment(job.selection, lambda m: job.source.get(f"{m}.weight"), job.recipe.quantize.scales, headroom)
        passes = len(units) * len(formats) * (1 if section.by == "kl" else -(-count // BATCH))
        with Progress("search", passes, "pass") as bar:
            if section.by == "kl":
                found = sensitivities(_calibrated(job), treatment, windows.first(count), units, formats, bar.update)
            else:
                model = load_model(job.source, job.dtype, job.device)
                found = estimated(model, treatment, windows.first(count), units, formats, job.recipe.seed, bar.update)
        rows = [{**dataclasses.asdict(unit), "kl": {format: found[unit.name, format] for format in formats}} for unit in units]
        (folder / SENSITIVITY).write_text(json.dumps({"tokens": count * windows.seq_len, "units": rows}, indent=1) + "\n")

    inputs = {"source": job.source.digest, "text": windows.digest}
    artifact = run_stage(KIND, out, config, inputs, work, replace=True)
    raw = json.loads((artifact.path / SENSITIVITY).read_text(encoding="utf-8"))
    return {(unit["name"], format): kl for unit in raw["units"] for format, kl in unit["kl"].items()}


def _calibrated(job: Job) -> Any:
    """As for calibration, with the weight of the output head in place, which is read without running it."""
    streamed = streamed_model(job.source, job.dtype) if job.device == "cpu" else None
    if streamed is None:
        return load_model(job.source, job.dtype, job.device)
    keep_head(streamed, job.source)
    return streamed


def keep_head(streamed: Any, source: Checkpoint) -> None:
    """Give a streamed model an output head that has its weights at all times: it is read without being run."""
    old = streamed.get_output_embeddings()
    (path,) = (name for name, module in streamed.named_modules() if module is old)
    name = names_of(streamed).module(path)
    stored = source.embedding if source.tied_embeddings else f"{name}.weight"
    head = nn.Linear(1, 1, bias=False, device="meta")
    head.out_features, head.in_features = old.weight.shape
    head.weight = nn.Parameter(source.get(str(stored)).to(old.weight.dtype), requires_grad=False)
    if old.bias is not None:
        head.bias = nn.Parameter(source.get(f"{name}.bias").to(old.weight.dtype), requires_grad=False)
    streamed.set_output_embeddings(head)


def _written(section: Quantize, units: Sequence[Unit], chosen: Mapping[str, str], names: Sequence[str]) -> Quantize:
    """The section as if the choice had been written by hand: the format of most weights is `format`."""
    weights: dict[str, int] = {}
    for unit in units:
        weights[chosen[unit.name]] = weights.get(chosen[unit.name], 0) + unit.weights
    usual = max((format for format in weights if format != BF16), key=lambda format: weights[format], default=None)
    if usual is None:
        raise UsageError("quantize.search: nothing would be quantized; ask for fewer bits")
    by_module = {module: chosen[unit.name] for unit in units for module in unit.modules}
    globs = globs_of({module: format for module, format in by_module.items() if format != usual}, names)
    formats = {glob: format for glob, format in globs.items() if format != BF16}
    exclude = [*section.exclude, *(glob for glob, format in globs.items() if format == BF16)]
    return section.model_copy(update={"format": usual, "formats": formats, "exclude": exclude, "search": None})


def choose(
    units: Sequence[Unit],
    kl: Mapping[tuple[str, str], float],
    shapes: Mapping[str, tuple[int, int]],
    formats: Sequence[str],
    bits: float,
    cost: str = "stored",
) -> dict[str, str]:
    """Unit's name -> format: the smallest sum of KL that is found within `bits` a weight.

    cost: stored, every byte counts alike; active, by the share of it that a token reads.

    Raises UsageError where the cheapest choice costs more.

    Greedy over the lower convex hulls of each unit's (bytes, KL): the step that saves most KL a byte first. That is the best
    choice but for what one step leaves of the budget.
    """

    def price(unit: Unit, format: str) -> float:
        return unit.bytes(shapes, format) * (unit.share if cost == "active" else 1.0)

    budget = bits / 8 * sum(unit.weights * (unit.share if cost == "active" else 1.0) for unit in units)
    chosen: dict[str, str] = {}
    steps: list[tuple[float, float, str, str]] = []
    spent = 0.0
    for unit in units:
        hull = _hull([(price(unit, format), kl.get((unit.name, format), 0.0), format) for format in formats])
        chosen[unit.name] = hull[0][2]
        spent += hull[0][0]
        for (start, worse, _), (end, better, format) in itertools.pairwise(hull):
            steps.append(((worse - better) / (end - start), end - start, unit.name, format))
    if spent > budget * (1 + 1e-9):
        least = effective_bits(units, chosen, shapes, cost)
        raise UsageError(f"quantize.search.bits {bits:g} cannot be had: the cheapest of {', '.join(formats)} take {least:.2f}")
    full: set[str] = set()
    for _, extra, name, format in sorted(steps, key=lambda step: -step[0]):
        if name not in full and spent + extra <= budget * (1 + 1e-9):
            chosen[name], spent = format, spent + extra
        else:
            full.add(name)  # a later step of the unit starts where this one ends
    return chosen


def _hull(points: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Lower convex hull of (bytes, KL), from the cheapest on, falling."""
    hull: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-2][1] - hull[-1][1]) * (point[0] - hull[-1][0]) <= (hull[-1][1] - point[1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append(point)
    return hull


def effective_bits(units: Sequence[Unit], chosen: Mapping[str, str], shapes: Mapping[str, tuple[int, int]], cost: str) -> float:
    """Bits a weight of a choice, scales included, by the same cost."""
    share = {unit.name: unit.share if cost == "active" else 1.0 for unit in units}
    total = sum(unit.weights * share[unit.name] for unit in units)
    return 8 * sum(unit.bytes(shapes, chosen[unit.name]) * share[unit.name] for unit in units) / total
