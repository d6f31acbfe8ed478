"""What came out, in plain sentences, and what a reader must know before believing a number."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

from collections.abc import Iterator

from harness.records.comparison import BenchmarkRow, Comparison, Estimate
from harness.records.record import ARMS, Engine, MemoryData, Record, arm_label, arm_order
from harness.records.verdict import Verdict
from qad.untrusted import clean
from reports.load import Step
from reports.numbers import gigabytes, interval, people_list, percent, percent_interval, plural, significant
from reports.parts import Banner, Decision, Tile

SATURATED = 0.01  # share of blocks, above which it is said
CUT_OFF = 0.01  # share of answers, above which it is said
LOW_RECOVERY = 0.95  # a benchmark below it gets a warning, however good the median is
BASELINE, PTQ, QAD = ARMS


def arm_name(arm: str) -> str:
    return clean(arm_label(arm), 40)


def reading(recovery: Estimate | None) -> str:
    """What a recovery's interval says. "within noise" is not "equal": see the width of the interval."""
    if recovery is None:
        return "n/a"
    if recovery.low is None or recovery.high is None:
        return "inconclusive"
    if recovery.high < 1:
        return "below BF16"
    return "above BF16" if recovery.low > 1 else "within noise of BF16"


def outcome(comparison: Comparison, records: list[Record]) -> list[str]:
    """Two or three sentences; one if nothing was compared."""
    found = [_fidelity(comparison), _recovery(comparison), _size(records), *_served(comparison)]
    return [sentence for sentence in found if sentence] or ["The records hold nothing to compare the arms by."]


def _fidelity(comparison: Comparison) -> str:
    gap, ratio = comparison.perplexity_gap_closed, comparison.kl_ratio
    parts = []
    if gap:
        parts.append(f"closes {_share(gap)} of the perplexity gap that PTQ opens")
    if ratio:
        size = _share(ratio)
        if ratio.low is None or ratio.high is None:
            parts.append(f"has a KL divergence to the BF16 teacher of {size} of PTQ's")
        elif ratio.high < 1:
            parts.append(f"lowers the KL divergence to the BF16 teacher to {size} of PTQ's")
        elif ratio.low > 1:
            parts.append(f"raises the KL divergence to the BF16 teacher to {size} of PTQ's")
        else:
            parts.append(f"leaves the KL divergence to the BF16 teacher where it was, {size} of PTQ's")
    if comparison.kl_ratio_plain:
        parts.append(f"has {_share(comparison.kl_ratio_plain)} of plain PTQ's")
    return f"QAD {people_list(parts)}." if parts else ""


def _recovery(comparison: Comparison) -> str:
    arms = [arm for arm in reversed(comparison.arms) if arm in comparison.median_recovery]
    if not arms:
        return ""
    parts = []
    for arm in arms:
        label, worst = comparison.worst[arm]
        parts.append(f"{arm_name(arm)} {_share(comparison.median_recovery[arm])}, worst {clean(label, 60)} {_share(worst)}")
    median = comparison.median_recovery[arms[0]]
    few = " So few benchmarks say little about others." if median.n <= 3 else ""
    return f"Median recovery of BF16's score over {plural(median.n, 'benchmark')}: {'; '.join(parts)}.{few}"


def memory_of(records: list[Record]) -> dict[str, MemoryData]:
    return {record.arm: record.data for record in records if isinstance(record.data, MemoryData)}


def _size(records: list[Record]) -> str:
    memory = memory_of(records)
    small = memory.get(QAD) or memory.get(PTQ)
    if small is None:
        return ""
    size = f"The NVFP4 checkpoint is {gigabytes(small.file_bytes)} GB on disk"
    if BASELINE not in memory:
        return size + "."
    share = percent(small.file_bytes / memory[BASELINE].file_bytes)
    return f"{size}, {share} of the BF16 checkpoint's {gigabytes(memory[BASELINE].file_bytes)} GB."


def _least_served(comparison: Comparison, arm: str) -> tuple[str, Estimate] | None:
    """The load at which an arm gained least tokens a second, and how many times BF16's they are."""
    cells = comparison.serving_ratio.get(arm, {})
    found = {name: ratios["tokens_per_s"] for name, ratios in cells.items() if "tokens_per_s" in ratios}
    return min(found.items(), key=lambda entry: entry[1].value, default=None)


def _served(comparison: Comparison) -> Iterator[str]:
    for arm, cells in comparison.serving_ratio.items():
        if least := _least_served(comparison, arm):
            name, ratio = least
            limits = interval(ratio) or "no interval: one run"
            where = clean(name, 80) + (f", the least of {len(cells)} loads" if len(cells) > 1 else "")
            where += ", FP4 emulated" if arm in comparison.emulated else ""
            yield f"{arm_name(arm)} served {significant(ratio.value)} times BF16's tokens per second ({limits}) at {where}."


