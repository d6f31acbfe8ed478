"""Ratios of cells, what is refused, and how it is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.compare.recovery import compare
from harness.records.comparison import from_json, to_json
from harness.records.record import Engine, Record
from harness.records.serving import SERVER_USAGE, Arrival, Cell, Overhead, Repeat, Request, ServingData, Window
from harness.serving.pareto import pareto
from qad.command.compare import compare_arms
from reports.figures.pareto import pareto_figure
from reports.sections.serving import serving_notes, serving_table

ENGINE = Engine("vllm", "0.32", "bfloat16", "cpu", "Emulation kernel", True)


def request(tpot_ms: float, output: int = 10, ttft_ms: float = 50.0) -> Request:
    return Request(0.0, 4, None, output, SERVER_USAGE, 1, ttft_ms, ttft_ms, tpot_ms, None, ttft_ms + tpot_ms * (output - 1))


def run(tpot_ms: float, tokens: float, output: int = 10) -> Repeat:
    return Repeat(10.0, [request(tpot_ms, output)] * 4, Window(0.0, 2.0, tokens), 4, 3.9, 0, 0)


def record(arm: str, speeds: list[float], output: int = 10, concurrency: int = 4, **changes: Any) -> Record:
    """One cell, a repeat a speed: a speed of s makes s times the tokens in 1 / s of the time."""
    cells = [Cell(concurrency, 4, 10, [run(20 / s, 100 * s, output) for s in speeds])]
    data = ServingData("GuideLLM 0.8.1", "completions", cells, ["bf16", "ptq"], [Overhead(4, 1.0, 0.1, 9000.0, 16)])
    whole = Record(arm, "m", arm, ENGINE, {"seed": 0}, {}, "2026-11-30T00:00:00Z", 1.0, data)
    return dataclasses.replace(whole, **changes)


def test_repeats_are_paired_and_above_one_is_better() -> None:
    comparison = compare([record("bf16", [1.0, 1.1, 0.9]), record("ptq", [2.0, 2.2, 1.8])])
    ratios = comparison.serving_ratio["ptq"]["concurrency 4, 4 + 10 tokens"]
    assert {metric: e.value for metric, e in ratios.items()} == pytest.approx(
        {"tokens_per_s": 2.0, "ttft_ms": 1.0, "tpot_ms": 2.0}
    )
    speed = ratios["tokens_per_s"]
    assert (speed.n, speed.low, speed.high) == (3, pytest.approx(2.0), pytest.approx(2.0)), "the drift cancels"
    noisy = compare([record("bf16", [1.0, 1.0, 1.0]), record("ptq", [1.8, 2.0, 2.2])]).serving_ratio["ptq"]
    (found,) = noisy.values()
    limits = found["tokens_per_s"]
    assert limits.low is not None
    assert limits.high is not None
    assert limits.low < 1.9 < 2.1 < limits.high
    assert comparison.emulated == ["bf16", "ptq"]
    assert from_json(to_json(comparison)) == comparison


@pytest.mark.parametrize(("output", "refused"), [(10, False), (9, True), (6, True), (11, True)])
def test_answers_of_another_length_are_not_compared(output: int, refused: bool) -> None:
    comparison = compare([record("bf16", [1.0] * 3), record("ptq", [2.0] * 3, output)])
    assert bool(comparison.serving_ratio["ptq"]) is not refused
    assert refused == any("differ in length by more than 5%" in note for note in comparison.not_compared)


@pytest.mark.parametrize(
    ("theirs", "ours", "refused"),
    [
        ([4], [4], False),
        ([4], [5], True),
        ([100], [101], True),
        ([100, 102], [101], False),
        ([100, 102], [120, 110], True),
        ([None], [4], False),
    ],
)
def test_prompts_that_the_server_counted_otherwise_are_not_compared(
    theirs: list[int | None], ours: list[int | None], refused: bool
) -> None:
    def counted(arm: str, lengths: list[int | None]) -> Record:
        whole = record(arm, [1.0])
        assert isinstance(whole.data, ServingData)
        requests = [dataclasses.replace(request(20.0), input_tokens=n) for n in lengths for _ in range(4)]
        cells = [dataclasses.replace(whole.data.cells[0], repeats=[dataclasses.replace(run(20.0, 100.0), requests=requests)])]
        return dataclasses.replace(whole, data=dataclasses.replace(whole.data, cells=cells))

    records = [counted("bf16", theirs), counted("ptq", ours)]
    comparison = compare(records)
    assert bool(comparison.serving_ratio["ptq"]) is not refused
    assert refused == any("prompts differ in length" in note for note in comparison.not_compared)
    table = serving_table(comparison, records)
    assert table is not None
    (row,) = [row for row in table.groups[0].rows if row.label == "Prompt length"]
    assert [cell.detail for cell in row.cells] == ["" if n in ([4], [None]) else "4 sent" for n in (theirs, ours)]


def test_an_invalid_cell_is_not_compared() -> None:
    bad = Request(0.0, None, None, None, "", None, None, None, None, None, None, True, "engine died")
    broken = record("ptq", [2.0])
    data = broken.data
    assert isinstance(data, ServingData)
    repeats = [dataclasses.replace(r, requests=[*r.requests, bad]) for r in data.cells[0].repeats]
    cells = [dataclasses.replace(data.cells[0], repeats=repeats)]
    comparison = compare([record("bf16", [1.0]), dataclasses.replace(broken, data=dataclasses.replace(data, cells=cells))])
    assert comparison.serving_ratio == {"ptq": {}}
    assert any("1 of 5 requests failed" in note and "engine died" in note for note in comparison.not_compared)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine": dataclasses.replace(ENGINE, device="cuda:0")}, "device (cpu, cuda:0)"),
        ({"engine": dataclasses.replace(ENGINE, name="trtllm")}, "engine (vllm, trtllm)"),
        ({"settings": {"seed": 1}}, "seed"),
    ],
)
def test_other_conditions_are_no_ratio_and_are_named(changes: dict[str, Any], named: str) -> None:
    comparison = compare([record("bf16", [1.0]), record("ptq", [2.0], **changes)])
    assert comparison.serving_ratio == {}
    assert any(named in note for note in comparison.not_compared)


def loaded(arm: str, *loads: Cell) -> Record:
    """A cell a load."""
    cells = [dataclasses.replace(load, repeats=[run(20.0, 100.0)]) for load in loads]
    return dataclasses.replace(record(arm, [1.0]), data=ServingData("GuideLLM 0.8.1", "completions", cells))


def asked(concurrency: int | None = 4, arrival: Arrival | None = None, tokens: int = 10) -> Cell:
    return Cell(concurrency, 4, tokens, [], arrival)


LOADS = [
    asked(),
    asked(8),
    asked(None, Arrival(2.0, "constant")),
    asked(None, Arrival(2.0, "Poisson")),
    asked(None, Arrival(2.0, "gamma, burstiness 0.5")),
    asked(None, Arrival(2.0000001, "constant")),
    asked(4, Arrival(2.0, "constant")),
    asked(None, Arrival(None, "all at once")),
    asked(None, Arrival(None, "linear ramp from 1 to 8 requests/s")),
    asked(tokens=20),
]


@pytest.mark.parametrize("ours", range(len(LOADS)))
@pytest.mark.parametrize("theirs", range(len(LOADS)))
def test_speed_is_compared_under_one_load_alone(ours: int, theirs: int) -> None:
    comparison = compare([loaded("bf16", LOADS[theirs]), loaded("ptq", LOADS[ours])])
    assert bool(comparison.serving_ratio["ptq"]) == (ours == theirs)
    if ours != theirs:
        (note,) = [n for n in comparison.not_compared if "refused between other loads or lengths" in n]
        assert f"bf16 was asked {LOADS[theirs].name}, ptq {LOADS[ours].name}" in note


def test_cells_of_one_arm_alone_are_named() -> None:
    comparison = compare([loaded("bf16", *LOADS[:2]), loaded("ptq", LOADS[0])])
    assert list(comparison.serving_ratio["ptq"]) == ["concurrency 4, 4 + 10 tokens"]
    assert "serving: concurrency 8, 4 + 10 tokens was measured in only one of bf16 and ptq" in comparison.not_compared


def test_unknown_loads_are_not_the_same_load() -> None:
    comparison = compare([loaded("bf16", asked(None)), loaded("ptq", asked(None))])
    assert comparison.serving_ratio == {"ptq": {}}
    assert any("load unknown" in note and "--concurrency" in note for note in comparison.not_compared)


def test_pareto_points_that_are_beaten_in_both_are_marked() -> None:
    loads = {1: (50.0, 10.0), 4: (150.0, 12.0), 8: (140.0, 30.0)}
    cells = [Cell(c, 4, 10, [run(t, 2 * s)]) for c, (s, t) in loads.items()]
    whole = dataclasses.replace(record("bf16", [1.0]), data=ServingData("d", "completions", cells))
    (points,) = pareto(whole).values()
    assert [(p.cell.concurrency, p.tokens_per_s, p.tpot_ms, p.efficient) for p in points] == [
        (1, 50.0, 10.0, True),
        (4, 150.0, 12.0, True),
        (8, 140.0, 30.0, False),
    ]


def test_the_figure_names_rates_as_rates() -> None:
    cells = [asked(None, Arrival(rate, "constant")) for rate in (8.0, 2.0)] + [asked(None)]
    records = [loaded("bf16", *cells)]
    figure = pareto_figure(compare(records), records)
    assert figure is not None
    assert figure.alt.index("BF16 at 2 requests/s, constant:") < figure.alt.index("BF16 at 8 requests/s, constant:")
    assert "unknown" not in figure.alt


def test_the_report_shows_kernels_lengths_failures_and_the_cost_of_the_client(tmp_path: Path) -> None:
    records = [record("bf16", [1.0, 1.1, 0.9]), record("ptq", [2.0, 2.2, 1.8], 9)]
    comparison = compare(records)
    table = serving_table(comparison, records)
    assert table is not None
    rows = {row.label: [cell.text for cell in row.cells] for row in table.groups[0].rows}
    assert rows["Throughput"] == ["50.0 tokens/s", "100 tokens/s"]
    assert rows["Answer length"] == ["10.0", "9.00"]
    assert rows["Failed requests"] == ["0.0 %", "0.0 %"]
    assert rows["Kernels"] == ["Emulation kernel"] * 2
    assert all("emulated" in cell.tags for cell in table.groups[0].rows[0].cells)
    assert all("n 12, p99 needs 100" in row.cells[0].detail for row in table.groups[0].rows if "token" in row.label)
    figure = pareto_figure(comparison, records)
    assert figure is not None
    assert "Emulation kernel" in figure.caption
    assert "concurrency 4: 50.0 tokens/s, 20.0 ms" in figure.alt
    notes = serving_notes(records)
    assert notes is not None
    assert any("against a server that answers at once" in text for _, text in notes.items)
    assert any("12 of 12 answers are shorter" in text for _, text in notes.items)
    assert serving_table(compare([]), []) is None
    assert pareto_figure(comparison, []) is None


def test_compare_writes_and_prints_it(tmp_path: Path) -> None:
    from harness.records.record import write

    for arm, speeds in (("bf16", [1.0, 1.1, 0.9]), ("ptq", [2.0, 2.2, 1.8])):
        write(record(arm, speeds), tmp_path / arm / "serving.json")
    artifact, said = compare_arms(
        [str(tmp_path / "bf16"), str(tmp_path / "ptq")], tmp_path / "out", margin=0.01, policy="drop-1pct"
    )
    speed = next(line for line in said.splitlines() if "relative to BF16" in line)
    assert "2.00 ×" in speed  # noqa: RUF001
    assert not said.startswith("  BF16")  # no head of a summary without rows
    page = (artifact.path / "report" / "report.html").read_text()
    assert "Speed of serving" in page
    assert 'id="pareto-wide' in page
    assert "Emulation kernel" in (artifact.path / "report" / "report.md").read_text()
