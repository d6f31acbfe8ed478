"""Inputs above what was calibrated: counted while fidelity is measured, shown, and never in the way of the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.compare.recovery import compare
from harness.engines.transformers import LoadedModel, load
from harness.fidelity.section import measure_distances
from harness.records.record import Engine, FidelityData, Record, from_json, to_json
from qad.numerics.input_saturation import InputSaturation
from qad.numerics.linear import QuantizedLinear
from qad.recipes.recipe import Fidelity
from qad.text.packing import Sequences
from reports.sections.outcome import banners
from reports.sections.tables import fidelity_group


@pytest.mark.parametrize(("largest", "share"), [(1.0, 0.0), (1.001, 0.25), (4.0, 0.25)])
def test_blocks_above_the_calibrated_amax_by_hand(largest: float, share: float) -> None:
    """Calibrated to 1, which is 2688 steps of the input scale; one of four blocks holds `largest`."""
    linear = QuantizedLinear.wrap(nn.Linear(32, 8), torch.tensor(1.0 / 2688), "NVFP4")
    x = torch.full((2, 32), 0.5)
    x[1, 20] = largest
    before, counted = linear(x), InputSaturation()
    with counted.watching([linear, nn.Linear(32, 8)]):
        assert torch.equal(linear(x), before)
    assert counted.share == share
    linear(100 * x)
    assert counted.share == share, "nobody watches"
    weights_alone = QuantizedLinear.wrap(nn.Linear(32, 8), None, "NVFP4")
    with counted.watching([weights_alone]):
        weights_alone(x)
    assert counted.share is None


@pytest.mark.parametrize(("factor", "warned"), [(1.0, False), (0.01, True)])
def test_fidelity_counts_them_and_the_report_says_so(tiny: LoadedModel, packed_dir: Path, factor: float, warned: bool) -> None:
    """With a hundredth of the calibrated range nearly every block saturates; with all of it next to none does."""
    student: Any = load(packed_dir, "float32", "cpu").model
    for module in student.modules():
        if isinstance(module, QuantizedLinear) and module.input_scale is not None:
            module.input_scale.mul_(factor)
    ids = torch.randint(512, (24,), generator=torch.Generator().manual_seed(0))
    text = Sequences([("a", ids)], {"a": 24}, ["a"])
    section = Fidelity.model_validate({"data": "python-docs"})
    data = measure_distances(section, {"ptq": student}, tiny.model, text, 0)
    assert data["bf16"].saturated_inputs is None
    share = data["ptq"].saturated_inputs
    assert share is not None
    assert (share > 0.5) is warned
    records = [made(arm, found) for arm, found in data.items()]
    assert [from_json(to_json(record)) for record in records] == records
    comparison = compare(records)
    (row,) = [row for row in fidelity_group(comparison).rows if row.label == "Saturated inputs"]
    assert row.cells[1].text.endswith("%")
    said = [banner for banner in banners(comparison, records, []) if banner.title == "Saturated"]
    assert bool(said) is warned
    assert not said or "the inputs of PTQ" in said[0].text


def made(arm: str, data: FidelityData) -> Record:
    engine = Engine("transformers", "5", "float32", "cpu", "torch", emulated=True)
    return Record(arm, "m", arm, engine, {"seed": 0}, {}, "", 1.0, data)
