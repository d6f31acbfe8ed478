"""Weights alone and inputs alone: the same numbers as of models that are so by construction, and nothing is left changed."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.compare.recovery import compare
from harness.engines.transformers import LoadedModel, load
from harness.fidelity.distance import measure_fidelity
from harness.fidelity.parts import measure_parts
from harness.fidelity.section import measure_distances
from harness.records.record import FidelityStratum, Record, from_json, to_json
from qad.errors import UsageError
from qad.numerics.linear import QuantizedLinear, wrap_linears
from qad.recipes.recipe import Fidelity
from qad.text.packing import Sequences
from reports.sections.strata import kl_by_stratum, where_it_sits


def text() -> Sequences:
    generator = torch.Generator().manual_seed(0)
    return Sequences([(name, torch.randint(512, (24,), generator=generator)) for name in "ab"], {"a": 48}, ["a", "a"])


def as_stratum(name: str, students: dict[str, Any], teacher: Any) -> FidelityStratum:
    data = measure_fidelity(students, teacher, text().pairs, "text")["ptq"].sequences
    return FidelityStratum(name, [s.tokens for s in data], [s.kl_sum for s in data], [s.top1_agree for s in data])


def test_the_parts_are_those_of_models_made_by_hand(tiny: LoadedModel, packed_dir: Path) -> None:
    student: Any = load(packed_dir, "float32", "cpu").model
    before = student(text().pairs[0][1][None], use_cache=False).logits
    weights_only: Any = load(packed_dir, "float32", "cpu").model
    scales = {}
    for name, module in weights_only.named_modules():
        if isinstance(module, QuantizedLinear):
            scales[name] = (module.input_scale, module.format)
            module.input_scale = None
    inputs_only = copy.deepcopy(tiny.model)
    wrap_linears(inputs_only, scales)
    found = measure_parts({"ptq": student}, tiny.model, text().pairs, "text")["ptq"]
    assert found == [
        as_stratum("weights alone", {"ptq": weights_only}, tiny.model),
        as_stratum("inputs alone", {"ptq": inputs_only}, tiny.model),
    ]
    assert all(sum(part.kl_sum) > 0 for part in found)
    assert torch.equal(student(text().pairs[0][1][None], use_cache=False).logits, before)
    assert measure_parts({"ptq": weights_only}, tiny.model, text().pairs, "text") == {}, "no input is quantized"


def test_evened_channels_are_told_and_refused(tiny: LoadedModel, packed_dir: Path) -> None:
    student: Any = load(packed_dir, "float32", "cpu").model
    with torch.no_grad():
        student.model.layers[0].input_layernorm.weight[::4] *= 2
    with pytest.raises(UsageError, match=r"ptq: channels were evened out.*RUN/balanced as --teacher"):
        measure_parts({"ptq": student}, tiny.model, text().pairs, "text")


def test_the_report_says_where_it_sits(tiny: LoadedModel, packed_dir: Path) -> None:
    student: Any = load(packed_dir, "float32", "cpu").model
    section = Fidelity.model_validate({"data": "python-docs", "split": True})
    data = measure_distances(section, {"ptq": student}, tiny.model, text(), 0)
    records = [Record(arm, "m", arm, tiny.engine, {"seed": 0}, {}, "", 1.0, found) for arm, found in data.items()]
    assert [from_json(to_json(record)) for record in records] == records
    comparison = compare(records)
    row = comparison.fidelity["ptq"]
    table, said = kl_by_stratum(comparison), where_it_sits(comparison)
    assert table is not None
    assert [[line.label for line in group.rows] for group in table.groups if group.title == "What is quantized"] == [
        ["weights alone", "inputs alone"]
    ]
    assert said is not None
    assert f"({100 * row.by_part['inputs alone'].value / row.kl.value:.1f} %) by inputs alone" in said.text
    rows = {"ptq": dataclasses.replace(row, by_part={})}
    assert where_it_sits(dataclasses.replace(comparison, fidelity=rows)) is None
