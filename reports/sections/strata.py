"""Where the distance from the teacher lies: by position, by the teacher's entropy, by source of the text, by layer; what
greedy decoding makes of it; and what generated answers looked like."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.records.comparison import Comparison, Estimate, FidelityRow
from qad.untrusted import clean
from reports.numbers import percent, significant
from reports.parts import Cell, Group, Row, Table, Text
from reports.sections.outcome import BASELINE, arm_name
from reports.sections.tables import NOT_AVAILABLE, NOT_MEASURED, number_cell, share_cell

Curve = dict[str, list[tuple[float, float | None, float | None] | None]]  # arm -> (value, low, high) at each place

BY_POSITION, BY_ENTROPY = "tokens before", "tenths of the tokens by the teacher's entropy"
STRATA: dict[str, Callable[[FidelityRow], Mapping[str, Estimate]]] = {
    "Tokens before the predicted one": lambda row: row.by_position,
    "Entropy of the teacher": lambda row: row.by_entropy,
    "Source of the text": lambda row: row.by_domain,
    "What is quantized": lambda row: row.by_part,
}


def compared(comparison: Comparison) -> dict[str, FidelityRow]:
    """The arms that have a distance from the teacher, in order."""
    return {arm: comparison.fidelity[arm] for arm in comparison.arms if arm in comparison.fidelity and arm != BASELINE}


def names_of(rows: Mapping[str, FidelityRow], stratum: Callable[[FidelityRow], Mapping[str, object]]) -> list[str]:
    """Names of the strata in order, over all arms."""
    return list(dict.fromkeys(name for row in rows.values() for name in stratum(row)))


def kl_by_stratum(comparison: Comparison) -> Table | None:
    rows = compared(comparison)
    groups = []
    for title, stratum in STRATA.items():
        names = names_of(rows, stratum)
        # One source only is the whole text, which the summary has.
        if len(names) > 1:
            entries = [Row(clean(name, 60), [_estimate(stratum(row).get(name)) for row in rows.values()]) for name in names]
            groups.append(Group(title, entries))
    layers = names_of(rows, lambda row: row.by_layer)
    if layers:
        groups.append(
            Group(
                "Error of the hidden states behind a layer, relative",
                [Row(clean(name, 60), [_number(row.by_layer.get(name)) for row in rows.values()]) for name in layers],
            )
        )
    if not groups:
        return None
    note = "KL in nats per token, with intervals over sequences; layers: sum of squared differences / sum of squares."
    columns = ["", *map(arm_name, rows)]
    return Table("Distance from the teacher, in parts", columns, groups, note, breakable=True)


def where_it_sits(comparison: Comparison) -> Text | None:
    """One sentence an arm: what weights alone and quantized inputs alone cost."""
    told = [
        f"{arm_name(arm)}: {significant(row.kl.value)} nats in all, "
        + ", ".join(
            f"{significant(part.value)} ({percent(part.value / row.kl.value)}) by {clean(name, 60)}" for name, part in parts
        )
        for arm, row in compared(comparison).items()
        if (parts := row.by_part.items()) and row.kl.value > 0
    ]
    if not told:
        return None
    return Text(
        f"Where the KL divergence sits. {'; '.join(told)}. Training can take away what the weights cost; below what the inputs "
        "cost it gets only where weights make up for rounded inputs."
    )


def _estimate(estimate: Estimate | None) -> Cell:
    return NOT_MEASURED if estimate is None else number_cell(estimate)


def _number(value: float | None) -> Cell:
    return NOT_MEASURED if value is None else Cell(significant(value))


def continuations(comparison: Comparison) -> Table | None:
    """Greedy decoding beside the teacher's, and text that the teacher wrote."""
    rows = compared(comparison)
    entries: list[tuple[str, str, Callable[[FidelityRow], Cell | None]]] = [
        ("Equal tokens", "greedy decoding, before the first that differs", lambda row: _shown(row.equal_tokens)),
        ("Prompts that diverge", "within the tokens asked for", lambda row: _shown(row.diverged, share=True)),
        ("Perplexity ratio", "on what the teacher wrote, to the teacher's", lambda row: _shown(row.written_ratio)),
    ]
    made = [
        Row(label, [cell(row) or NOT_MEASURED for row in rows.values()], detail)
        for label, detail, cell in entries
        if any(cell(row) for row in rows.values())
    ]
    if not made:
        return None
    return Table("What the models write", ["", *map(arm_name, rows)], [Group("", made)])


def _shown(estimate: Estimate | None, share: bool = False) -> Cell | None:
    if estimate is None:
        return None
    return share_cell(estimate) if share else number_cell(estimate)


def outputs(comparison: Comparison) -> Table | None:
    """Length, cut-offs, loops and empty answers of the generated benchmarks, arm by arm."""
    groups = []
    for found in comparison.outputs:
        rows = []
        for arm in (arm for arm in comparison.arms if arm in found.truncated):
            ratio = Cell("—") if arm == BASELINE else _or_none(found.length_ratio, arm, number_cell)
            shares = [share_cell(by_arm.get(arm)) for by_arm in (found.truncated, found.loops, found.empty)]
            tokens = _or_none(found.tokens, arm, number_cell)
            per_correct = _or_none(found.tokens_per_correct, arm, number_cell)
            rows.append(Row(arm_name(arm), [tokens, ratio, *shares, per_correct]))
        groups.append(Group(clean(found.benchmark, 60), rows))
    groups = [group for group in groups if group.rows]
    if not groups:
        return None
    columns = ["", "Tokens an answer", "Relative to BF16", "Cut off", "Loops", "Empty", "Tokens a correct answer"]
    note = "Tokens generated, thinking included. Cut off: by the limit of tokens. Loops: the answer ends in a repetition."
    return Table("What the answers looked like", columns, groups, note, breakable=True)


def _or_none(by_arm: Mapping[str, Estimate | None], arm: str, cell: Callable[[Estimate], Cell]) -> Cell:
    if arm not in by_arm:
        return Cell("not counted")
    estimate = by_arm[arm]
    return NOT_AVAILABLE if estimate is None else cell(estimate)


def curves(comparison: Comparison) -> dict[str, tuple[list[str], Curve]]:
    """What can be drawn: axis label -> names of the places, and every arm's values there."""
    rows = compared(comparison)
    found: dict[str, tuple[list[str], Curve]] = {}
    for label, title in ((BY_POSITION, "Tokens before the predicted one"), (BY_ENTROPY, "Entropy of the teacher")):
        names = names_of(rows, STRATA[title])
        if len(names) > 1:
            lines: Curve = {arm: [_point(STRATA[title](row).get(name)) for name in names] for arm, row in rows.items()}
            first = [name.partition("-")[0] if label == BY_POSITION else str(i) for i, name in enumerate(names, 1)]
            found[label] = first, lines
    return found


def _point(estimate: Estimate | None) -> tuple[float, float | None, float | None] | None:
    return None if estimate is None else (estimate.value, estimate.low, estimate.high)
