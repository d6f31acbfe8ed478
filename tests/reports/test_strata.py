"""The parts of the distance, what models write, and what answers looked like: shown where measured, absent where not."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.compare.recovery import compare
from harness.records.comparison import Comparison, Estimate, OutputRow
from harness.records.record import Record
from reports.render import render
from reports.sections import strata


def estimate(value: float) -> Estimate:
    return Estimate(value, 0.9 * value, 1.1 * value, 24, 24, "test")


@pytest.fixture
def parted(records: list[Record]) -> Comparison:
    """PTQ and QAD with everything there is to know about their distance; QAD has one stratum fewer."""
    comparison = compare(records)
    fidelity = dict(comparison.fidelity)
    for arm, kl in (("ptq", 0.4), ("qad", 0.2)):
        places = ("1", "2-3", "4-7")[: 3 if arm == "ptq" else 2]
        fidelity[arm] = dataclasses.replace(
            fidelity[arm],
            by_position={name: estimate(kl * (i + 1)) for i, name in enumerate(places)},
            by_entropy={"0.01-0.5 nats": estimate(kl), "0.5-2 nats": estimate(2 * kl)},
            by_domain={"<b>wiki": estimate(kl), "code": estimate(kl / 2)},
            by_layer={"layers.0": 0.01, "layers.1": 0.02},
            equal_tokens=estimate(17.0),
            diverged=estimate(0.5),
            written_ratio=estimate(1.2),
        )
    row = OutputRow(
        "quiz",
        {"bf16": estimate(310.0)},
        {"qad": None},
        *({arm: estimate(0.1) for arm in ("bf16", "qad")},) * 3,
        {"bf16": estimate(420.0), "qad": None},
    )
    return dataclasses.replace(comparison, fidelity=fidelity, outputs=[row])


def rendered(run: Path, comparison: Comparison, records: list[Record]) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in render(run, comparison, records)[:2]]


def test_without_parts_there_is_nothing(records: list[Record]) -> None:
    comparison = compare(records)
    assert strata.curves(comparison) == {}
    tables: list[Any] = [f(comparison) for f in (strata.kl_by_stratum, strata.continuations, strata.outputs)]
    assert tables == [None, None, None]


def test_curves_keep_their_places(parted: Comparison) -> None:
    names, lines = strata.curves(parted)["tokens before"]
    assert names == ["1", "2", "4"]
    assert [point and point[0] for point in lines["ptq"]] == pytest.approx([0.4, 0.8, 1.2])
    assert lines["qad"][2] is None


@pytest.mark.usefixtures("drawn")
def test_all_of_it_is_in_both_forms(run: Path, parted: Comparison, records: list[Record]) -> None:
    html, md = rendered(run, parted, records)
    assert html.count("tenths of the tokens by the teacher's entropy</text>") == 2
    for line in (
        "| 4-7 | 1.20 (1.08–1.32) | not measured |",
        "| &lt;b&gt;wiki | 0.400 (0.360–0.440) | 0.200 (0.180–0.220) |",
        "| layers.1 | 0.0200 | 0.0200 |",
        "| Equal tokens (greedy decoding, before the first that differs) | 17.0 (15.3–18.7)",
        "| Prompts that diverge (within the tokens asked for) | 50.0 % (45.0–55.0)",
        "| BF16 | 310 (279–341) | — | 10.0 % (9.0–11.0) |",
        "| QAD | not counted | n/a | 10.0 % (9.0–11.0) |",
    ):
        assert line in md, line


def test_a_bound_is_called_one(run: Path, parted: Comparison, records: list[Record]) -> None:
    row = dataclasses.replace(parted.fidelity["qad"], bound="the top 20 log-probabilities")
    found = dataclasses.replace(parted, fidelity={**parted.fidelity, "qad": row})
    _, md = rendered(run, found, records)
    assert "*lower bound*" in md
    assert "- **Exact KL of QAD**: not measured: what is shown is a bound of it, the top 20 log-probabilities" in md


def test_one_source_is_the_whole_text(parted: Comparison) -> None:
    rows = {arm: dataclasses.replace(row, by_domain={"wiki": estimate(1.0)}) for arm, row in parted.fidelity.items()}
    table = strata.kl_by_stratum(dataclasses.replace(parted, fidelity=rows))
    assert table is not None
    assert "Source of the text" not in [group.title for group in table.groups]


@pytest.mark.usefixtures("drawn")
def test_the_rounding_is_named(run: Path, parted: Comparison, records: list[Record]) -> None:
    (run / "recipe.yaml").write_text("quantize: {scales: mse, rounding: gptq}\n", encoding="utf-8")
    assert all("Scales of 4-bit weights: mse; codes: decided by gptq" in text for text in rendered(run, parted, records))
