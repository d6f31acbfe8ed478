"""How the answers themselves changed: length, cut-offs, loops, empty answers, tokens per correct one.

Items of one question are a cluster in every interval. A failed request is no answer, see harness.compare.failures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from harness.compare.comparable import BASELINE, item_order, task_keys, task_scores
from harness.records.comparison import Estimate, OutputRow
from harness.records.record import ERROR, LENGTH, Outputs, Record, TaskScore
from harness.statistics.intervals import Floats, Ints, cluster_index, mean_interval, renumbered
from harness.statistics.resampling import ratio_of_sums


def output_rows(arms: Mapping[str, Record]) -> list[OutputRow]:
    """One row a generated task, its first filter: all filters read the same answers."""
    rows, seen = [], set()
    for key in task_keys(arms):
        scores = {arm: s for arm, s in task_scores(arms, key).items() if s.outputs is not None}
        if scores and key[0] not in seen:
            seen.add(key[0])
            rows.append(_row(key[0], scores))
    return rows


def _row(task: str, scores: Mapping[str, TaskScore]) -> OutputRow:
    order = item_order(task, scores)
    reference = next(iter(scores))
    cluster = cluster_index([scores[reference].items[i].cluster for i in order[reference]])
    tokens: dict[str, Estimate] = {}
    per_correct: dict[str, Estimate | None] = {}
    for arm, score in scores.items():
        found, kept = _tokens(score, order[arm])
        if kept.any():
            tokens[arm] = _mean(found[kept], cluster[kept])
            correct = np.array([score.items[i].score for i in order[arm]], dtype=np.float64)
            per_correct[arm] = _inverse(_ratio(correct[kept], found[kept], cluster[kept]))
    ratio = {arm: _length_ratio(scores, order, arm, cluster) for arm in scores if arm != BASELINE and arm in tokens}

    def shares(of: str) -> dict[str, Estimate]:
        return {arm: _share(_outputs(scores[arm]), of, order[arm], cluster) for arm in scores}

    return OutputRow(
        benchmark=task,
        tokens=tokens,
        length_ratio=ratio,
        truncated=shares("truncated"),
        loops=shares("loops"),
        empty=shares("empty"),
        tokens_per_correct=per_correct,
    )


def _outputs(score: TaskScore) -> Outputs:
    assert score.outputs is not None
    return score.outputs


def _tokens(score: TaskScore, order: Sequence[int]) -> tuple[Floats, np.ndarray]:
    """Tokens [n] in the common order, and where there are any."""
    outputs = _outputs(score)
    counted = [(outputs.tokens[i], outputs.finish[i]) for i in order]
    kept = np.array([count is not None and finish != ERROR for count, finish in counted], dtype=bool)
    return np.array([float(count or 0) for count, _ in counted]), kept


def _length_ratio(scores: Mapping[str, TaskScore], order: Mapping[str, list[int]], arm: str, cluster: Ints) -> Estimate | None:
    if BASELINE not in scores:
        return None
    (top, ours), (bottom, theirs) = (_tokens(scores[name], order[name]) for name in (arm, BASELINE))
    both = ours & theirs
    return _ratio(top[both], bottom[both], cluster[both]) if both.any() else None


def _share(outputs: Outputs, of: str, order: Sequence[int], cluster: Ints) -> Estimate:
    values = {
        "truncated": lambda i: outputs.finish[i] == LENGTH,
        "loops": lambda i: outputs.loops[i],
        "empty": lambda i: outputs.empty[i],
    }[of]
    kept = np.array([outputs.finish[i] != ERROR for i in order], dtype=bool)
    found = np.array([float(values(i)) for i in order])
    return _mean(found[kept], cluster[kept])


def _mean(values: Floats, cluster: Ints) -> Estimate:
    if not len(values):
        return Estimate(float("nan"), None, None, 0, 0, "none", "every request failed")
    return mean_interval(values, renumbered(cluster))


def _ratio(top: Floats, bottom: Floats, cluster: Ints) -> Estimate | None:
    return ratio_of_sums(top, bottom, renumbered(cluster), log=False) if bottom.sum() > 0 else None


def _inverse(estimate: Estimate | None) -> Estimate | None:
    """1 / estimate. Score per token is what has an interval: a resample may hold no right answer, but never no token."""
    if estimate is None or not estimate.value > 0:
        return None
    if estimate.low is None or estimate.high is None or not estimate.low > 0:
        note = estimate.note or "inconclusive: too few right answers"
        return dataclasses.replace(estimate, value=1 / estimate.value, low=None, high=None, method="none", note=note)
    return dataclasses.replace(estimate, value=1 / estimate.value, low=1 / estimate.high, high=1 / estimate.low)
