"""Parity records in the report: page, report.json and tables say engine, kernels, layout, differences and the verdict."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from harness.compare.recovery import compare
from harness.records.record import Engine, ParityData, ParityLayer, ParityPrompt, Record
from reports.render import render
from reports.sections.engine_parity import parity, parity_of

PROMPTS = [ParityPrompt(5, 16, 2e-4, 16, 1e-6, None, 1e-5), ParityPrompt(11, 10, 3e-2, 8, 4e-3, 2e-3, 6e-5)]
LAYERS = [ParityLayer("model.layers.0.mlp.up_proj", 3e-4), ParityLayer("model.layers.1.mlp.up_proj", 7e-4)]
VLLM = Engine("vllm", "0.32.0", "float32", "cpu", "qad_nvfp4 linear", emulated=True, native_fp4=False)


def data(**changes: Any) -> ParityData:
    fields: dict[str, Any] = {
        "prompts": PROMPTS,
        "layers": LAYERS,
        "tolerance": 1e-3,
        "layer_tolerance": 1e-3,
        "floor_factor": 3.0,
        "reference": "transformers 5.24.0, torch 2.13.0",
        "engine_log": ["Using qad_nvfp4"],
        "failures": [],
    }
    return ParityData(**{**fields, **changes})


@pytest.fixture
def held(record_of: Callable[..., Record]) -> Record:
    """QAD in an engine, as it agrees."""
    return record_of("qad", data(), engine=VLLM, settings={"engine": "vllm", "layout": "modelopt", "eager": True})


def test_a_record_is_summed_up_over_its_positions(held: Record) -> None:
    found = parity_of([held])["qad"]
    assert (found.engine, found.layout, found.holds) == (VLLM, "modelopt", True)
    assert (found.max_difference, found.tokens_equal, found.tokens) == (3e-2, 24, 26)
    assert found.mean_difference == pytest.approx((20 * 1e-5 + 20 * 6e-5) / 40)
    assert found.mean_kl == pytest.approx((20 * 1e-6 + 20 * 4e-3) / 40)
    assert found.worst_layer == LAYERS[1]


def test_the_page_and_the_tables_have_it(run: Path, records: list[Record], held: Record) -> None:
    every = [*records, held]
    paths = {path.name: path for path in render(run, compare(every), every)}
    md = paths["report.md"].read_text(encoding="utf-8")
    row = next(line for line in md.splitlines() if line.startswith("| QAD | holds"))
    for part in (
        "vllm 0.32.0 float32",
        "qad\\_nvfp4 linear, on cpu, modelopt layout, not compiled",
        "0.0300",
        "24 of 26",
        "model.layers.1.mlp.up\\_proj, of 2 Linears",
    ):
        assert part in row
    raw = json.loads(paths["report.json"].read_text(encoding="utf-8"))
    assert raw["parity"]["qad"]["holds"] is True
    assert raw["parity"]["qad"]["max_difference"] == 3e-2
    assert raw["parity"]["qad"]["data"]["prompts"][1]["floor_kl"] == 2e-3
    assert {what["what"] for what in raw["not_measured"] if "Parity" in what["what"]} == {"Parity of an engine on PTQ"}
    table = pyarrow.parquet.read_table(io.BytesIO(paths["parity.parquet"].read_bytes())).to_pylist()
    assert [(row["prompt"], row["module"], row["max_difference"], row["verdict"]) for row in table] == [
        (0, "", 2e-4, "holds"),
        (1, "", 3e-2, "holds"),
        (None, LAYERS[0].module, 3e-4, "holds"),
        (None, LAYERS[1].module, 7e-4, "holds"),
    ]


def test_a_failure_says_why_and_what_is_no_number_is_called_so(held: Record) -> None:
    broken = [dataclasses.replace(PROMPTS[0], max_difference=None, mean_difference=None, mean_kl=None), PROMPTS[1]]
    lines = [f"prompt {n}: log-probabilities that are not numbers" for n in range(5)]
    layers = [*LAYERS, ParityLayer("lm_head", None)]
    failed = dataclasses.replace(held, data=data(prompts=broken, layers=layers, failures=lines), settings={})
    found = parity_of([failed])["qad"]
    assert (found.holds, found.layout, found.max_difference, found.mean_kl) == (False, None, None, None)
    assert found.worst_layer is not None
    assert found.worst_layer.module == "lm_head"
    table = parity([failed])
    assert table is not None
    verdict, engine, largest, kl, *_ = table.groups[0].rows[0].cells
    assert (verdict.text, largest.text, kl.text) == ("fails", "not a number", "not a number")
    assert engine.detail.endswith("layout not recorded")
    assert largest.detail == "mean not a number; limit 0.00100"
    assert verdict.detail.endswith("; and 2 more")


def test_a_record_from_before_mean_differences_were_kept(held: Record) -> None:
    old = [dataclasses.replace(prompt, mean_difference=None) for prompt in PROMPTS]
    table = parity([dataclasses.replace(held, data=data(prompts=old))])
    assert table is not None
    assert table.groups[0].rows[0].cells[2].detail == "mean not recorded; limit 0.00100"


def test_ties_decided_as_the_engine_did_are_told(held: Record) -> None:
    tied = dataclasses.replace(PROMPTS[1], max_difference=1e-4, ties=3, untied_difference=12.0, floor_kl=None)
    table = parity([dataclasses.replace(held, data=data(prompts=[PROMPTS[0], tied]))])
    assert table is not None
    assert table.groups[0].rows[0].cells[2].detail.endswith("limit 0.00100; 3 ties as the engine, 12.0 without")
    assert "Reference: transformers 5.24.0, torch 2.13.0." in table.note