def _share(estimate: Estimate) -> str:
    limits = percent_interval(estimate)
    return f"{percent(estimate.value)} ({limits})" if limits else f"{percent(estimate.value)} (no interval)"


def decision(verdict: Verdict | None) -> Decision | None:
    """What was decided, why, and what to do."""
    if verdict is None:
        return None
    word = f"{verdict.outcome} for {arm_name(verdict.arm)} by policy {clean(verdict.policy, 60)}"
    reason, next_action = (line[:1].upper() + line[1:] for line in (clean(verdict.reason, 600), clean(verdict.next_action, 300)))
    return Decision(verdict.outcome.lower(), word, reason, next_action)


def tiles(comparison: Comparison, records: list[Record]) -> list[Tile]:
    """Recovery, KL against PTQ, size, speed: four figures for somebody in a hurry; what was not measured is said."""
    others = [name for name in comparison.arms if name != BASELINE]
    arm = next((name for name in (QAD, PTQ, *reversed(others)) if name in others), "")
    speed = _speed_tile(comparison, arm)
    return [_recovery_tile(comparison, arm), _kl_tile(comparison, arm), _size_tile(comparison, arm, records), speed]


def _recovery_tile(comparison: Comparison, arm: str) -> Tile:
    median = comparison.median_recovery.get(arm)
    if median is None:
        scored = any(arm in row.score and BASELINE in row.score for row in comparison.benchmarks)
        return Tile("—", f"no recovery: {arm_name(BASELINE)} is at chance" if scored else "recovery was not measured")
    what = f"of BF16's score, {arm_name(arm)}, median of {plural(median.n, 'benchmark')}"
    return Tile(percent(median.value), what, percent_interval(median))


def _kl_tile(comparison: Comparison, arm: str) -> Tile:
    if comparison.kl_ratio is not None:
        return Tile(percent(comparison.kl_ratio.value), "of PTQ's KL to BF16", percent_interval(comparison.kl_ratio))
    row = comparison.fidelity.get(arm)
    if row is None:
        return Tile("—", "KL to BF16 was not measured")
    return Tile(f"{significant(row.kl.value)} nats", "KL to BF16 per token", interval(row.kl))


def _size_tile(comparison: Comparison, arm: str, records: list[Record]) -> Tile:
    memory = memory_of(records)
    ratio = comparison.memory_ratio.get(arm)
    if arm not in memory or ratio is None:
        return Tile("—", "size on disk was not measured")
    return Tile(percent(ratio.value), "of BF16's size on disk", f"{gigabytes(memory[arm].file_bytes)} GB")


def _speed_tile(comparison: Comparison, arm: str) -> Tile:
    """An emulated speed says nothing of FP4's, so it is no figure of the first screen."""
    found = comparison.throughput_ratio.get(arm, {}).get("decode")
    if arm not in comparison.emulated and (least := _least_served(comparison, arm)):
        return Tile(f"{significant(least[1].value)}×", f"BF16's tokens per second, {clean(least[0], 60)}", interval(least[1]))
    if arm in comparison.emulated or found is None:
        return Tile("—", "speed was not measured here", "FP4 was emulated" if arm in comparison.emulated else "")
    return Tile(f"{significant(found.value)}×", "BF16's decoding speed", interval(found))


# --- banners -------------------------------------------------------------------------------------


def banners(comparison: Comparison, records: list[Record], steps: list[Step]) -> list[Banner]:
    """Warnings first."""
    found = [*_collapsed(comparison), *_training(comparison, steps), *_reference(records), *_emulated(records)]
    found += [*_saturated(comparison, steps), *_doubtful(comparison), *_cut_off(comparison), *_smoke(comparison)]
    return sorted(found, key=lambda banner: banner.level != "warning")


def _doubtful(comparison: Comparison) -> list[Banner]:
    """Recoveries that decide nothing, whatever their value."""
    named = [
        f"{arm_name(arm)} on {clean(row.label, 60)}, {clean(why, 160)}"
        for row in comparison.benchmarks
        for arm, why in row.doubt.items()
    ]
    return [Banner("warning", "Not to be relied on", f"{_some(named)}.")] if named else []


def _some(named: list[str]) -> str:
    return "; ".join(named[:5] + [f"{len(named) - 5} more"] * (len(named) > 5))


def _saturated(comparison: Comparison, steps: list[Step]) -> list[Banner]:
    """What lies above a scale is cut off to it, which no training sees coming."""
    shares = {f"the inputs of {arm_name(arm)}": row.saturated_inputs for arm, row in comparison.fidelity.items()}
    last = next((step for step in reversed(steps) if step.val_kl is not None), None)
    if last is not None:
        shares |= {
            "the inputs at the last validation": last.saturated_input_share,
            "the weights at the last validation": last.saturated_weight_share,
        }
    named = [f"{percent(share)} of {what}" for what, share in shares.items() if share is not None and share > SATURATED]
    text = f"Above their scales, and cut off to them, are {people_list(named)} (blocks of 16). Calibrate on text like that which "
    return [Banner("warning", "Saturated", f"{text}is measured, and on more of it.")] if named else []


