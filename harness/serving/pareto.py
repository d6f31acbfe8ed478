"""Throughput against latency: the cells of one shape on a plane, and which of them no other beats in both."""

from __future__ import annotations

import dataclasses
import statistics

from harness.records.record import Record
from harness.records.serving import Cell, ServingData
from harness.serving.statistics import summarize

Shape = tuple[int | None, int | None]  # input, output tokens


def cells_of(record: Record) -> dict[str, Cell]:
    """Cells by their name."""
    assert isinstance(record.data, ServingData)
    return {cell.name: cell for cell in record.data.cells}


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """One cell on the throughput-latency plane. efficient: no other cell of the arm and the same lengths is better in both."""

    cell: str
    concurrency: int
    tokens_per_s: float
    tpot_ms: float
    efficient: bool


def pareto(record: Record) -> dict[Shape, list[ParetoPoint]]:
    """(input, output tokens) -> valid cells by concurrency: medians over repeats."""
    found: dict[Shape, list[tuple[Cell, float, float]]] = {}
    for cell in cells_of(record).values():
        summary = summarize(cell)
        speed, latency = _median(summary.tokens_per_s), _median(summary.tpot_ms)
        if not summary.invalid and speed is not None and latency is not None and cell.concurrency is not None:
            found.setdefault((cell.input_tokens, cell.output_tokens), []).append((cell, speed, latency))
    return {
        shape: [
            ParetoPoint(
                cell.name, cell.concurrency or 0, speed, latency,
                not any(s >= speed and t <= latency and (s, t) != (speed, latency) for _, s, t in points),
            )
            for cell, speed, latency in sorted(points, key=lambda point: point[0].concurrency or 0)
        ]
        for shape, points in found.items()
    }  # fmt: skip


def _median(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None
