"""KL against effective bits: formats found by search, FP8 in layers evenly spread, FP8 by name.

python tests/bench/search_curve.py models/SmolLM2-135M-Instruct [--by kl]

The choice is made on the calibration split, the KL is that of documents of the test split, with 95 % intervals over documents.
Minutes by gradient, an hour by kl on two cores; 40 s a row.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from harness.fidelity.distance import measure_fidelity
from harness.records.record import FidelityData
from harness.statistics.resampling import ratio_of_sums
from qad.arms.globs import globs_of
from qad.arms.selection import Selection, select
from qad.model.loader import load_model, load_skeleton
from qad.numerics.linear import wrap_linears
from qad.recipes.job import Job, prepare
from qad.recipes.load import load_recipe
from qad.text.packing import sequences
from qad.training.search.choice import effective_bits, searched
from qad.training.search.sensitivity import Treatment, Unit, units_of

TARGETS = (4.75, 5.0, 5.5, 6.0, 7.0, 8.0)
NAMES: dict[str, Callable[[Unit], bool]] = {
    "nothing": lambda unit: False,
    "everything": lambda unit: True,
    "q, k, v": lambda unit: "q_proj" in unit.name,
    "attention": lambda unit: "self_attn" in unit.name,
    "down": lambda unit: "down_proj" in unit.name,
    "first and last two layers": lambda unit: layer(unit) in (0, 1, 28, 29),
}


def layer(unit: Unit) -> int:
    return int(unit.name.split(".")[2])


class Curve:
    """Choices of a job's formats and the KL of each."""

    def __init__(self, job: Job, tokens: int) -> None:
        self.job, self.units, self.skeleton = job, units_of(job.selection, 1.0), load_skeleton(job.source)
        self.text = sequences(job.text["test"], job.tokenizer, tokens, 256, 0).pairs
        self.teacher = load_model(job.source, job.dtype, "cpu")
        windows = job.calibration_windows()
        assert windows is not None
        treatment = Treatment(job.selection, lambda module: job.source.get(f"{module}.weight"))
        self.treatment = treatment
        self.scales = treatment.input_scales(self.teacher, list(windows.batches(8)), ["NVFP4", "FP8"])

    def bits(self, selection: Selection) -> float:
        formats = {u.name: selection.format_of(u.modules[0]) if u.modules[0] in selection.modules else "BF16" for u in self.units}
        return effective_bits(self.units, formats, self.job.selection.modules, "stored")

    def by_search(self, bits: float, by: str, out: Path) -> Selection:
        recipe = load_recipe("smollm2-135m", ["quantize.scales=dynamic", f"quantize.search={{bits: {bits}, by: {by}}}"])
        asked = self.job.recipe.model_copy(update={"quantize": recipe.quantize})
        return searched(dataclasses.replace(self.job, recipe=asked), out).selection

    def in_fp8(self, wanted: Callable[[Unit], bool]) -> Selection:
        decided = {module: "FP8" for unit in self.units if wanted(unit) for module in unit.modules}
        return select(self.skeleton, "NVFP4", formats=globs_of(decided, list(self.job.selection.modules)))

    def spread(self, bits: float) -> Selection:
        """Whole layers evenly spread, the last of them in part, so that the bits are used."""
        layers = layer(self.units[-1]) + 1
        count = math.ceil((bits - 4.5) / 3.5 * layers)
        picked = {round((number + 0.5) * layers / count - 0.5) for number in range(count)}
        names: set[str] = set()
        for unit in self.units:
            if layer(unit) in picked and self.bits(self.in_fp8(lambda u, own=unit: u.name in names | {own.name})) <= bits:  # type: ignore[misc]
                names.add(unit.name)
        return self.in_fp8(lambda unit: unit.name in names)

    def measure(self, selection: Selection) -> FidelityData:
        model = load_model(self.job.source, self.job.dtype, "cpu")
        for unit in self.units:
            if unit.modules[0] in selection.modules:
                for name, weight in self.treatment.decoded(unit, selection.format_of(unit.modules[0]), torch.device("cpu")):
                    model.get_submodule(name).weight.data.copy_(weight)
        formats = {name: selection.format_of(name) for name in selection.modules}
        wrap_linears(model, {name: (self.scales[format][name], format) for name, format in formats.items()})
        return measure_fidelity({"arm": model}, self.teacher, self.text, "python-docs")["arm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--by", choices=["kl", "gradient"], default="gradient")
    parser.add_argument("--tokens", type=int, default=4096, help="of the test split")
    parser.add_argument("--out", type=Path, default=Path("build/search"), help="where the search is kept")
    args = parser.parse_args()
    settings = [f"model={args.model}", "quantize.scales=dynamic", "dtype=float32"]
    curve = Curve(prepare(load_recipe("smollm2-135m", settings)), args.tokens)
    choices = {f"search {bits}": curve.by_search(bits, args.by, args.out) for bits in TARGETS}
    choices |= {f"spread {bits}": curve.spread(bits) for bits in TARGETS[:-1]}
    choices |= {name: curve.in_fp8(wanted) for name, wanted in NAMES.items()}
    for name, selection in choices.items():
        rows = curve.measure(selection).sequences
        top, bottom = np.array([row.kl_sum for row in rows]), np.array([float(row.tokens) for row in rows])
        found = ratio_of_sums(top, bottom, np.arange(len(rows)), log=True)
        print(f"{name:<28}{curve.bits(selection):.2f} bits  KL {found.value:.4f} ({found.low:.4f}-{found.high:.4f})", flush=True)


if __name__ == "__main__":
    main()
