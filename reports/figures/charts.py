"""The report's figures, each from a comparison, its records or the training log; `reports.figures.drawing` says how they look."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib.ticker

from harness.records.comparison import Band, Comparison, Estimate
from harness.records.record import FidelityData, Record
from qad.untrusted import clean
from reports.figures.drawing import (
    CLASS_COLOURS,
    HATCHES,
    INK,
    MUTED,
    PAPER,
    RULE,
    arm_colour,
    arm_legend,
    arm_marker,
    draw_figure,
)
from reports.load import Step
from reports.numbers import GB, gigabytes, people_list, percent, significant
from reports.parts import Figure
from reports.sections.details import CLASSES
from reports.sections.outcome import BASELINE, arm_name, memory_of
from reports.sections.strata import Curve, curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MEDIAN, NOISE_LABEL = "Median", "noise floor"


def recovery(comparison: Comparison) -> Figure | None:
    """Dots on a line: recovery of every benchmark and arm with its interval, medians below, 100 % marked."""
    arms = [arm for arm in comparison.arms if arm != BASELINE]
    lines: list[tuple[str, dict[str, Estimate]]] = [
        (row.label, {arm: e for arm in arms if (e := row.recovery.get(arm))}) for row in comparison.benchmarks
    ]
    lines = [line for line in lines if line[1]]
    if not lines:
        return None
    noise = noise_bands(comparison)
    if len(lines) > 1:
        lines.append((MEDIAN, comparison.median_recovery))

    def draw(figure: Canvas, narrow: bool) -> None:
        axes = figure.subplots()
        _noise_bands(axes, [label for label, _ in lines], noise)
        _recovery_axes(axes, arms, lines, narrow)
        arm_legend(figure, axes, arms, NOISE_LABEL if noise else "")

    height = 1.0 + (0.2 + 0.2 * len(arms)) * len(lines)
    described = "; ".join(
        f"{clean(label, 60)}: " + ", ".join(f"{arm_name(arm)} {percent(e.value)}" for arm, e in found.items())
        for label, found in lines
    )
    caption = "Recovery of BF16's score, with 95 % intervals. The line marks 100 %; an open marker has no interval."
    if noise:
        caption += " The shaded band holds 95 % of what an arm measured twice on the same weights shows by chance."
    alt = f"Recovery by benchmark with 95 % intervals. {described}."
    return draw_figure("recovery", draw, (height, height), alt, caption)


def noise_bands(comparison: Comparison) -> dict[str, Band]:
    """Label of a benchmark, or MEDIAN -> the widest band among the arms that were measured twice."""
    found: dict[str, list[Band]] = {}
    for floor in comparison.noise_floor.values():
        for label, band in {**floor.benchmarks, **({MEDIAN: floor.median} if floor.median else {})}.items():
            found.setdefault(label, []).append(band)
    return {label: max(bands, key=lambda band: band.high - band.low) for label, bands in found.items()}


def _noise_bands(axes: Axes, labels: list[str], noise: dict[str, Band]) -> None:
    for place, label in enumerate(labels):
        band = noise.get(label)
        if band and band.low < band.high:
            axes.barh(place, 100 * (band.high - band.low), left=100 * band.low, height=0.9, color=RULE, zorder=0)


def _recovery_axes(axes: Axes, arms: list[str], lines: list[tuple[str, dict[str, Estimate]]], narrow: bool) -> None:
    axes.axvline(100, color=INK, linewidth=1.0, zorder=1)
    for place, (label, found) in enumerate(lines):
        if label == MEDIAN and place == len(lines) - 1 and place:
            axes.axhline(place - 0.5, color=RULE, linewidth=0.8)
        for i, arm in enumerate(arms):
            if arm not in found:
                continue
            y = place + (i - (len(arms) - 1) / 2) * 0.26
            _dot(axes, 100 * found[arm].value, y, _limits(found[arm]), arm)
    axes.set_yticks(range(len(lines)), [clean(label, 18 if narrow else 32) for label, _ in lines])
    axes.set_ylim(len(lines) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.set_xlabel("recovery, % of BF16")


def _limits(estimate: Estimate) -> tuple[float, float] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return 100 * estimate.low, 100 * estimate.high


def _dot(axes: Axes, x: float, y: float, limits: tuple[float, float] | None, arm: str) -> None:
    colour = arm_colour(arm)
    if limits:
        axes.plot(limits, [y, y], color=colour, linewidth=1.8, solid_capstyle="butt", zorder=2)
    face = colour if limits else "none"
    axes.plot([x], [y], marker=arm_marker(arm), color=colour, markerfacecolor=face, markersize=6, linestyle="", zorder=3)


def fidelity(comparison: Comparison, records: list[Record]) -> Figure | None:
    """KL quantiles over tokens, and KL of each sequence under QAD against PTQ."""
    arms = [arm for arm in comparison.arms if arm in comparison.fidelity and arm != BASELINE]
    curves = {arm: _quantiles(comparison.fidelity[arm].token_kl) for arm in arms}
    curves = {arm: curve for arm, curve in curves.items() if len(curve) > 1}
    pairs = _pairs(_fidelity_data(records)) if {"ptq", "qad"} <= comparison.fidelity.keys() else []
    panels = [name for name, there in (("quantiles", curves), ("pairs", pairs)) if there]
    if not panels:
        return None

    def draw(figure: Canvas, narrow: bool) -> None:
        for name, axes in zip(panels, _panels(figure, len(panels), narrow), strict=True):
            if name == "quantiles":
                _quantile_axes(axes, curves)
                arm_legend(figure, axes, list(curves))
            else:
                _pair_axes(axes, pairs)

    nearer = sum(qad < ptq for ptq, qad in pairs)
    alt = "KL divergence from the teacher: quantiles over tokens for " + " and ".join(map(arm_name, curves))
    caption = "KL divergence from the BF16 teacher on the test split."
    if pairs:
        alt += f"; QAD is nearer to the teacher than PTQ in {nearer} of {len(pairs)} sequences"
        caption += f" Each cross is one sequence; QAD is nearer in {nearer} of {len(pairs)} (below the diagonal)."
    return draw_figure("fidelity", draw, (3.1, 3.0 * len(panels)), alt + ".", caption)


def _panels(figure: Canvas, count: int, narrow: bool) -> list[Axes]:
    return list(figure.subplots(*((count, 1) if narrow else (1, count)), squeeze=False).flat)


def strata(comparison: Comparison) -> Figure | None:
    """KL by position and by the teacher's entropy, with intervals."""
    panels = curves(comparison)
    if not panels:
        return None
    arms = list(next(iter(panels.values()))[1])

    def draw(figure: Canvas, narrow: bool) -> None:
        for (label, (names, lines)), axes in zip(panels.items(), _panels(figure, len(panels), narrow), strict=True):
            _stratum_axes(axes, label, names, lines)
        arm_legend(figure, figure.axes[0], arms)

    caption = (
        "KL from the teacher, in nats per token, with 95 % intervals: by the number of tokens before, each place up to the "
        "next; by tenths of the tokens, those first of which the teacher was surest."
    )
    alt = f"KL divergence from the teacher by {people_list(list(panels))} for {people_list(list(map(arm_name, arms)))}."
    return draw_figure("strata", draw, (2.9, 2.8 * len(panels)), alt, caption)


