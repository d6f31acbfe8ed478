"""Speed as clients of a server see it: the table of cells and the figure of throughput against latency."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import statistics
from typing import Any

from harness.records.comparison import Comparison
from harness.records.record import Record
from harness.records.serving import Cell as LoadCell
from harness.records.serving import ServingData
from harness.serving.pareto import cells_of
from harness.serving.statistics import CellSummary, Quantile, summarize
from qad.untrusted import clean
from reports.numbers import percent, plural, significant
from reports.parts import Cell, Group, Notes, Row, Table
from reports.sections.outcome import BASELINE, arm_name
from reports.sections.tables import NOT_AVAILABLE, NOT_MEASURED, number_cell

LATENCIES = {"ttft_ms": "Time to first token", "tpot_ms": "Time per output token", "e2e_ms": "Whole request"}


def serving_of(records: list[Record]) -> dict[str, Record]:
    return {record.arm: record for record in records if isinstance(record.data, ServingData)}


def serving_table(comparison: Comparison, records: list[Record]) -> Table | None:
    """One group a cell: throughput, latencies with n, achieved length, failures; ratios to BF16 below each."""
    found = serving_of(records)
    if not found:
        return None
    arms = [arm for arm in comparison.arms if arm in found]
    by_arm = {arm: cells_of(record) for arm, record in found.items()}
    names = dict.fromkeys(name for cells in by_arm.values() for name in cells)
    groups = [_group(comparison, name, arms, by_arm, found) for name in names]
    return Table(
        "Speed of serving",
        ["", *map(arm_name, arms)],
        groups,
        "Throughput is of the steady-state window, the median over repeats with their range; latencies are medians over "
        "successful requests, with p99 where n ≥ 100. Ratios are geometric means over repeats that ran next to each other, "
        "with their 95 % interval; above 1 is better than BF16. A load is a number of clients, each of which sends its "
        "next request when the last is answered (concurrency), or requests at a rate that do not wait for answers.",
        breakable=True,
    )


def _group(
    comparison: Comparison, name: str, arms: list[str], by_arm: dict[str, dict[str, LoadCell]], records: dict[str, Record]
) -> Group:
    summaries = {arm: summarize(by_arm[arm][name]) for arm in arms if name in by_arm[arm]}

    def row(label: str, cell: Any, detail: str = "") -> Row:
        return Row(label, [cell(arm, summaries[arm]) if arm in summaries else NOT_MEASURED for arm in arms], detail)

    def ratio(metric: str) -> list[Row]:
        cells = [
            Cell("—") if arm == BASELINE else number_cell(comparison.serving_ratio.get(arm, {}).get(name, {}).get(metric), "×")
            for arm in arms
        ]
        return [Row("↳ relative to BF16", cells)] if any(c.text not in ("—", "n/a") for c in cells) else []

    rows = [row("Throughput", lambda arm, s: _throughput(s, records[arm].engine.emulated), "output tokens per second")]
    rows += ratio("tokens_per_s")
    for metric, label in LATENCIES.items():
        rows.append(row(label, lambda arm, s, m=metric: _latency(s.quantiles[m]), "median"))
        rows += ratio(metric)
    rows.append(row("Prompt length", lambda arm, s: _prompt(s, by_arm[arm][name]), "tokens, mean, as the server counted"))
    rows.append(row("Answer length", lambda arm, s: _length(s), "tokens, mean"))
    rows.append(row("Failed requests", lambda arm, s: _failures(s)))
    rows.append(row("Kernels", lambda arm, s: Cell(clean(records[arm].engine.kernel_path or "unknown", 80))))
    return Group(name[:1].upper() + name[1:], rows)


def _throughput(summary: CellSummary, emulated: bool) -> Cell:
    if summary.invalid:
        return Cell("invalid", clean(summary.invalid, 120))
    rates = [rate for rate in summary.tokens_per_s if rate is not None]
    if not rates:
        return NOT_AVAILABLE
    middle = statistics.median(rates)
    limits = f"{significant(min(rates), middle)}–{significant(max(rates), middle)}"
    detail = f"range {limits} of {plural(len(rates), 'repeat')}" if len(rates) > 1 else "one repeat"
    return Cell(f"{significant(middle)} tokens/s", detail, ("emulated",) if emulated else ())


def _latency(quantiles: dict[float, Quantile]) -> Cell:
    middle, far = quantiles[0.5], quantiles[0.99]
    if middle.value is None:
        return Cell("n/a", middle.note)
    tail = far.note.removeprefix(f"n is {far.n}, ") if far.value is None else f"p99 {significant(far.value)} ms"
    return Cell(f"{significant(middle.value)} ms", f"n {middle.n}, {tail}")


def _length(summary: CellSummary) -> Cell:
    if summary.output_tokens is None:
        return NOT_AVAILABLE
    return Cell(significant(summary.output_tokens), f"{summary.short} too short" if summary.short else "")


def _prompt(summary: CellSummary, asked: LoadCell) -> Cell:
    if summary.input_tokens is None:
        return NOT_AVAILABLE
    other = asked.input_tokens is not None and not asked.drawn and summary.input_range not in (None, (asked.input_tokens,) * 2)
    return Cell(significant(summary.input_tokens), f"{asked.input_tokens} sent" if other else "")


def _failures(summary: CellSummary) -> Cell:
    if summary.failure_share is None:
        return NOT_AVAILABLE
    return Cell(percent(summary.failure_share), f"{summary.failed} of {summary.requests}")


def serving_notes(records: list[Record]) -> Notes | None:
    """How it was measured, what client and observer cost, and what else a reader has to know."""
    items = []
    for arm, record in serving_of(records).items():
        data = record.data
        assert isinstance(data, ServingData)
        engine = record.engine
        where = f"{engine.device or 'an unknown device'}, {engine.kernel_path or 'kernels unknown'}"
        load = f"{data.driver}, {data.endpoint}; served by {engine.name} {engine.version} {engine.dtype} on {where}"
        items.append((f"{arm_name(arm)}, load", clean(load, 300)))
        for cost in data.overhead:
            told = f"{_in(cost.ttft_ms, 'ms')} to the first token, {_in(cost.tpot_ms, 'ms')} per token, at most "
            told += f"{_in(cost.tokens_per_s, 'tokens/s')}, against a server that answers at once ({plural(cost.n, 'request')})"
            items.append((f"{arm_name(arm)}, cost of the client at concurrency {cost.concurrency}", told))
        notes = [f"{cell.name}: {warning}" for cell in data.cells for warning in summarize(cell).warnings]
        items += [(f"{arm_name(arm)}, note", clean(note, 300)) for note in [*data.notes, *notes]]
    return Notes(items) if items else None


def _in(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{significant(value)} {unit}"
