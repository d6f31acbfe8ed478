"""Imported mean scores (a leaderboard, a paper, a CSV) -> rows of a comparison: unpaired, and only as sure as what was
printed beside them.

The error of one printed score, in this order:
- the standard error that was printed. It is over questions, and both arms answered the same ones, so the interval of a
  ratio from two of them is too wide, never too short;
- from the number of questions and of answers per question: what another run of the same model on the same questions
  would move. An answer's variance is p (1 - p); WITHIN of it is taken to lie between answers to one question, which
  is the part that a rerun changes. At p = .8 that lets 16 % of the answers flip between two runs of equal models;
- else none: the recovery has no interval and decides nothing.
An error of exactly 0 is a missing one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from harness.compare.comparable import BASELINE, doubtful, with_recovery
from harness.compare.contrasts import PairedScores
from harness.records.comparison import BenchmarkRow, Estimate
from harness.records.record import PublishedScore, Record, ScoresData
from harness.statistics.intervals import Floats, Z
from harness.statistics.resampling import RESAMPLES, SEED
from qad.untrusted import count

WITHIN = 0.5
NO_ITEMS = np.zeros(0, dtype=np.int64)


def sources(arms: Mapping[str, Record]) -> dict[str, str]:
    """arm -> where its scores come from."""
    return {arm: record.data.source for arm, record in arms.items() if isinstance(record.data, ScoresData)}


def published_rows(arms: Mapping[str, Record], stream: int, notes: list[str]) -> list[PairedScores]:
    """One row a benchmark, in the order in which they first appear. stream: number of the first one."""
    tasks: dict[tuple[str, str, str], dict[str, PublishedScore]] = {}
    for arm, record in arms.items():
        assert isinstance(record.data, ScoresData)
        for score in record.data.scores:
            tasks.setdefault((score.task, score.filter, score.metric), {})[arm] = score
    rows: list[PairedScores] = []
    shown: set[str] = set()
    for number, ((task, _, _), scores) in enumerate(tasks.items()):
        missing = [arm for arm in arms if arm not in scores]
        notes += [f"{task} (imported): no score of {arm}" for arm in missing]
        rows.append(_row(scores, stream + number, task not in shown, notes))
        shown.add(task)
    return rows


def standard_error(score: PublishedScore) -> float | None:
    """In the score's unit, above 0; None where nothing printed tells it. An error printed as 0 is none: no measurement has it."""
    if score.stderr:
        return score.stderr
    if not score.items or not 0 <= score.value <= score.maximum:
        return None
    share = score.value / score.maximum
    if share in (0, 1):  # none or all of n were right: of 1 more, half
        share = (share * score.items + 0.5) / (score.items + 1)
    return score.maximum * math.sqrt(WITHIN * share * (1 - share) / (score.items * (score.repeats or 1)))


def _row(scores: Mapping[str, PublishedScore], stream: int, headline: bool, notes: list[str]) -> PairedScores:
    first = next(iter(scores.values()))
    usable = {arm: score for arm, score in scores.items() if math.isfinite(score.value)}
    notes += [f"{first.task} (imported): the score of {arm} is not a number" for arm in scores if arm not in usable]
    notes += [
        f"{first.task} (imported): the standard error of {arm} is printed as 0, which is taken as not printed"
        for arm, score in scores.items()
        if score.stderr == 0
    ]
    others, label = [arm for arm in scores if arm != BASELINE], f"{first.task} (imported)"
    recovery: dict[str, Estimate | None] = dict.fromkeys(others)
    above = dict(recovery)
    deviations: dict[str, Floats | None] = dict.fromkeys(others)
    doubt: dict[str, str] = {}
    means, base = {arm: score.value for arm, score in usable.items()}, usable.get(BASELINE)
    low = None if base is None else base.value - Z * (standard_error(base) or 0.0)
    for arm, top, bottom in with_recovery(label, others, means, low, first, notes):
        pair = usable[top], usable[bottom]
        recovery[arm] = _recovery(*pair, 0.0)
        deviations[arm] = _deviations(*pair, first.higher_is_better, stream, others.index(arm))
        if first.chance is not None and first.higher_is_better:
            above[arm] = _recovery(*pair, first.chance)
        if first.higher_is_better and (why := doubtful(recovery[arm])):
            doubt[arm] = why
            notes.append(f"{label}: recovery of {arm}, {why}")
    settings = first.settings
    row = BenchmarkRow(
        task=first.task,
        metric=first.metric,
        filter=first.filter,
        n_shot=count(settings.get("n_shot")),
        higher_is_better=first.higher_is_better,
        chance=None if first.chance is None else first.chance / first.maximum,
        n=first.items or 0,
        clusters=first.items or 0,
        score={arm: _score(score) for arm, score in usable.items()},
        recovery=recovery,
        recovery_above_chance=above,
        flips={},
        limit=count(settings.get("limit")),
        headline=headline,
        imported=True,
        doubt=doubt,
    )
    return PairedScores(row, {}, NO_ITEMS, deviations)


def _score(score: PublishedScore) -> Estimate:
    """As a share of the maximum."""
    error = standard_error(score)
    value, n = score.value / score.maximum, score.items or 0
    if error is None:
        return Estimate(value, None, None, n, n, "none", "imported, no error printed")
    half = Z * error / score.maximum
    return Estimate(value, value - half, value + half, n, n, _method(score), "imported")


def _method(score: PublishedScore) -> str:
    return "printed standard error" if score.stderr else "noise of a rerun, from questions and repeats"


def _recovery(top: PublishedScore, bottom: PublishedScore, chance: float) -> Estimate:
    a, b = top.value - chance, bottom.value - chance
    errors = standard_error(top), standard_error(bottom)
    value, n = a / b, min(top.items or 0, bottom.items or 0)
    if errors[0] is None or errors[1] is None:
        return Estimate(value, None, None, n, n, "none", "inconclusive: imported without items or errors")
    half = Z * math.hypot(errors[0] / b, a * errors[1] / b**2)
    return Estimate(value, value - half, value + half, n, n, f"unpaired, {_method(top)}", "imported")


def _deviations(top: PublishedScore, bottom: PublishedScore, higher_is_better: bool, stream: int, arm: int) -> Floats | None:
    """Drawn ratio minus the printed one [RESAMPLES]. Every arm of a benchmark shares the draws of bf16."""
    errors = standard_error(top), standard_error(bottom)
    if errors[0] is None or errors[1] is None:
        return None
    base = np.random.default_rng([SEED, stream]).standard_normal(RESAMPLES)
    own = np.random.default_rng([SEED, stream, 1 + arm]).standard_normal(RESAMPLES)
    up, down = (own, base) if higher_is_better else (base, own)
    drawn = (top.value + errors[0] * up) / np.maximum(bottom.value + errors[1] * down, 0.05 * bottom.value)
    return np.asarray(drawn - top.value / bottom.value, dtype=np.float64)