def _stratum_axes(axes: Axes, label: str, names: list[str], lines: Curve) -> None:
    for i, (arm, points) in enumerate(lines.items()):
        known = [(place, *point) for place, point in enumerate(points) if point]
        shift = 0.12 * (i - (len(lines) - 1) / 2)
        axes.plot(
            [p + shift for p, *_ in known],
            [value for _, value, *_ in known],
            color=arm_colour(arm),
            marker=arm_marker(arm),
            markersize=4.5,
            linewidth=1.4,
        )
        for place, _, low, high in known:
            if low is not None and high is not None:
                axes.plot([place + shift] * 2, [low, high], color=arm_colour(arm), linewidth=1.0)
    axes.set_xticks(range(len(names)), [clean(name, 8) for name in names])
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.set_xlabel(label)
    axes.set_ylabel("KL, nats")


def _quantiles(token_kl: dict[str, float]) -> list[tuple[str, float]]:
    names = {"p50": "50", "p90": "90", "p99": "99", "p99_9": "99.9", "max": "max"}
    return [(name, token_kl[key]) for key, name in names.items() if token_kl.get(key, 0) > 0]


def _quantile_axes(axes: Axes, curves: dict[str, list[tuple[str, float]]]) -> None:
    order = [name for name in ("50", "90", "99", "99.9", "max") if any(name in dict(c) for c in curves.values())]
    for arm, curve in curves.items():
        places = [order.index(name) for name, _ in curve]
        values = [value for _, value in curve]
        axes.plot(places, values, color=arm_colour(arm), marker=arm_marker(arm), markersize=5, linewidth=1.6)
    axes.set_yscale("log")
    values = [value for curve in curves.values() for _, value in curve]
    few_decades = max(values) < 1000 * min(values)
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5) if few_decades else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlim(-0.3, len(order) - 0.7)
    axes.set_xticks(range(len(order)), order)
    axes.grid(axis="y")
    axes.set_xlabel("quantile over tokens, %")
    axes.set_ylabel("KL, nats")


def _fidelity_data(records: list[Record]) -> dict[str, FidelityData]:
    return {record.arm: record.data for record in records if isinstance(record.data, FidelityData)}


def _pairs(data: dict[str, FidelityData]) -> list[tuple[float, float]]:
    """KL per token of each sequence, (PTQ, QAD)."""
    return [
        (a.kl_sum / a.tokens, b.kl_sum / b.tokens)
        for a, b in zip(data["ptq"].sequences, data["qad"].sequences, strict=False)
        if a.tokens > 0 and b.tokens > 0
    ]


