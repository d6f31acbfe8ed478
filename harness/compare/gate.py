"""A comparison and a policy -> PASS, FAIL or INCONCLUSIVE, with one paragraph that says why.

A threshold is held against the whole interval, unrounded: it holds where the worse limit does, is missed where even the
better limit does, and is not decided between. What was not measured, or has no interval, decides nothing and is named.
One missed threshold fails; else one undecided leaves the verdict open.

Intervals are at 95 %. A policy of another confidence has them stretched about the value, each side by the ratio of normal
quantiles; so is the probability that a limit holds, which stands beside an open verdict: exact where the estimate is normal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

from harness.compare.policy import AtLeast, AtMost, Policy, Served, SpeedUp
from harness.records.comparison import BenchmarkRow, Comparison, Estimate, FidelityRow, standing
from harness.records.record import ARMS, arm_label
from harness.records.verdict import FAIL, INCONCLUSIVE, PASS, Check, Verdict
from qad.errors import DataError

BASELINE, PTQ, QAD = ARMS
_Z = NormalDist().inv_cdf(0.975)  # of the 95 % intervals that a comparison holds
Threshold = AtLeast | AtMost | SpeedUp | Served
Form = Callable[..., str]  # value, and the limit that it is to be told from -> text with unit


def judge(comparison: Comparison, policy: Policy, arm: str | None = None) -> Verdict:
    """arm: whose verdict it is; by default the one furthest along: qad, else ptq, else the last.

    Raises DataError where there is no such arm, or none besides bf16.
    """
    arms = [name for name in comparison.arms if name != BASELINE]
    chosen = arm or (QAD if QAD in arms else PTQ if PTQ in arms else arms[-1] if arms else "")
    if chosen not in arms:
        raise DataError(
            f"no measured arm {chosen!r} to judge against {BASELINE}: there is {', '.join(arms) or 'none'}"
            if chosen
            else "no arm besides bf16 was measured: there is nothing to judge"
        )
    at = at_confidence(comparison, policy.confidence)
    checks = {name: _checks(at, policy, name) for name in arms}
    outcomes = {name: _outcome(found) for name, found in checks.items()}
    decisive = _decisive(checks[chosen], outcomes[chosen])
    return Verdict(
        outcome=outcomes[chosen],
        policy=policy.name,
        about=policy.about,
        arm=chosen,
        checks=checks[chosen],
        others={name: outcome for name, outcome in outcomes.items() if name != chosen},
        paragraph=_paragraph(at, policy, chosen, checks[chosen], outcomes),
        reason=_reason(decisive),
        next_action=_next_action(comparison, chosen, decisive, outcomes),
    )


def at_confidence(comparison: Comparison, confidence: float) -> Comparison:
    """The comparison with its intervals at another confidence than 95 %."""
    if confidence == 0.95:
        return comparison
    stretch = NormalDist().inv_cdf((1 + confidence) / 2) / _Z

    def at(found: Any) -> Any:
        if isinstance(found, Estimate) and found.low is not None and found.high is not None:
            low, high = (found.value + stretch * (end - found.value) for end in (found.low, found.high))
            return dataclasses.replace(found, low=low, high=high)
        if isinstance(found, dict):
            return {name: at(value) for name, value in found.items()}
        if isinstance(found, list | tuple):
            return type(found)(at(value) for value in found)
        if isinstance(found, BenchmarkRow | FidelityRow):
            return dataclasses.replace(found, **{f.name: at(getattr(found, f.name)) for f in dataclasses.fields(found)})
        return found

    return dataclasses.replace(comparison, **{f.name: at(getattr(comparison, f.name)) for f in dataclasses.fields(comparison)})


def _decisive(checks: list[Check], outcome: str) -> Check:
    """The check that a verdict hangs on: of those with its outcome the one least likely to hold."""
    found = [check for check in checks if check.outcome == outcome]
    return min(found, key=lambda check: -1.0 if check.probability is None else check.probability)


def _reason(check: Check) -> str:
    if check.outcome == PASS:
        return f"every threshold holds; the nearest: {check.why}"
    chance = (
        ""
        if check.probability is None
        else f"; given these measurements it holds with a probability of {_chance(check.probability)}"
    )
    return check.why + (chance if check.outcome == INCONCLUSIVE else "")


def _chance(probability: float) -> str:
    return "under 1 %" if probability < 0.01 else "over 99 %" if probability > 0.99 else f"{100 * probability:.0f} %"


def _next_action(comparison: Comparison, arm: str, check: Check, outcomes: dict[str, str]) -> str:
    """One line for somebody who has to decide."""
    if check.outcome == PASS:
        enough = ", or PTQ, which passes without training" if arm == QAD and outcomes.get(PTQ) == PASS else ""
        return f"deploy {arm_label(arm)}{enough}"
    better = next((name for name, outcome in outcomes.items() if outcome == PASS), None)
    if better is not None:
        return f"deploy {arm_label(better)}, which passes"
    train = "train QAD" if arm == PTQ and QAD not in outcomes else "train longer, or on text nearer to what is served"
    if check.threshold in _NOT_TRAINED and check.outcome == FAIL:
        return _NOT_TRAINED[check.threshold]
    if check.outcome == FAIL:
        return f"{train}; or give sensitive modules another format (quantize.formats)"
    needed = [c.items_needed for c in comparison.contrasts if (c.arm, c.against) == (arm, BASELINE) and c.items_needed]
    if check.value is None:
        if "recovery" in check.rule and _unfit(comparison, arm):
            return f"measure benchmarks that {arm_label(BASELINE)} can answer"
        return f"measure it: {check.rule}"
    more = f"measure {max(needed):,} items a benchmark" if needed and "recovery" in check.rule else "measure more"
    return f"undecided: {more}, or {train}"


_NOT_TRAINED = {  # what to do where no training helps
    "memory_ratio": "quantize more of the model (quantize.include, quantize.formats)",
    "speed_up": "measure on the hardware and at the load that will serve it",
    "served": "measure on the hardware and at the load that will serve it",
    "failure_share": "read why requests failed, in the report",
}


def _outcome(checks: list[Check]) -> str:
    found = {check.outcome for check in checks}
    return FAIL if FAIL in found else INCONCLUSIVE if INCONCLUSIVE in found else PASS


def _checks(comparison: Comparison, policy: Policy, arm: str) -> list[Check]:
    of_several = {"median_recovery": _median, "worst_benchmark": _worst, "speed_up": _speed, "served": _served}
    return [
        of_several[name](comparison, arm, threshold)
        if name in of_several
        else _check(name, _OF_ONE[name].label, threshold, _OF_ONE[name].find(comparison, arm), _OF_ONE[name].form)
        for name, threshold in policy.thresholds.items()
    ]


# --- one threshold -------------------------------------------------------------------------------


def _median(comparison: Comparison, arm: str, threshold: Threshold) -> Check:
    check = _check("median_recovery", "median recovery", threshold, comparison.median_recovery.get(arm), _percent)
    if check.value is None and (unfit := _unfit(comparison, arm)):
        return dataclasses.replace(check, why=unfit)
    rows = [row for row in comparison.benchmarks if row.headline]
    doubts = _doubts(rows, arm) + [f"recovery on {label} was not measured" for label in _unscored(rows, arm)]
    return _undecided(check, doubts) if check.outcome == PASS and doubts else check


def _doubts(rows: Sequence[BenchmarkRow], arm: str) -> list[str]:
    return [f"recovery on {row.label}: {row.doubt[arm]}" for row in rows if arm in row.doubt]


def _unscored(rows: Sequence[BenchmarkRow], arm: str) -> list[str]:
    """Benchmarks that one of bf16 and the arm has a score on, and the other has none: lost, or never run."""
    return [row.label for row in rows if (arm in row.score) != (BASELINE in row.score)]


def _unfit(comparison: Comparison, arm: str) -> str:
    """Why an arm has scores and no recovery: bf16 is at chance, or not above 0. Empty where it has a recovery, or no scores."""
    rows = [row for row in comparison.benchmarks if arm in row.score and BASELINE in row.score]
    scored = [row.label for row in rows]
    if not scored or arm in comparison.median_recovery:
        return ""
    several = f" and {len(scored) - 1} more" if len(scored) > 1 else ""
    level = "clearly above chance" if any(row.score[BASELINE].value > 0 for row in rows) else "above 0"
    return f"{arm_label(BASELINE)} does not score {level} on {scored[0]}{several}, so there is no recovery"


def _undecided(check: Check, doubts: list[str]) -> Check:
    why = doubts[0] + f"; so for {len(doubts) - 1} more" * (len(doubts) > 1)
    return dataclasses.replace(check, outcome=INCONCLUSIVE, why=why, probability=None)


def _worst(comparison: Comparison, arm: str, threshold: Threshold) -> Check:
    """Of every benchmark: the lowest limit has to hold, so the lowest upper limit is what fails."""
    rows = comparison.benchmarks
    unscored = _unscored(rows, arm)
    found = [(row, recovery) for row in rows if (recovery := row.recovery.get(arm)) is not None]
    if not found:
        check = _check("worst_benchmark", "recovery of every benchmark", threshold, None, _percent)
        if doubts := _doubts(rows, arm):
            return _undecided(check, doubts)
        return dataclasses.replace(check, why=_unfit(comparison, arm) or check.why)
    checks = [_check("worst_benchmark", f"recovery on {row.label}", threshold, recovery, _percent) for row, recovery in found]
    for outcome in (FAIL, INCONCLUSIVE):
        bad = [(check, row) for check, (row, _) in zip(checks, found, strict=True) if check.outcome == outcome]
        if bad:
            check, row = min(bad, key=lambda entry: entry[0].value if entry[0].value is not None else math.inf)
            more = f"; so for {len(bad) - 1} other benchmark{'s' if len(bad) > 2 else ''}" if len(bad) > 1 else ""
            return dataclasses.replace(check, why=check.why + _would_decide(comparison, arm, row, outcome) + more)
    if doubts := _doubts(rows, arm):
        return _undecided(checks[0], doubts)
    if unscored:
        why = f"recovery on {unscored[0]} was not measured" + (f"; {len(unscored) - 1} more" * (len(unscored) > 1))
        return Check("worst_benchmark", checks[0].rule, INCONCLUSIVE, None, None, None, why)
    return min(checks, key=lambda check: check.value if check.value is not None else math.inf)


def _would_decide(comparison: Comparison, arm: str, row: BenchmarkRow, outcome: str) -> str:
    """How many items would tell, where too few are the reason."""
    needed = [
        c.items_needed
        for c in comparison.contrasts
        if (c.benchmark, c.arm, c.against) == (row.label, arm, BASELINE) and c.items_needed is not None
    ]
    if outcome != INCONCLUSIVE or not needed or needed[0] <= row.n:
        return ""
    margin = next(c.margin for c in comparison.contrasts)
    return f" from {row.n:,} items; {needed[0]:,} would tell a loss of {_percent(margin)}"


def _speed(comparison: Comparison, arm: str, threshold: Threshold) -> Check:
    assert isinstance(threshold, SpeedUp)
    name = f"{threshold.phase} speed relative to BF16"
    found = comparison.throughput_ratio.get(arm, {}).get(threshold.phase)
    check = _check("speed_up", name, threshold, found, _times)
    if found is not None and arm in comparison.emulated:
        return _undecided(check, [f"{name} was measured without FP4 arithmetic, which tells nothing of hardware that has it"])
    return check


def _served(comparison: Comparison, arm: str, threshold: Threshold) -> Check:
    """Of the loads that were asked of both servers the one that gained least."""
    assert isinstance(threshold, Served)
    cells = comparison.serving_ratio.get(arm, {})
    found = {name: ratios[threshold.metric] for name, ratios in cells.items() if threshold.metric in ratios}
    worst = min(found, key=lambda name: found[name].value, default="")
    what = f"served {threshold.metric} relative to BF16" + (f" at {worst}" if worst else "")
    return _check("served", what, threshold, found.get(worst), _times)


def _check(threshold_name: str, name: str, threshold: Threshold, found: Estimate | None, form: Form) -> Check:
    if isinstance(threshold, AtMost):
        limit, rule = threshold.at_most, f"{name} at most {form(threshold.at_most)}"
    else:
        limit, rule = threshold.at_least, f"{name} at least {form(threshold.at_least)}"
    if found is None:
        return Check(threshold_name, rule, INCONCLUSIVE, None, None, None, f"{name} was not measured")
    value, low, high = found.value, found.low, found.high
    if low is None or high is None:
        reason = found.note.removeprefix("inconclusive: ") or "no interval"
        why = f"{name} is {form(value, limit)} without an interval ({reason})"
        return Check(threshold_name, rule, INCONCLUSIVE, value, None, None, why)
    if isinstance(threshold, AtMost):
        outcome = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
    else:
        outcome = PASS if low >= limit else FAIL if high < limit else INCONCLUSIVE
    probability = _holds(found, limit, isinstance(threshold, AtMost))
    relation = {PASS: "within", FAIL: "outside", INCONCLUSIVE: "on both sides of"}[outcome]
    bound = "at most" if isinstance(threshold, AtMost) else "at least"
    why = f"{name} is {_with_interval(found, form, limit)}, {relation} the limit of {bound} {form(limit)}"
    return Check(threshold_name, rule, outcome, value, low, high, why, probability)


def _holds(found: Estimate, limit: float, at_most: bool) -> float:
    """Probability that a limit holds: normal, with the width of the interval on the limit's side."""
    assert found.low is not None
    assert found.high is not None
    error = (found.value - found.low if limit < found.value else found.high - found.value) / _Z
    if error <= 0:
        return float(found.value <= limit if at_most else found.value >= limit)
    below = NormalDist(found.value, error).cdf(limit)
    return below if at_most else 1 - below


