"""The numbers of a report as tables of cells, each with unit, interval and n."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from harness.records.comparison import BenchmarkRow, Comparison, Estimate, FidelityRow, standing
from harness.records.record import MemoryData, Record, ThroughputData, ThroughputPoint
from qad.untrusted import clean
from reports.numbers import gigabytes, interval, percent, percent_interval, plural, points_interval, signed, significant
from reports.parts import Cell, Group, Row, Table
from reports.sections.outcome import BASELINE, arm_name, emulated_arms, engine_tags, filter_note, memory_of

NOT_MEASURED = Cell("not measured")
NOT_AVAILABLE = Cell("n/a")


def share_cell(estimate: Estimate | None, *, note: str = "") -> Cell:
    if estimate is None:
        return Cell(NOT_AVAILABLE.text, note)
    return Cell(percent(estimate.value), _detail(percent_interval(estimate), note, estimate.note))


def number_cell(estimate: Estimate | None, unit: str = "", *, note: str = "") -> Cell:
    if estimate is None:
        return NOT_AVAILABLE
    text = f"{significant(estimate.value)} {unit}".rstrip()
    return Cell(text, _detail(interval(estimate), note, estimate.note))


def points_cell(estimate: Estimate | None) -> Cell:
    """A difference of shares, in points."""
    if estimate is None:
        return NOT_AVAILABLE
    return Cell(f"{signed(100 * estimate.value)} points", _detail(points_interval(estimate), "", estimate.note))


def count_cell(row: BenchmarkRow, *, own: bool = True) -> Cell:
    """Items, and clusters; own: clusters also where every item is its own."""
    if row.imported:
        return Cell(plural(row.n, "item") if row.n else "n not printed")
    return Cell(plural(row.n, "item"), plural(row.clusters, "cluster") if own or row.clusters < row.n else "")


def _detail(limits: str, note: str, reason: str) -> str:
    """The interval, or why there is none; then a remark."""
    return ", ".join(part for part in (limits or clean(reason or "no interval", 80), note) if part)


# --- summary -------------------------------------------------------------------------------------


def summary(comparison: Comparison, records: list[Record]) -> Table:
    """BF16 | PTQ | QAD side by side."""
    arms = comparison.arms
    groups = [accuracy_group(comparison), fidelity_group(comparison), _size(arms, records)]
    groups += [] if emulated_alone(comparison) else [speed_group(comparison, records)]
    return Table(
        caption="The arms side by side",
        columns=["", *map(arm_name, arms), "n"],
        groups=[group for group in groups if group.rows],
        note="Under each number: its 95 % interval. Recovery is the score divided by BF16's (the other way round where "
        "lower is better); above 100 % is possible.",
        breakable=True,
    )


def emulated_alone(comparison: Comparison) -> bool:
    """Whether no speed here is FP4's."""
    return bool(comparison.emulated) and set(comparison.throughput_ratio) <= set(comparison.emulated)


def accuracy_group(comparison: Comparison) -> Group:
    arms, rows = comparison.arms, []
    for row in comparison.benchmarks:
        n = count_cell(row, own=False)
        scores = [_score_cell(row, arm) for arm in arms]
        rows.append(Row(clean(row.task, 60), [*scores, n], filter_note(row)))
        recoveries = [Cell("—") if arm == BASELINE else _recovery_cell(row, arm) for arm in arms]
        rows.append(Row("↳ recovery", [*recoveries, n]))
    if comparison.median_recovery:
        count = max(median.n for median in comparison.median_recovery.values())
        n = Cell(plural(count, "benchmark"))
        medians = [_over_benchmarks(arm, comparison, worst=False) for arm in arms]
        worst = [_over_benchmarks(arm, comparison, worst=True) for arm in arms]
        rows.append(Row("Median recovery", [*medians, n], "over benchmarks", strong=True))
        rows.append(Row("Worst benchmark", [*worst, n], "lowest recovery", strong=True))
    if comparison.median_gain:
        gain, shown = comparison.median_gain, points_cell(comparison.median_gain)
        reading = standing(gain, 0.0)
        cell = Cell(shown.text, ", ".join(part for part in (shown.detail, reading) if part))
        cells = [cell if arm == "qad" else Cell("—") for arm in arms]
        rows.append(Row("QAD minus PTQ", [*cells, Cell(plural(gain.n, "benchmark"))], "median recovery"))
    return Group("Accuracy", rows)