def _pair_axes(axes: Axes, pairs: list[tuple[float, float]]) -> None:
    top = 1.08 * max(max(pair) for pair in pairs) or 1.0
    axes.plot([0, top], [0, top], color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate("equal", (0.93 * top, 0.93 * top), xytext=(-3, 0), textcoords="offset points", ha="right", color=MUTED)
    shown = pairs[:: math.ceil(len(pairs) / 1000)]
    axes.plot(*zip(*shown, strict=True), linestyle="", marker="x", markersize=5, color=arm_colour("qad"), markeredgewidth=1.3)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_aspect("equal")
    axes.grid()
    axes.set_xlabel("PTQ: KL of a sequence, nats per token")
    axes.set_ylabel("QAD: the same sequence")


def training(steps: list[Step], others: dict[str, list[Step]]) -> Figure | None:
    """Train and validation KL over training tokens; the PTQ start and the best validation are marked.

    others: arm -> its steps; their validation KL is drawn beside QAD's.
    """
    train = [(s.tokens, s.kl) for s in steps if s.kl is not None]
    valid = [(s.tokens, s.val_kl) for s in steps if s.val_kl is not None]
    if len(train) < 2 and len(valid) < 2:
        return None
    best = min(valid, key=lambda point: point[1]) if valid else None
    beside = {arm: [(s.tokens, s.val_kl) for s in found if s.val_kl is not None] for arm, found in others.items()}
    beside = {arm: points for arm, points in beside.items() if points}

    def draw(figure: Canvas, narrow: bool) -> None:
        axes = figure.subplots()
        if train:
            # Long runs are thinned to what a screen can show.
            thin = train[:: math.ceil(len(train) / 600)]
            axes.plot(*zip(*thin, strict=True), color=MUTED, linewidth=1.0, label="training")
        if valid:
            axes.plot(
                *zip(*valid, strict=True),
                color=arm_colour("qad"),
                marker="D",
                linewidth=1.8,
                label="validation",
                markersize=4.5 if len(valid) <= 60 else 0,
            )
            if valid[0][0] == 0:
                _mark_start(axes, valid[0][1])
        for arm, points in beside.items():
            axes.plot(
                *zip(*points, strict=True),
                color=arm_colour(arm),
                marker=arm_marker(arm),
                markersize=4.5,
                linewidth=1.5,
                linestyle=(0, (1, 1)),
                label=f"validation, {arm_name(arm)}",
            )
        if best:
            axes.plot([best[0]], [best[1]], marker="o", markersize=12, markerfacecolor="none", markeredgecolor=INK)
            axes.annotate(
                f"best {significant(best[1])}", best, xytext=(0, -19), textcoords="offset points", ha="center", va="center"
            )
        axes.margins(x=0.06, y=0.22)
        axes.grid(axis="y")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.locator_params(axis="x", nbins=4 if narrow else 7)
        axes.set_xlabel("training tokens")
        axes.set_ylabel("KL, nats per token")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2 if narrow else 4)

    alt = "KL divergence while training"
    if best:
        alt += f": validation from {significant(valid[0][1])} to a best of {significant(best[1])} nats per token"
    return draw_figure("training", draw, (3.0, 2.9), alt + ".", "KL from the teacher over the training tokens.")


def _mark_start(axes: Axes, start: float) -> None:
    axes.axhline(start, color=arm_colour("ptq"), linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
    axes.annotate(
        f"PTQ start {significant(start)}",
        (1, start),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=arm_colour("ptq"),
    )


def memory(arms: list[str], records: list[Record]) -> Figure | None:
    """One stacked bar an arm, bytes by class, in GB."""
    found = memory_of(records)
    arms = [arm for arm in arms if arm in found]
    if not arms:
        return None
    names = [name for name in CLASSES if any(found[arm].bytes_by_class.get(name) for arm in arms)]

    def draw(figure: Canvas, narrow: bool) -> None:
        axes = figure.subplots()
        lefts = [0.0] * len(arms)
        for name in names:
            i = list(CLASSES).index(name)
            widths = [found[arm].bytes_by_class.get(name, 0) / GB for arm in arms]
            axes.barh(
                range(len(arms)),
                widths,
                left=lefts,
                height=0.6,
                color=CLASS_COLOURS[i],
                hatch=HATCHES[i],
                edgecolor=PAPER,
                linewidth=0.8,
                label=CLASSES[name],
            )
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        for y, (arm, left) in enumerate(zip(arms, lefts, strict=True)):
            axes.annotate(
                f"{gigabytes(found[arm].file_bytes)} GB", (left, y), xytext=(5, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(arms)), [arm_name(arm) for arm in arms])
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_xlim(0, 1.2 * max(lefts) or 1)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.locator_params(axis="x", nbins=4 if narrow else 7)
        axes.set_xlabel("GB (10⁹ bytes) on disk")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2 if narrow else 4, handlelength=1.4)

    sizes = ", ".join(f"{arm_name(arm)} {gigabytes(found[arm].file_bytes)} GB" for arm in arms)
    height = 1.2 + 0.36 * len(arms)
    caption = "Bytes on disk by class. Block scales cost half a bit per parameter; embeddings, head and norms stay BF16."
    return draw_figure("memory", draw, (height, height + 0.3), f"Size on disk by class of data: {sizes}.", caption)