def _cut_off(comparison: Comparison) -> list[Banner]:
    """Answers that were cut off count as they stand, which may be a server's or a protocol's doing."""
    named = [
        f"{percent(share.value)} of {arm_name(arm)}'s on {clean(row.benchmark, 60)}"
        for row in comparison.outputs
        for arm, share in row.truncated.items()
        if share.value > CUT_OFF
    ]
    text = f"Of the answers, {_some(named)} were cut off, and are scored as far as they go."
    return [Banner("caution", "Answers cut off", text)] if named else []


def _reference(records: list[Record]) -> list[Banner]:
    """A distance from another model than the arms' original is not what everybody will take it for."""
    names = dict.fromkeys(clean(r.settings["reference"], 60) for r in records if r.settings.get("reference"))
    text = f"Fidelity was measured against {people_list(list(names))}, which is not the BF16 original of these arms."
    return [Banner("caution", "Another reference", text)] if names else []


def emulated_arms(records: list[Record]) -> list[str]:
    return [arm for arm in dict.fromkeys(r.arm for r in records if r.engine.emulated)]


def engine_tags(engine: Engine) -> tuple[str, ...]:
    """The mark beside every figure of an engine that did not compute in FP4, though the weights are."""
    if engine.emulated:
        return ("emulated",)
    return ("not native FP4",) if engine.native_fp4 is False else ()


def _emulated(records: list[Record]) -> list[Banner]:
    arms = sorted(emulated_arms(records), key=arm_order)
    if not arms:
        return []
    devices = sorted({clean(r.engine.device, 60) for r in records if r.engine.emulated})
    text = f"{people_list([arm_name(arm) for arm in arms])} ran with NVFP4 values but without FP4 arithmetic, "
    text += f"on {people_list(devices)}: their accuracy is meaningful, their speed is not FP4 speed."
    return [Banner("caution", "Emulated FP4", text)]


def _collapsed(comparison: Comparison) -> list[Banner]:
    """Every benchmark under the threshold, whatever the median says; red for the arm that is furthest along."""
    found = []
    last = max(comparison.worst, key=comparison.arms.index, default="")
    for arm in comparison.arms:
        low = [
            (row.label, recovery)
            for row in comparison.benchmarks
            if (recovery := row.recovery.get(arm)) and recovery.value < LOW_RECOVERY
        ]
        if low:
            named = [f"{_share(recovery)} on {clean(label, 60)}" for label, recovery in low[:5]]
            more = f", and {len(low) - 5} more" if len(low) > 5 else ""
            text = f"{arm_name(arm)} recovers only {people_list(named)}{more}. A median does not show this."
            found.append(
                Banner("warning" if arm == last else "caution", f"Benchmark below {100 * LOW_RECOVERY:.0f} % of BF16", text)
            )
    return found


def _training(comparison: Comparison, steps: list[Step]) -> list[Banner]:
    found = []
    ratio = comparison.kl_ratio
    if ratio and ratio.low is not None and ratio.low > 1:
        text = f"On the test split QAD is further from the teacher than PTQ: its KL is {_share(ratio)} of PTQ's."
        found.append(Banner("warning", "Training did harm", text))
    validated = [step for step in steps if step.val_kl is not None]
    if len(validated) > 1 and validated[0].step == 0:
        start, end = validated[0].val_kl, validated[-1].val_kl
        if start is not None and end is not None and end > start:
            text = (
                f"Validation KL ended at {significant(end)} nats per token, above the {significant(start)} of PTQ. "
                "The best checkpoint was kept; the learning rate is probably too high."
            )
            found.append(Banner("warning", "Training ended worse than it began", text))
    return found


def _smoke(comparison: Comparison) -> list[Banner]:
    limited = [row for row in comparison.benchmarks if row.limit is not None]
    if not limited:
        return []
    named = [f"{clean(row.label, 60)} ({plural(row.limit or 0, 'item')})" for row in limited[:5]]
    return [Banner("caution", "Smoke run", f"Not the whole task: {people_list(named)}. These scores swing with the sample.")]


def filter_note(row: BenchmarkRow) -> str:
    """acc, 0-shot, filter strict."""
    parts = [clean(row.metric, 40)]
    parts += [] if row.n_shot is None else [f"{row.n_shot}-shot"]
    parts += ["imported"] if row.imported else []
    if row.filter not in ("none", ""):
        parts.append(f"filter {clean(row.filter, 40)}")
    if not row.higher_is_better:
        parts.append("lower is better")
    if row.limit is not None:
        parts.append("smoke")
    return ", ".join(parts)