def _score_cell(row: BenchmarkRow, arm: str) -> Cell:
    estimate = row.score.get(arm)
    if estimate is None:
        return NOT_AVAILABLE if arm in row.recovery else NOT_MEASURED
    share = row.higher_is_better and 0 <= estimate.value <= 1
    failed, sent = row.failed.get(arm, (0, 0))
    note = f"{failed} of {plural(sent, 'request')} failed" if failed else ""
    return share_cell(estimate, note=note) if share else number_cell(estimate, note=note)


def _recovery_cell(row: BenchmarkRow, arm: str) -> Cell:
    if arm not in row.recovery:
        return NOT_MEASURED
    return share_cell(row.recovery[arm], note=clean(row.doubt.get(arm, ""), 120))


def _over_benchmarks(arm: str, comparison: Comparison, *, worst: bool) -> Cell:
    if arm == BASELINE:
        return Cell("—")
    if arm not in comparison.median_recovery:
        return NOT_AVAILABLE
    if not worst:
        return share_cell(comparison.median_recovery[arm])
    label, estimate = comparison.worst[arm]
    return share_cell(estimate, note=clean(label, 40))


def fidelity_group(comparison: Comparison) -> Group:
    if not comparison.fidelity:
        return Group("Fidelity to the BF16 teacher", [])
    some = next(iter(comparison.fidelity.values()))
    n = Cell(plural(some.sequences, "sequence"), plural(some.tokens, "token"))

    def row(label: str, detail: str, cell: Callable[[FidelityRow], Cell], own: bool = False) -> Row:
        """own: the teacher has a value of its own; the others compare it with itself."""
        cells = []
        for arm in comparison.arms:
            found = comparison.fidelity.get(arm)
            shown = cell(found) if found else NOT_MEASURED
            cells.append(shown if arm != BASELINE or own or not found else Cell(shown.text, "the teacher itself"))
        return Row(label, [*cells, n], detail)

    rows = [
        row("KL divergence", "nats per token", _kl_cell),
        row("Top-1 agreement", "share of tokens", lambda f: share_cell(f.top1)),
        row("Perplexity", "of the test text, per token", lambda f: number_cell(f.perplexity), own=True),
        row("Perplexity ratio", "to the teacher's", lambda f: number_cell(f.perplexity_ratio, "×")),
    ]
    if any(found.saturated_inputs is not None for found in comparison.fidelity.values()):
        rows.append(row("Saturated inputs", "share of blocks of 16 above what was calibrated", _saturated_cell))
    return Group("Fidelity to the BF16 teacher", rows)


def _kl_cell(row: FidelityRow) -> Cell:
    cell = number_cell(row.kl, "nats")
    return Cell(cell.text, cell.detail, ("lower bound",) if row.bound else ())


def _saturated_cell(row: FidelityRow) -> Cell:
    return NOT_AVAILABLE if row.saturated_inputs is None else Cell(percent(row.saturated_inputs))


def _size(arms: list[str], records: list[Record]) -> Group:
    memory = memory_of(records)
    if not memory:
        return Group("Size", [])

    def row(label: str, detail: str, cell: Callable[[MemoryData], Cell]) -> Row:
        return Row(label, [*(cell(memory[arm]) if arm in memory else NOT_MEASURED for arm in arms), Cell("exact")], detail)

    def on_disk(data: MemoryData) -> Cell:
        return Cell(f"{gigabytes(data.file_bytes)} GB", f"{gigabytes(data.file_bytes, binary=True)} GiB")

    rows = [
        row("On disk", "weight files", on_disk),
        row("Effective bits", "per parameter", lambda d: Cell(f"{d.effective_bits:.2f} bits" if d.parameters else "n/a")),
        row("In four bits", "share of the parameters", lambda d: Cell(percent(d.quantized_share) if d.parameters else "n/a")),
    ]
    return Group("Size", rows)


