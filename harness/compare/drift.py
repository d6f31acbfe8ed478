"""How the answers themselves changed: length, cut-offs, loops, empty answers, tokens per correct one.

Items of one question are a cluster in every interval. A failed request is no answer, see harness.compare.failures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from harness.compare.comparable import BASELINE, item_order, task_keys, task_scores
from harness.records.comparison import Estimate, OutputRow
from harness.records.record import ERROR, LENGTH, Record, TaskScore
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


class _Answers:
    """What one arm said, arrays [n] in the common order.

    there: the request did not fail. counted: somebody counted its tokens as well.
    """

    def __init__(self, score: TaskScore, order: Sequence[int]) -> None:
        outputs = score.outputs
        assert outputs is not None
        finish = np.array([outputs.finish[i] for i in order])
        self.there = finish != ERROR
        self.counted = self.there & np.array([outputs.tokens[i] is not None for i in order])
        self.tokens = np.array([float(outputs.tokens[i] or 0) for i in order])
        self.correct = np.array([score.items[i].score for i in order], dtype=np.float64)
        self.truncated = finish == LENGTH
        self.loops, self.empty = (np.array([column[i] for i in order]) for column in (outputs.loops, outputs.empty))


def _row(task: str, scores: Mapping[str, TaskScore]) -> OutputRow:
    order = item_order(task, scores)
    reference = next(iter(scores))
    cluster = cluster_index([scores[reference].items[i].cluster for i in order[reference]])
    said = {arm: _Answers(score, order[arm]) for arm, score in scores.items()}
    counted = {arm: a for arm, a in said.items() if a.counted.any()}

    def shares(of: str) -> dict[str, Estimate]:
        return {arm: _mean(getattr(a, of)[a.there].astype(np.float64), cluster[a.there]) for arm, a in said.items()}

    def length_ratio(a: _Answers) -> Estimate | None:
        both = a.counted & said[BASELINE].counted if BASELINE in said else np.zeros_like(a.counted)
        return _ratio(a.tokens[both], said[BASELINE].tokens[both], cluster[both]) if both.any() else None

    return OutputRow(
        benchmark=task,
        tokens={arm: _mean(a.tokens[a.counted], cluster[a.counted]) for arm, a in counted.items()},
        length_ratio={arm: length_ratio(a) for arm, a in counted.items() if arm != BASELINE},
        truncated=shares("truncated"),
        loops=shares("loops"),
        empty=shares("empty"),
        tokens_per_correct={
            arm: _inverse(_ratio(a.correct[a.counted], a.tokens[a.counted], cluster[a.counted])) for arm, a in counted.items()
        },
    )


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
