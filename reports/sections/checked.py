"""What each arm was checked with: the text, benchmarks and engines behind its numbers, an arm a row."""

from __future__ import annotations

from harness.records.comparison import Comparison
from harness.records.record import AccuracyData, FidelityData, Record, ScoresData
from qad.untrusted import clean
from reports.load import Run, Step
from reports.numbers import people_list, plural
from reports.parts import Cell, Group, Row, Table
from reports.sections.engine_parity import parity_of
from reports.sections.outcome import BASELINE, PTQ, QAD, arm_name
from reports.sections.tables import NOT_MEASURED

NAMED = 12  # benchmarks


def checked(run: Run, comparison: Comparison, records: list[Record], others: list[Record]) -> Table | None:
    """Of every arm: validation while it was trained, test text, benchmarks, an engine, and itself again (in `others`)."""
    rows = []
    for arm in comparison.arms:
        mine = [record for record in records if record.arm == arm]
        cells = [_validated(run, arm), _text(mine), _benchmarks(mine), _engine(mine), _again(others, arm)]
        rows.append(Row(arm_name(arm), cells))
    if not rows:
        return None
    columns = ["", "Validation, while training", "Test text", "Benchmarks", "Engine, beside the reference", "Noise floor"]
    note = "Validation text chose the checkpoint; the test text was seen by neither calibration, training nor that choice."
    if scales := run.quantize.get("scales"):
        rounding = (
            "rounded to nearest" if (way := run.quantize.get("rounding", "nearest")) == "nearest" else f"decided by {way} in PTQ"
        )
        note += f" Scales of 4-bit weights: {clean(str(scales), 40)}; codes: {rounding}."
    return Table("Text, benchmarks and engines of each arm", columns, [Group("", rows)], note, align="left", breakable=True)


def _validated(run: Run, arm: str) -> Cell:
    logs: dict[str, list[Step]] = {QAD: run.steps, **run.other_steps}
    count = sum(step.val_kl is not None for step in logs.get(arm, []))
    text = next(
        (
            f"{plural(split.tokens, 'token')} of {people_list([clean(s, 60) for s in split.sources])}"
            for split in run.text
            if split.role == "validation"
        ),
        "text not recorded",
    )
    if count:
        return Cell(plural(count, "validation"), text)
    if arm == BASELINE:
        return Cell("not trained")
    if arm == PTQ:
        started = [name for name, steps in logs.items() if any(s.step == 0 and s.val_kl is not None for s in steps)]
        where = f"step 0 of {people_list([arm_name(name) for name in started])}" if started else "not trained"
        return Cell(where, text if started else "")
    return Cell("not recorded")


def _text(mine: list[Record]) -> Cell:
    data = next((record.data for record in mine if isinstance(record.data, FidelityData)), None)
    if data is None:
        return NOT_MEASURED
    tokens = sum(sequence.tokens for sequence in data.sequences)
    return Cell(clean(data.data, 60), f"{plural(len(data.sequences), 'sequence')}, {plural(tokens, 'token')}")


def _benchmarks(mine: list[Record]) -> Cell:
    items: dict[str, int] = {}
    imported: list[str] = []
    for record in mine:
        if isinstance(record.data, AccuracyData):
            items |= {task.task: len(task.items) for task in record.data.tasks}
        elif isinstance(record.data, ScoresData):
            imported += [score.task for score in record.data.scores]
    names = list(dict.fromkeys([*items, *imported]))
    if not names:
        return NOT_MEASURED
    shown = [clean(name, 40) for name in names[:NAMED]] + [f"{len(names) - NAMED} more"] * (len(names) > NAMED)
    count = [plural(sum(items.values()), "answer")] * bool(items) + ["imported scores"] * bool(imported)
    return Cell(plural(len(names), "benchmark"), f"{', '.join(count)}: {people_list(shown)}")


def _engine(mine: list[Record]) -> Cell:
    found = next(iter(parity_of(mine).values()), None)
    if found is None:
        return NOT_MEASURED
    name = f"{clean(found.engine.name, 40)} {clean(found.engine.version, 40)}"
    return Cell("holds" if found.holds else "fails", f"{name}, {plural(len(found.data.prompts), 'prompt')}")


def _again(others: list[Record], arm: str) -> Cell:
    mine = [record for record in others if record.arm == arm and record.control is not None]
    if not mine:
        return NOT_MEASURED
    changed = dict.fromkeys(f"{name} {value}" for record in mine for name, value in (record.control or {}).items())
    return Cell(people_list([record.kind for record in mine]), clean(", ".join(changed), 120))