# --- words ---------------------------------------------------------------------------------------


def _paragraph(comparison: Comparison, policy: Policy, arm: str, checks: list[Check], outcomes: dict[str, str]) -> str:
    outcome = outcomes[arm]
    named = "; ".join(dict.fromkeys(check.why for check in checks if check.outcome == outcome))
    asked = arm in comparison.median_recovery or any("recovery" in check.rule for check in checks)
    lead = _lead(comparison, arm) if asked else f"{arm_label(arm)} is judged without benchmarks"
    if outcome == PASS:
        text = f"{lead}: QAD is not needed." if arm == PTQ and asked else f"{lead}."
        text += f" Every threshold of {policy.name} holds."
    elif outcome == FAIL:
        text = f"{lead}. By {policy.name} it fails: {named}."
    else:
        text = f"{lead}. That does not decide {policy.name}: {named}."
    if arm == PTQ and outcome == FAIL and QAD not in outcomes:
        text += " Distillation (QAD) may give back what is missing."
    if arm == QAD and PTQ in outcomes:
        text += _against_ptq(comparison, outcomes[PTQ])
    return text


def _lead(comparison: Comparison, arm: str) -> str:
    median = comparison.median_recovery.get(arm)
    if median is None:
        kind = "tells anything" if _unfit(comparison, arm) else "was measured"
        return f"{arm_label(arm)} has no recovery that {kind}"
    label, worst = comparison.worst[arm]
    over = f", the worst of {median.n} benchmarks, {label}, {_with_interval(worst, _percent)}" if median.n > 1 else ""
    return f"{arm_label(arm)} recovers {_with_interval(median, _percent)} of BF16's score{over}"


