"""Serving records of the arms -> speed as ratios to bf16, cell by cell, from interleaved repeats.

tokens_per_s is candidate / bf16 (above 1 is faster), ttft_ms and tpot_ms are bf16 / candidate, so that above 1 is better
in all of them. A repeat gives one value (throughput of its window, median over its requests), paired with bf16's same repeat.
"""

from __future__ import annotations

from harness.compare.comparable import BASELINE
from harness.compare.speed import beside_baseline, differing_settings, mean_ratio
from harness.records.comparison import Estimate
from harness.records.record import Record
from harness.records.serving import Cell, ServingData
from harness.serving.pareto import cells_of
from harness.serving.statistics import LENGTH_TOLERANCE, CellSummary, summarize

METRICS = ("tokens_per_s", "ttft_ms", "tpot_ms")
Ratios = dict[str, dict[str, dict[str, Estimate]]]  # arm -> cell -> metric


def compare_serving(arms: dict[str, Record], notes: list[str]) -> Ratios:
    """Ratios of the cells that may be compared; every other one is named in `notes` with the reason."""
    ratios: Ratios = {}
    for arm, bf16, record in beside_baseline("serving", "serving speed", arms, _obstacle, notes):
        base, own = cells_of(bf16), cells_of(record)
        ratios[arm] = {}
        notes += _unshared(arm, [n for n in base if n not in own], [n for n in own if n not in base])
        for name, cell in own.items():
            if name not in base:
                continue
            refusal = _refusal(arm, cell, summarize(base[name]), summarize(cell))
            if refusal:
                notes.append(f"serving speed of {arm}, {name}: refused, {refusal}")
                continue
            ratios[arm][name] = _ratios(summarize(cell), summarize(base[name]))
    return ratios


def _unshared(arm: str, base: list[str], own: list[str]) -> list[str]:
    """What only one of the two was asked for: no ratio crosses loads or lengths."""
    if base and own:
        return [
            f"serving speed of {arm}: refused between other loads or lengths, {BASELINE} was asked {'; '.join(base)}, {arm} "
            f"{'; '.join(own)}"
        ]
    return [f"serving: {name} was measured in only one of {BASELINE} and {arm}" for name in base or own]


def _obstacle(base: Record, record: Record) -> str:
    assert isinstance(base.data, ServingData)
    assert isinstance(record.data, ServingData)
    differing = [
        f"{what} ({a or 'unknown'}, {b or 'unknown'})"
        for what, a, b in (
            ("device", base.engine.device, record.engine.device),
            ("engine", base.engine.name, record.engine.name),
            ("load tool", base.data.driver, record.data.driver),
            ("endpoint", base.data.endpoint, record.data.endpoint),
        )
        if a != b
    ]
    differing += differing_settings(base, record)
    return f"they differ in {', '.join(differing)}" if differing else ""


def _refusal(arm: str, cell: Cell, base: CellSummary, own: CellSummary) -> str:
    if cell.concurrency is None and cell.arrival is None:
        return "neither file says what load it is of: import both again, with --concurrency"
    for name, summary in ((BASELINE, base), (arm, own)):
        if summary.invalid:
            return f"{name} is invalid: {summary.invalid}"
    prompts, answers = (base.input_tokens, own.input_tokens), (base.output_tokens, own.output_tokens)
    if base.input_range != own.input_range and _all_alike(base) and _all_alike(own):
        return f"prompts differ in length: {_lengths(arm, *prompts)}, as the server counted them"
    for what, (theirs, mine) in (("prompts", prompts), ("answers", answers)):
        if theirs is not None and mine is not None and abs(mine - theirs) > LENGTH_TOLERANCE * theirs:
            return f"{what} differ in length by more than {LENGTH_TOLERANCE:.0%}: {_lengths(arm, theirs, mine)}"
    return ""


def _all_alike(summary: CellSummary) -> bool:
    """Whether every prompt was of one length; if so, another arm's has to be that one."""
    return summary.input_range is not None and len(set(summary.input_range)) == 1


def _lengths(arm: str, base: float | None, own: float | None) -> str:
    return f"{base or 0:.1f} tokens under {BASELINE}, {own or 0:.1f} under {arm}"


def _ratios(own: CellSummary, base: CellSummary) -> dict[str, Estimate]:
    """Over the repeats that both have."""
    found = {}
    for metric in METRICS:
        top, bottom = (own, base) if metric == "tokens_per_s" else (base, own)
        pairs = zip(getattr(top, metric), getattr(bottom, metric), strict=False)
        if estimate := mean_ratio([(t, b) for t, b in pairs if t and b and t > 0 and b > 0]):
            found[metric] = estimate
    return found
