"""How every figure is drawn: inline SVG by matplotlib, the same bytes for the same numbers, readable in light and dark.

Colours are placeholders while matplotlib draws; then they become CSS variables of the page, so that a figure follows
the page's colour scheme. An arm is told by marker shape and direct label as well as by colour. Each figure is drawn
twice, for wide and for narrow screens, and the page's style sheet shows one of them.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import matplotlib
import matplotlib.patches

from reports.parts import Figure
from reports.sections.outcome import arm_name

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

WIDE, NARROW = 7.4, 3.5  # inches of 72 points; the page shows a point as 1.25 pixels
INK, MUTED, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
COLOURS = {"bf16": "#050505", "ptq": "#060606", "qad": "#070707"}
OTHERS = ["#080808", "#090909", "#0a0a0a"]
CLASS_COLOURS = ["#0b0b0b", "#0c0c0c", "#0d0d0d", "#0e0e0e", "#0f0f0f", "#101010"]
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    PAPER: "paper",
    **{colour: arm for arm, colour in COLOURS.items()},
    **{colour: f"other{i}" for i, colour in enumerate(OTHERS)},
    **{colour: f"class{i}" for i, colour in enumerate(CLASS_COLOURS)},
}
MARKERS = {"bf16": "s", "ptq": "o", "qad": "D"}
HATCHES = ["", "////", "", "\\\\\\\\", "", "...."]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nvfp4-qad",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "axes.grid": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
    "hatch.color": PAPER,
    "axes.unicode_minus": True,
}

Draw = Callable[["Canvas", bool], None]  # (figure, narrow)


def arm_colour(arm: str) -> str:
    return COLOURS.get(arm) or OTHERS[sum(map(ord, arm)) % len(OTHERS)]


def arm_marker(arm: str) -> str:
    return MARKERS.get(arm, "^")


def arm_legend(figure: Canvas, axes: Axes, arms: list[str], band: str = "") -> None:
    handles: list[Artist] = [
        axes.plot([], [], color=arm_colour(arm), marker=arm_marker(arm), markersize=6, linewidth=1.8, label=arm_name(arm))[0]
        for arm in arms
    ]
    labels = [arm_name(arm) for arm in arms]
    if band:
        handles.append(matplotlib.patches.Patch(color=RULE))
        labels.append(band)
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))


def draw_figure(name: str, draw: Draw, heights: tuple[float, float], alt: str, caption: str) -> Figure:
    wide = _svg(f"{name}-wide", draw, (WIDE, heights[0]), narrow=False)
    narrow = _svg(f"{name}-narrow", draw, (NARROW, heights[1]), narrow=True)
    return Figure(wide, narrow, alt, caption)


def _svg(prefix: str, draw: Draw, size: tuple[float, float], *, narrow: bool) -> str:
    with _style():
        from matplotlib.figure import Figure as Canvas

        figure = Canvas(figsize=size, layout="constrained")
        draw(figure, narrow)
        out = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(out, format="svg", metadata=nothing)
    return _inline(out.getvalue(), prefix)


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """The style alone, whatever a user's matplotlibrc says; a glyph the font lacks is the reader's font's affair."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        warnings.filterwarnings("ignore", message="constrained_layout not applied", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _inline(svg: str, prefix: str) -> str:
    """The <svg> element alone: identifiers unique in the page, colours by CSS variable, decorative for screen readers
    (the figure around it carries the description)."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _inline_tag(tag.group(), prefix), svg)  # text is left alone
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def _inline_tag(tag: str, prefix: str) -> str:
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', tag)
    tag = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", tag)
    for colour, variable in VARIABLES.items():
        tag = tag.replace(colour, f"var(--{variable})")
    return tag
