"""Requests that failed while accuracy was measured: no answer, and so neither a right nor a wrong one.

What failed under one arm counts for none, and how many did stands beside the score. Arms that failed in other shares than the
baseline are not compared with it: which prompts fail (the long ones, the ones under load) decides what score is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from harness.compare.comparable import BASELINE, item_order
from harness.records.record import ERROR, SERVER, AccuracyData, Outputs, Record, TaskScore
from harness.serving.statistics import FAILURE_LIMIT


@dataclasses.dataclass(frozen=True)
class Answered:
    """scores: of the arms that may be compared, the items that all of them answered. alone: of each other arm, the items that it
    answered. refused: why it is not compared. failed: arm -> (failed, sent), where some failed."""

    scores: dict[str, TaskScore]
    alone: dict[str, TaskScore]
    refused: dict[str, str]
    failed: dict[str, tuple[int, int]]


def answered(task: str, scores: Mapping[str, TaskScore]) -> Answered:
    """Raises DataError as `item_order` does."""
    order = item_order(task, scores)
    lost = {arm: _lost(score) for arm, score in scores.items()}
    failed = {arm: (len(found), len(scores[arm].items)) for arm, found in lost.items() if found}
    if not failed:
        return Answered(dict(scores), {}, {}, {})
    reference = BASELINE if BASELINE in scores else next(iter(scores))
    refused = {arm: why for arm in scores if (why := _refusal(scores, lost, reference, arm))}
    kept = [arm for arm in scores if arm not in refused]
    places = zip(*(order[arm] for arm in kept), strict=True)
    good = [at for at in places if not any(i in lost[arm] for arm, i in zip(kept, at, strict=True))]
    if not good:
        refused |= dict.fromkeys(kept, "no item was answered under every arm")
        kept = []
    return Answered(
        {arm: _only(scores[arm], [at[number] for at in good]) for number, arm in enumerate(kept)},
        {arm: _only(scores[arm], [i for i in order[arm] if i not in lost[arm]]) for arm in refused},
        refused,
        failed,
    )


def failed_requests(arms: Mapping[str, Record]) -> dict[str, tuple[int, int]]:
    """arm -> (failed, sent) over the answers of every task's first filter; only where a server was asked."""
    counts = {}
    for arm, record in arms.items():
        assert isinstance(record.data, AccuracyData)
        first = {score.task: score for score in reversed(record.data.tasks) if score.outputs is not None}
        sent = sum(len(score.items) for score in first.values())
        if sent and record.engine.name == SERVER:
            counts[arm] = sum(len(_lost(score)) for score in first.values()), sent
    return counts


def _lost(score: TaskScore) -> set[int]:
    """Positions of the items whose request failed."""
    return {i for i, how in enumerate(score.outputs.finish) if how == ERROR} if score.outputs else set()


def _refusal(scores: Mapping[str, TaskScore], lost: Mapping[str, set[int]], reference: str, arm: str) -> str:
    (ours, sent), (theirs, base) = ((len(lost[name]), len(scores[name].items)) for name in (arm, reference))
    if ours == sent:
        return f"every request failed under {arm}"
    if arm == reference or abs(ours / sent - theirs / base) <= FAILURE_LIMIT:
        return ""
    return f"{ours} of {sent} requests failed under {arm}, {theirs} of {base} under {reference}: measure both again"


def _only(score: TaskScore, places: list[int]) -> TaskScore:
    outputs = score.outputs
    if outputs is not None:
        columns = (getattr(outputs, field.name) for field in dataclasses.fields(Outputs))
        outputs = Outputs(*([column[i] for i in places] for column in columns))
    return dataclasses.replace(score, items=[score.items[i] for i in places], outputs=outputs)
