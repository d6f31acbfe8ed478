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

    cell: Cell
    tokens_per_s: float
    tpot_ms: float
    efficient: bool


def pareto(record: Record) -> dict[Shape, list[ParetoPoint]]:
    """(input, output tokens) -> valid cells by load: medians over repeats. A cell of unknown load has no place."""
    found: dict[Shape, list[tuple[Cell, float, float]]] = {}
    for cell in cells_of(record).values():
        summary = summarize(cell)
        speed, latency = _median(summary.tokens_per_s), _median(summary.tpot_ms)
        if not summary.invalid and speed is not None and latency is not None and _load(cell) is not None:
            found.setdefault((cell.input_tokens, cell.output_tokens), []).append((cell, speed, latency))
    return {
        shape: [
            ParetoPoint(
                cell, speed, latency, not any(s >= speed and t <= latency and (s, t) != (speed, latency) for _, s, t in points)
            )
            for cell, speed, latency in sorted(points, key=lambda point: _load(point[0]) or (0, 0.0))
        ]
        for shape, points in found.items()
    }


def _load(cell: Cell) -> tuple[int, float] | None:
    """Sort key: closed loads by concurrency, then those at a rate, then the others."""
    if cell.arrival is None:
        return None if cell.concurrency is None else (0, cell.concurrency)
    return (2, 0.0) if cell.arrival.rate is None else (1, cell.arrival.rate)


def _median(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None
