"""Where the loss sits: what each unit costs when it alone is quantized, and what a search made of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from qad.untrusted import clean
from reports.load import Run, SearchedUnit
from reports.numbers import significant
from reports.parts import Cell, Group, Row, Table

_NUMBER = re.compile(r"\.(\d+)\.")
_ROWS = 80  # layers


def searched(run: Run) -> Table | None:
    """KL by kind of module and by layer, a format a column, and which formats were chosen."""
    if not run.search:
        return None
    formats = list(dict.fromkeys(format for unit in run.search for format in unit.kl))
    groups = [
        Group("By kind of module", _rows(run.search, formats, _kind)),
        Group("By layer", _rows(run.search, formats, _layer)[:_ROWS]),
    ]
    note = (
        f"KL divergence from the unquantized model on {run.search_tokens:,} tokens of the calibration text, nats per token, with "
        "one unit (what engines run in one format) quantized and nothing else; sums over units, which is an assumption."
    )
    columns = ["", *(f"All in {clean(format, 20)}" for format in formats), "As chosen", "Units in each format"]
    return Table("What each unit costs alone", columns, groups, note, breakable=True)


def _kind(unit: SearchedUnit) -> str:
    if unit.name.endswith(".*"):
        return unit.name.removesuffix(".*").rpartition(".")[2]
    return ", ".join(module.rpartition(".")[2] for module in unit.modules)


def _layer(unit: SearchedUnit) -> str:
    number = _NUMBER.search(unit.name)
    return f"Layer {number[1]}" if number else "Outside of layers"


def _rows(units: list[SearchedUnit], formats: list[str], key: Callable[[SearchedUnit], str]) -> list[Row]:
    members: dict[str, list[SearchedUnit]] = {}
    for unit in units:
        members.setdefault(key(unit), []).append(unit)
    return [Row(clean(name, 60), _cells(found, formats)) for name, found in members.items()]


def _cells(units: list[SearchedUnit], formats: list[str]) -> list[Cell]:
    chosen = [unit.format for unit in units]
    sums = [sum(unit.kl.get(format, 0.0) for unit in units) for format in formats]
    as_chosen = sum(unit.kl.get(unit.format, 0.0) for unit in units)
    counts = ", ".join(f"{chosen.count(format)} {clean(format, 20)}" for format in sorted(set(chosen)))
    return [*(Cell(significant(value)) for value in sums), Cell(significant(as_chosen)), Cell(counts)]
