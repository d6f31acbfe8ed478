"""The figure of throughput against latency."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


from harness.records.comparison import Comparison
from harness.records.record import Record
from harness.records.serving import Cell
from harness.serving.pareto import Shape, pareto
from qad.untrusted import clean
from reports.figures.drawing import MUTED, arm_colour, arm_legend, arm_marker, draw_figure
from reports.numbers import significant
from reports.parts import Figure
from reports.sections.outcome import arm_name
from reports.sections.serving import serving_of


def _mark(cell: Cell) -> str:
    if cell.arrival is None:
        return str(cell.concurrency)
    return "" if cell.arrival.rate is None else f"{cell.arrival.rate:g}/s"


def pareto_figure(comparison: Comparison, records: list[Record]) -> Figure | None:
    """Throughput against time per output token, a line an arm over its loads; one panel a shape. An open marker is
    beaten in both by another cell of the same arm."""
    found = {arm: pareto(record) for arm, record in serving_of(records).items()}
    arms = [arm for arm in comparison.arms if any(found.get(arm, {}).values())]
    shapes: list[Shape] = list(dict.fromkeys(shape for arm in arms for shape in found[arm]))
    if not arms:
        return None

    def draw(figure: Canvas, narrow: bool) -> None:
        panels = figure.subplots(len(shapes), 1, squeeze=False)[:, 0]
        for axes, shape in zip(panels, shapes, strict=True):
            for arm in arms:
                points = found[arm].get(shape, [])
                axes.plot([p.tpot_ms for p in points], [p.tokens_per_s for p in points], color=arm_colour(arm), linewidth=1.4)
                for p in points:
                    face = arm_colour(arm) if p.efficient else "none"
                    axes.plot(
                        [p.tpot_ms],
                        [p.tokens_per_s],
                        marker=arm_marker(arm),
                        color=arm_colour(arm),
                        markerfacecolor=face,
                        linestyle="",
                    )
                    axes.annotate(
                        _mark(p.cell), (p.tpot_ms, p.tokens_per_s), xytext=(4, 4), textcoords="offset points", color=MUTED
                    )
            axes.set_xlabel(f"time per output token, ms ({shape[0]} + {shape[1]} tokens)")
            axes.set_ylabel("output tokens/s")
            axes.set_ylim(bottom=0)
            axes.margins(0.12)
            axes.grid()
        arm_legend(figure, panels[0], arms)

    described = "; ".join(
        f"{arm_name(arm)} at {clean(p.cell.load, 80)}: {significant(p.tokens_per_s)} tokens/s, {significant(p.tpot_ms)} ms"
        for arm in arms
        for points in found[arm].values()
        for p in points
    )
    kernels = ", ".join(
        f"{arm_name(arm)} {clean(record.engine.kernel_path or 'kernels unknown', 80)}"
        for arm, record in serving_of(records).items()
        if arm in arms
    )
    return draw_figure(
        "pareto",
        draw,
        (2.9 * len(shapes) + 0.3, 2.9 * len(shapes) + 0.3),
        f"Throughput against time per output token. {described}.",
        "Throughput against latency; up and to the left is better. The number at a marker is the concurrency, or requests per "
        f"second (/s); an open marker is beaten in both by another load of the same arm. Kernels: {kernels}.",
    )
