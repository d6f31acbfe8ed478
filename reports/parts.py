"""What a report is made of, before it is HTML or Markdown: sections of paragraphs, tables, figures, code and lists."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Cell:
    """text: the number with its unit. detail: its interval, or why there is no number. tags: short marks."""

    text: str
    detail: str = ""
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """label, and under it what it is a number of."""

    label: str
    cells: list[Cell]
    detail: str = ""
    strong: bool = False


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows under a heading of their own; "" for none."""

    title: str
    rows: list[Row]


@dataclasses.dataclass(frozen=True)
class Table:
    """columns: the first heads the labels. align: "right" for numbers, "left" for words. breakable: may go over pages."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: list[str]
    groups: list[Group]
    note: str = ""
    align: str = "right"
    breakable: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """The same picture for wide and for narrow screens, as inline SVG. alt: what it shows, in words."""

    kind: ClassVar[str] = "figure"
    wide: str
    narrow: str
    alt: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str


@dataclasses.dataclass(frozen=True)
class Code:
    kind: ClassVar[str] = "code"
    text: str
    language: str


@dataclasses.dataclass(frozen=True)
class Notes:
    """Items of a list: (term, explanation)."""

    kind: ClassVar[str] = "notes"
    items: list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Heading:
    """Of a part of a section."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclasses.dataclass(frozen=True)
class Example:
    """title: which item, with its scores. facts: (what, text); [] where only the scores are known."""

    title: str
    facts: list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Examples:
    kind: ClassVar[str] = "examples"
    title: str
    items: list[Example]


Block = Table | Figure | Text | Code | Notes | Heading | Examples


@dataclasses.dataclass(frozen=True)
class Banner:
    """level: "warning" (something is wrong), "caution" (a number means less than it seems); of a verdict: "pass",
    "fail" or "inconclusive"."""

    level: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Tile:
    """One figure of the first screen: the number, what it is, and its interval or what else has to be known."""

    number: str
    what: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The first screen's three lines. level: pass, fail or inconclusive."""

    level: str
    word: str
    reason: str
    next_action: str


@dataclasses.dataclass(frozen=True)
class Section:
    """folded: shown when it is asked for, and in print."""

    anchor: str
    title: str
    blocks: list[Block]
    folded: bool = False


@dataclasses.dataclass(frozen=True)
class Document:
    """title: the model's name.

    subtitle: what was measured when.
    decision, tiles, plot: the first screen.
    outcome: sentences.
    """

    title: str
    subtitle: str
    decision: Decision | None
    tiles: list[Tile]
    plot: Figure | None
    outcome: list[str]
    banners: list[Banner]
    sections: list[Section]
