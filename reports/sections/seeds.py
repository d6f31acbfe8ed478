"""An arm that was trained under several seeds: each seed's own values beside the mean."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import statistics

from harness.records.comparison import Comparison, TrainedSeed
from harness.records.record import Record
from qad.untrusted import clean
from reports.numbers import percent, plural, significant
from reports.parts import Cell, Group, Row, Table
from reports.sections.outcome import arm_name

_SHARES = ("median recovery", "recovery on", "top-1 agreement")


def first_and_further(comparison: Comparison, records: list[Record]) -> tuple[list[Record], list[Record]]:
    """Records of every arm's first seed, which figures, items, size and speed are of, and those of its further seeds."""
    further = {(arm, seed.checkpoint) for arm, seeds in comparison.training_seeds.items() for seed in seeds[1:]}
    kept = [record for record in records if (record.arm, record.checkpoint) not in further]
    return kept, [record for record in records if (record.arm, record.checkpoint) in further]


def training_seeds(comparison: Comparison) -> Table | None:
    """A column a seed, and the mean and standard deviation over seeds."""
    if not comparison.training_seeds:
        return None
    groups = []
    most = max(len(seeds) for seeds in comparison.training_seeds.values())
    for arm, seeds in comparison.training_seeds.items():
        title = f"{arm_name(arm)}: {plural(len(seeds), 'training')}"
        weights = Row("Hash of the measured folder", [*(Cell(clean(s.checkpoint, 12)) for s in seeds), Cell("—"), Cell("—")])
        groups.append(Group(title, [weights, *(_row(name, seeds) for name in seeds[0].values)]))
    numbers = next(iter(comparison.training_seeds.values()))
    columns = ["", *(f"Seed {seed.seed}" for seed in numbers), "Mean", "Standard deviation"]
    note = (
        f"The arm’s numbers elsewhere are means over its {plural(most, 'seed')}; their intervals hold what lies between seeds, "
        "with Student’s t, and what lies between items. Figures, single items, size and speed are of the first seed."
    )
    return Table("Training seeds, each by itself", columns, groups, note, breakable=True)


def _row(name: str, seeds: list[TrainedSeed]) -> Row:
    values = [seed.values.get(name) for seed in seeds]
    known = [value for value in values if value is not None]
    cells = [Cell("n/a") if value is None else Cell(_shown(name, value)) for value in values]
    if len(known) < len(values):
        return Row(_capital(name), [*cells, Cell("n/a"), Cell("n/a")])
    mean, spread = statistics.fmean(known), statistics.stdev(known)
    points = f"{100 * spread:.2f} points" if name.startswith(_SHARES) else significant(spread, mean)
    return Row(_capital(name), [*cells, Cell(_shown(name, mean)), Cell(points)])


def _shown(name: str, value: float) -> str:
    return percent(value) if name.startswith(_SHARES) else significant(value)


def _capital(name: str) -> str:
    return clean(name[:1].upper() + name[1:], 80)
