"""The figure of accuracy against size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.records.comparison import Comparison
from harness.records.record import MemoryData
from reports.figures.drawing import INK, MUTED, arm_colour, arm_marker, draw_figure
from reports.numbers import GB, gigabytes, percent, percent_interval
from reports.parts import Figure
from reports.sections.outcome import BASELINE, arm_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def accuracy_against_size(comparison: Comparison, memory: dict[str, MemoryData]) -> Figure | None:
    """Median recovery with its interval over the weight files' size, a marker an arm; None without two arms that have both."""
    recovered = comparison.median_recovery
    arms = [arm for arm in comparison.arms if arm in memory and (arm == BASELINE or arm in recovered)]
    if BASELINE not in arms or len(arms) < 2:
        return None
    largest = max(memory[arm].file_bytes for arm in arms) / GB

    def draw(figure: Canvas, narrow: bool) -> None:
        axes = figure.subplots()
        axes.axhline(100, color=INK, linewidth=1.0, zorder=1)
        seen: list[float] = []
        for arm in arms:
            size = memory[arm].file_bytes / GB
            beside = sum(abs(size - other) < 0.02 * largest for other in seen)  # markers of one size stand beside each other
            seen.append(size)
            x, found = size + 0.02 * largest * beside, recovered.get(arm)
            y, colour = 100 * found.value if found else 100.0, arm_colour(arm)
            if found and found.low is not None and found.high is not None:
                axes.plot(
                    [x, x], [100 * found.low, 100 * found.high], color=colour, linewidth=1.8, solid_capstyle="butt", zorder=2
                )
            axes.plot([x], [y], marker=arm_marker(arm), color=colour, markersize=7, linestyle="", zorder=3)
            left = size > 0.9 * largest or (not beside and len(arms) > 2)
            place, side = ((-7, 4), "right") if left else ((7, 4), "left")
            axes.annotate(arm_name(arm), (x, y), xytext=place, ha=side, textcoords="offset points", color=MUTED)
        axes.set_xlim(0, 1.08 * largest)
        axes.set_xlabel("size on disk, GB")
        axes.set_ylabel("median recovery, % of BF16")
        axes.grid()
        axes.set_axisbelow(True)

    described = "; ".join(
        f"{arm_name(arm)}: {gigabytes(memory[arm].file_bytes)} GB"
        + (f", {percent(found.value)} ({percent_interval(found) or 'no interval'})" if (found := recovered.get(arm)) else "")
        for arm in arms
    )
    caption = (
        "Accuracy against size: up and to the left is better. The line marks BF16; bars are 95 % intervals. Equal sizes "
        "stand beside each other."
    )
    return draw_figure("size", draw, (3.2, 3.2), f"Median recovery against size on disk. {described}.", caption)