def points_of(records: list[Record]) -> dict[str, list[ThroughputPoint]]:
    return {record.arm: record.data.points for record in records if isinstance(record.data, ThroughputData)}


Shape = tuple[str, int, int, int]


def _rates(points: list[ThroughputPoint]) -> dict[Shape, list[float]]:
    """Finite rates by shape; of several points of one shape the first counts."""
    found: dict[Shape, list[float]] = {}
    for p in points:
        rates = [rate for rate in p.tokens_per_s if math.isfinite(rate)]
        found.setdefault((p.phase, p.batch, p.input_tokens, p.output_tokens), rates)
    return found


def speed_group(comparison: Comparison, records: list[Record]) -> Group:
    measured = {arm: _rates(points) for arm, points in points_of(records).items()}
    tags = {r.arm: engine_tags(r.engine) for r in records if isinstance(r.data, ThroughputData)}
    rows = []
    for shape in dict.fromkeys(shape for rates in measured.values() for shape in rates):
        phase, batch, input_tokens, output_tokens = shape
        label = f"{clean(phase, 40).capitalize()} speed"
        detail = f"batch {batch}, {input_tokens:,} + {output_tokens:,} tokens"
        found = {arm: measured.get(arm, {}).get(shape, []) for arm in comparison.arms}
        cells = [_rate_cell(rates, tags.get(arm, ())) for arm, rates in found.items()]
        repeats = max(map(len, found.values()), default=0)
        rows.append(Row(label, [*cells, Cell(plural(repeats, "repeat"))], detail))
        rows += _ratio_rows(comparison, shape, repeats, tags)
    return Group("Speed", rows)


def _ratio_rows(comparison: Comparison, shape: Shape, repeats: int, tags: dict[str, tuple[str, ...]]) -> list[Row]:
    """Speed relative to BF16, where there is a ratio for this shape."""
    phase, batch, input_tokens, output_tokens = shape
    names = (phase, f"{phase}, batch {batch}, {input_tokens} + {output_tokens} tokens")
    cells = []
    for arm in comparison.arms:
        ratios = comparison.throughput_ratio.get(arm, {})
        ratio = next((ratios[name] for name in names if name in ratios), None)
        cell = number_cell(ratio, "×")
        marks = tags.get(arm, ()) if ratio else ()
        cells.append(Cell("—") if arm == BASELINE else Cell(cell.text, cell.detail, marks))
    if all(cell.text in ("—", "n/a") for cell in cells):
        return []
    return [Row("↳ relative to BF16", [*cells, Cell(plural(repeats, "pair"))])]


def _rate_cell(rates: list[float], tags: tuple[str, ...]) -> Cell:
    if not rates:
        return NOT_MEASURED
    middle = statistics.median(rates)
    spread = f"{significant(min(rates), middle)}–{significant(max(rates), middle)}"
    return Cell(f"{significant(middle)} tokens/s", f"range {spread}" if len(rates) > 1 else "one repeat", tags)


def summary_text(comparison: Comparison, records: list[Record]) -> str:
    """The summary for a terminal: one line a row, interval in brackets."""
    table = summary(comparison, records)
    text = [table_text(table)] if table.groups else []
    arms = [arm_name(arm) for arm in emulated_arms(records)]
    if arms:
        text.append(f"{', '.join(arms)}: FP4 is emulated here; accuracy is meaningful, speed is not FP4 speed.")
    return "\n".join(text)


def table_text(table: Table) -> str:
    """A table for a terminal."""
    lines = [["", *table.columns[1:]]]
    for group in table.groups:
        lines.append([group.title.upper()])
        for row in group.rows:
            label = row.label if row.label.startswith("↳") or not row.detail else f"{row.label} ({row.detail})"
            cells = [f"{c.text} ({c.detail})" if c.detail else c.text for c in row.cells]
            lines.append([f"  {label.replace('↳', '  ')}", *cells])
    widths = [max((len(line[i]) for line in lines if len(line) > i and len(line) > 1), default=0) for i in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]
    return "\n".join(text)