def _against_ptq(comparison: Comparison, ptq_outcome: str) -> str:
    gain = comparison.median_gain
    text = ""
    if ptq_outcome == PASS and PTQ in comparison.median_recovery:
        recovered = _with_interval(comparison.median_recovery[PTQ], _percent)
        text = f" PTQ alone recovers {recovered} and passes too: QAD is not needed."
    elif ptq_outcome == PASS:
        text = " PTQ alone passes too: QAD is not needed."
    if gain is None:
        return text
    points = f"{100 * gain.value:+.1f} points"
    if gain.low is not None and gain.high is not None:
        points += f" ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    found = standing(gain, 0.0)
    if found == "stands out":
        worth = "it stands out" if gain.value > 0 else "it is worse than PTQ"
    else:
        worth = "within noise" if found == "within noise" else "inconclusive"
    return f"{text} Against PTQ the median moves by {points}: {worth}."


def _with_interval(estimate: Estimate, form: Form, limit: float | None = None) -> str:
    value = form(estimate.value, limit)
    if estimate.low is None or estimate.high is None:
        return f"{value} (no interval)"
    if estimate.low == estimate.high:
        return value
    low, high = (
        form(end, limit).removesuffix(" %").removesuffix(" nats").removesuffix(" times") for end in (estimate.low, estimate.high)
    )
    return f"{value} ({low}-{high})" if estimate.low >= 0 else f"{value} ({low} to {high})"


def _percent(share: float, limit: float | None = None) -> str:
    """One decimal; more where one would round the number onto a limit that it is not."""
    for digits in (1, 2, 3, 4):
        text = f"{100 * share:.{digits}f}"
        if limit is None or share == limit or text != f"{100 * limit:.{digits}f}":
            break
    return f"{text} %"


def _nats(value: float, limit: float | None = None) -> str:
    return f"{value:.3g} nats"


def _times(value: float, limit: float | None = None) -> str:
    return f"{value:.2f} times"


@dataclasses.dataclass(frozen=True)
class _Number:
    """A threshold on one number of an arm."""

    label: str
    form: Form
    find: Callable[[Comparison, str], Estimate | None]


_OF_ONE = {
    "kl": _Number("KL divergence to BF16", _nats, lambda c, arm: row.kl if (row := c.fidelity.get(arm)) else None),
    "top1": _Number("top-1 agreement with BF16", _percent, lambda c, arm: row.top1 if (row := c.fidelity.get(arm)) else None),
    "memory_ratio": _Number("size on disk relative to BF16", _percent, lambda c, arm: c.memory_ratio.get(arm)),
    "failure_share": _Number("share of failed requests", _percent, lambda c, arm: c.failure_share.get(arm)),
}
