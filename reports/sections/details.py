"""The tables behind the summary: how each number is to be read, and what it is made of."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import math
from collections.abc import Callable

from harness.records.comparison import Comparison, Contrast
from harness.records.record import MemoryData, Record
from harness.records.verdict import Verdict
from qad.untrusted import clean
from reports.load import SplitText, Step
from reports.numbers import gigabytes_in_column, percent, plural, significant
from reports.parts import Cell, Group, Row, Table
from reports.sections.outcome import BASELINE, arm_name, filter_note, memory_of, reading
from reports.sections.tables import NOT_AVAILABLE, NOT_MEASURED, count_cell, number_cell, points_cell, share_cell, speed_group

CLASSES = {
    "fp4_codes": "FP4 codes",
    "block_scales": "block scales (E4M3)",
    "global_scales": "global scales (FP32)",
    "fp8": "FP8",
    "bf16": "BF16",
    "other": "other dtypes",
}


def benchmarks(comparison: Comparison) -> Table | None:
    """One line a benchmark and arm: how the recovery is to be read."""
    groups = []
    for row in comparison.benchmarks:
        rows = []
        for arm, recovery in row.recovery.items():
            worse, better = row.flips.get(arm, (0, 0))
            flips = Cell(f"{worse} / {better}") if arm in row.flips else NOT_AVAILABLE
            # Not all benchmarks have a chance level; one that has may have no recovery above it.
            above = Cell("no chance level") if row.chance is None else share_cell(row.recovery_above_chance.get(arm))
            how = ", ".join(clean(part, 80) for part in (recovery.method, recovery.note) if part) if recovery else ""
            n = count_cell(row)
            rows.append(Row(arm_name(arm), [share_cell(recovery), Cell(reading(recovery), how), above, flips, n]))
        chance = f", chance {percent(row.chance)}" if row.chance is not None else ""
        groups.append(Group(f"{clean(row.task, 60)} ({filter_note(row)}{chance})", rows))
    groups = [group for group in groups if group.rows]
    if not groups:
        return None
    columns = ["", "Recovery", "Reading, and how the interval was made", "Recovery above chance", "Items worse / better", "n"]
    note = (
        "Above chance: (score − chance) / (BF16 score − chance), n/a unless BF16 is clearly above chance. Within noise "
        "means that the interval holds 100 %, not that the arms are equal."
    )
    return Table("Each benchmark against BF16", columns, groups, note, breakable=len(groups) > 6)


def text(splits: list[SplitText]) -> Table | None:
    """How many tokens each source gave each split."""
    groups = []
    for split in splits:
        facts = [plural(split.tokens, "token")]
        if split.counted is not None:
            facts.append(f"{percent(split.counted / split.tokens)} of the positions in the loss")
        if split.used is not None:
            facts.append(f"{split.used:,} over all epochs")
        rows = [
            Row(clean(name, 60), [Cell(f"{tokens:,}"), Cell(percent(tokens / split.tokens))])
            for name, tokens in split.sources.items()
        ]
        groups.append(Group(f"{split.role}: {', '.join(facts)}", rows))
    if not groups:
        return None
    return Table("Text, by split and source", ["", "Tokens", "Share"], groups, "No document is in two splits.")


def checks(verdict: Verdict | None) -> Table | None:
    """The policy, threshold by threshold."""
    if verdict is None:
        return None
    rows = [Row(clean(check.rule, 120), [Cell(check.outcome), Cell(clean(check.why, 400))]) for check in verdict.checks]
    others = "".join(f" {arm_name(arm)}: {outcome}." for arm, outcome in verdict.others.items())
    note = f"{clean(verdict.about, 300)}{' By the same policy,' if others else ''}{others}".strip()
    caption = f"Policy {clean(verdict.policy, 60)}, held against {arm_name(verdict.arm)}"
    return Table(caption, ["Threshold", "Verdict", "Why"], [Group("", rows)], note, align="left", breakable=True)


def contrasts(comparison: Comparison) -> Table | None:
    """Arm against arm on each benchmark: difference, tests, and what n would tell."""
    groups = []
    for pair in dict.fromkeys((c.arm, c.against) for c in comparison.contrasts):
        found = [c for c in comparison.contrasts if (c.arm, c.against) == pair]
        rows = [Row(clean(c.benchmark, 60), _contrast_cells(c)) for c in found]
        groups.append(Group(f"{arm_name(pair[0])} against {arm_name(pair[1])}", rows))
    if not groups:
        return None
    margin = percent(comparison.contrasts[0].margin)
    columns = ["", "Difference", "Items worse / better", "p, adjusted", f"At a margin of {margin}", "Items needed"]
    note = (
        "Differences in points of score, above 0 is better. p is of no difference, adjusted by Holm over the benchmarks in "
        f"the median; under it the test. Non-inferior: a loss of more than {margin} of the score is excluded (one-sided "
        "5 %). Items needed: to show that of an arm that is truly equal, with 80 % power."
    )
    return Table("Paired tests", columns, groups, note, breakable=True)


def _contrast_cells(c: Contrast) -> list[Cell]:
    points = points_cell(c.difference)
    if c.p is None:
        return [points, Cell("—"), Cell("no test", clean(c.test, 60)), Cell(c.verdict), Cell("—")]
    p = Cell(significant(c.p if c.p_holm is None else c.p_holm, digits=2), c.test)
    needed = Cell("n/a") if c.items_needed is None else Cell(f"{c.items_needed:,}")
    return [points, Cell(f"{c.worse} / {c.better}"), p, Cell(c.verdict), needed]


def noise_floor(comparison: Comparison) -> Table | None:
    """Arms measured twice on their own weights: how far such measurements are apart."""
    rows = []
    for arm, floor in comparison.noise_floor.items():
        changed = ", ".join(f"{clean(name, 40)} {clean(value, 40)}" for name, value in floor.conditions.items())
        median = NOT_MEASURED
        if floor.median:
            median = Cell(f"{percent(floor.median.low)} to {percent(floor.median.high)}")
        agreement = NOT_MEASURED if floor.top1 is None else share_cell(floor.top1)
        kl = NOT_MEASURED if floor.kl is None else number_cell(floor.kl, "nats")
        differing = NOT_MEASURED if floor.differing is None else share_cell(floor.differing)
        rows.append(Row(arm_name(arm), [median, differing, kl, agreement], changed))
    if not rows:
        return None
    columns = ["", "Median recovery by chance", "Items with another score", "KL", "Top-1 agreement"]
    note = "The same weights again; under the arm, what was changed on purpose. 95 % of medians would lie in that range."
    return Table("Noise floor", columns, [Group("", rows)], note)


def token_kl(comparison: Comparison) -> Table | None:
    """Quantiles of KL over tokens."""
    arms = [arm for arm in comparison.arms if arm in comparison.fidelity and arm != BASELINE]
    names = {"p50": "median", "p90": "90 %", "p99": "99 %", "p99_9": "99.9 %", "max": "largest"}
    names = {key: name for key, name in names.items() if any(key in comparison.fidelity[arm].token_kl for arm in arms)}
    if not names:
        return None
    rows = []
    for arm in arms:
        fidelity = comparison.fidelity[arm]
        mean = number_cell(fidelity.kl)
        cells = [Cell(significant(fidelity.token_kl[k])) if k in fidelity.token_kl else NOT_MEASURED for k in names]
        rows.append(Row(arm_name(arm), [mean, *cells, Cell(plural(fidelity.tokens, "token"))]))
    columns = ["", "Mean", *names.values(), "n"]
    return Table("KL divergence over tokens, nats", columns, [Group("", rows)], "Quantiles have no interval here.")


def qad_against_ptq(comparison: Comparison) -> Table | None:
    entries = [
        ("KL of QAD / KL of PTQ", "below 100 %: QAD is nearer to the teacher", comparison.kl_ratio),
        ("KL of QAD / KL of plain PTQ", "scales from the largest weight, rounded to nearest", comparison.kl_ratio_plain),
        ("Perplexity gap closed", "(PTQ − QAD) / (PTQ − BF16)", comparison.perplexity_gap_closed),
    ]
    rows = [
        Row(label, [share_cell(e), Cell(plural(e.n, "sequence"), plural(e.clusters, "cluster"))], detail)
        for label, detail, e in entries
        if e
    ]
    return Table("QAD against PTQ, paired by sequence", ["", "Share", "n"], [Group("", rows)]) if rows else None


def validation(logs: dict[str, list[Step]]) -> Table | None:
    """Validation KL of every trained arm, at most 12 lines each: the first, the best, the last, and some between."""
    groups = [group for arm, steps in logs.items() if (group := _validations(arm, steps))]
    if not groups:
        return None
    columns = ["", "Training tokens", "Validation KL, nats", "Training KL of that step, nats"]
    note = (
        "Forward KL to the teacher at temperature 1 on the validation split, of the student as it would be deployed. The best "
        "is kept: the lowest KL, of QAT the lowest cross-entropy."
    )
    return Table("Validations", columns, groups, note)


def _validations(arm: str, steps: list[Step]) -> Group | None:
    found = [step for step in steps if step.val_kl is not None]
    if not found:
        return None
    best = min(found, key=_chosen_by)
    stride = max(1, math.ceil(len(found) / 10))
    shown = [s for i, s in enumerate(found) if i % stride == 0 or s in (best, found[-1])]
    rows = []
    for step in shown:
        marks = (("PTQ start",) if step.step == 0 else ()) + (("best",) if step is best else ())
        own = "" if step.val_cross_entropy is None else f"cross-entropy {significant(step.val_cross_entropy)}"
        value = Cell(significant(step.val_kl or 0.0), own, marks)
        values = [Cell(f"{step.tokens:,}"), value, _optional(step.kl)]
        rows.append(Row(f"Step {step.step:,}", values))
    count = plural(len(found), "validation")
    return Group(f"{arm_name(arm)}: {count}{f', {len(rows)} shown' if len(rows) < len(found) else ''}", rows)


def _chosen_by(step: Step) -> float:
    """What the kept checkpoint has the least of."""
    value = step.val_kl if step.val_cross_entropy is None else step.val_cross_entropy
    return math.inf if value is None else value


def _optional(value: float | None) -> Cell:
    return Cell("—") if value is None else Cell(significant(value))


def memory(arms: list[str], records: list[Record]) -> Table | None:
    """Bytes by class. Each column names its unit."""
    found = memory_of(records)
    arms = [arm for arm in arms if arm in found]
    if not arms:
        return None
    names = [name for name in CLASSES if any(found[arm].bytes_by_class.get(name) for arm in arms)]
    largest = max(found[arm].file_bytes for arm in arms)
    names += sorted({n for arm in arms for n in found[arm].bytes_by_class if n not in CLASSES})

    def row(label: str, count: Callable[[MemoryData], int], strong: bool = False) -> Row:
        return Row(label, [Cell(gigabytes_in_column(count(found[arm]), largest)) for arm in arms], strong=strong)

    def of_class(name: str) -> Callable[[MemoryData], int]:
        return lambda data: data.bytes_by_class.get(name, 0)

    rows = [row(clean(CLASSES.get(name, name), 40), of_class(name)) for name in names]
    rows.append(row("file headers", lambda d: d.file_bytes - d.tensor_bytes))
    rows.append(row("Weight files", lambda d: d.file_bytes, strong=True))
    columns = ["", *(f"{arm_name(arm)}, GB" for arm in arms)]
    counts = "; ".join(
        f"{arm_name(arm)} {found[arm].parameters:,} parameters, {found[arm].quantized_parameters:,} of them in four bits"
        for arm in arms
    )
    note = f"GB is 10⁹ bytes; exact, from the safetensors headers. {counts}."
    return Table("Bytes on disk by class", columns, [Group("", rows)], note)


def speed(comparison: Comparison, records: list[Record]) -> Table | None:
    group = speed_group(comparison, records)
    if not group.rows:
        return None
    note = (
        "Median of the repeats and their range. The ratio is the geometric mean over repeats that ran next to each "
        "other, with its 95 % interval. Prefill counts prompt tokens, decode generated tokens after the first."
    )
    return Table("Tokens per second", ["", *map(arm_name, comparison.arms), "n"], [Group("", group.rows)], note)
