"""The recovery table of a model card: one arm beside the BF16 original, accuracy and fidelity, as Markdown."""

from __future__ import annotations

from harness.records.comparison import Comparison
from harness.records.record import Record
from qad.untrusted import markdown_text
from reports.sections.outcome import BASELINE, arm_name, emulated_arms
from reports.sections.tables import accuracy_group, fidelity_group

_OF_SEVERAL_ARMS = ("QAD minus PTQ",)


def recovery_table(comparison: Comparison, records: list[Record], arm: str) -> str | None:
    """None where neither accuracy nor fidelity of the arm was compared with the original's."""
    if BASELINE not in comparison.arms or arm not in comparison.arms or arm == BASELINE:
        return None
    shown = [comparison.arms.index(BASELINE), comparison.arms.index(arm), -1]
    rows = [
        _line([_text(row.label, row.detail), *(_text(cell.text, cell.detail) for cell in map(row.cells.__getitem__, shown))])
        for group in (accuracy_group(comparison), fidelity_group(comparison))
        for row in group.rows
        if row.label not in _OF_SEVERAL_ARMS
    ]
    if not rows:
        return None
    head = [_line(["", arm_name(BASELINE), arm_name(arm), "n"]), "|---|---|---|---|"]
    note = "95 % intervals in brackets; recovery is the score divided by BF16's."
    if arm in emulated_arms(records):
        note += " Measured with NVFP4 values, but without FP4 arithmetic."
    return "\n".join([*head, *rows, "", note])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str, detail: str) -> str:
    return markdown_text(text + (f" ({detail})" if detail else ""))
