"""Checkpoints of one recipe, trained under several seeds, as one arm whose seeds are the outer clusters.

Every seed is compared on its own, with all arms and the same items. A number of the arm is the mean over seeds, its interval

    mean -+ sqrt(within^2 + between^2)     within   mean half-width of the seeds' own intervals: items, or sequences
                                           between  t(S - 1) * standard deviation over seeds / sqrt(S)

`within` does not shrink with the number of seeds, since all of them answered the same items: too wide rather than too narrow.
With two seeds Student's t is 12.7. Where several arms have seeds they are taken together seed by seed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtr

from harness.compare.comparable import flat, worst_of
from harness.records.comparison import BenchmarkRow, Comparison, Contrast, Estimate, TrainedSeed
from harness.records.record import AccuracyData, Outputs, Record, TaskScore, Training
from harness.statistics.intervals import Z, student_t
from harness.statistics.paired_tests import holm
from qad.artifact import canonical
from qad.errors import DataError

_COMPARED = ("accuracy", "fidelity", "scores")  # what has to be measured of every seed


def seeds_of(records: Sequence[Record]) -> dict[str, list[tuple[int, str]]]:
    """arm -> (seed, checkpoint) of its trainings, by seed; only of arms with several.

    Raises DataError where weights of one arm are of one seed, of recipes that differ in more than the seed, or not told to be
    of one recipe, and where a seed lacks a measurement that others have.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for arm in dict.fromkeys(record.arm for record in records):
        mine = [r for r in records if r.arm == arm and r.control is None]
        trained = {r.checkpoint: r.training for r in mine if r.training is not None}
        if len({r.checkpoint for r in mine}) < 2 or not trained:
            continue
        _require_seeds(arm, mine, trained)
        found[arm] = sorted((training.seed, weights) for weights, training in trained.items())
    numbers = {arm: [seed for seed, _ in seeds] for arm, seeds in found.items()}
    if len({tuple(seeds) for seeds in numbers.values()}) > 1:
        named = "; ".join(f"{arm} {', '.join(map(str, seeds))}" for arm, seeds in numbers.items())
        raise DataError(f"arms were trained under different seeds ({named}): give each arm the same ones")
    return found


def _require_seeds(arm: str, mine: list[Record], trained: dict[str, Training]) -> None:
    untold = next((r for r in mine if r.checkpoint not in trained), None)
    if untold is not None:
        raise DataError(
            f"the records of arm {arm} are of different weights, and those of {untold.checkpoint[:12]} do not tell what they "
            "were trained with: export and measure it again, or name the arms apart (NAME=PATH)"
        )
    (first, recipe), *others = ((weights, training.recipe) for weights, training in trained.items())
    for weights, other in others:
        both = [dict(flat("", one)) for one in (recipe, other)]
        values = {name: [one.get(name, "absent") for one in both] for name in sorted({*both[0], *both[1]})}
        unlike = [f"{name} ({a!r}, {b!r})" for name, (a, b) in values.items() if a != b]
        if unlike:
            raise DataError(
                f"arm {arm}: {first[:12]} and {weights[:12]} differ in more than the seed, in {'; '.join(unlike)}: name the "
                "arms apart (NAME=PATH)"
            )
    seeds = [training.seed for training in trained.values()]
    if len(set(seeds)) < len(seeds):
        raise DataError(f"arm {arm} has several weights of one seed ({', '.join(map(str, sorted(seeds)))}): give one of each")
    for kind in _COMPARED:
        have = {r.checkpoint for r in mine if r.kind == kind}
        lacking = [str(training.seed) for weights, training in trained.items() if have and weights not in have]
        if lacking:
            raise DataError(f"arm {arm}: seed {', '.join(lacking)} has no {kind} record: measure it as the others")


def compare_seeds(
    records: Sequence[Record], seeds: dict[str, list[tuple[int, str]]], compare: Callable[[list[Record]], Comparison]
) -> Comparison:
    """compare: what one seed is compared with."""
    count = len(next(iter(seeds.values())))
    each = []
    for place in range(count):
        chosen = {arm: numbers[place][1] for arm, numbers in seeds.items()}
        each.append(compare([r for r in records if r.arm not in chosen or r.checkpoint == chosen[r.arm]]))
    found = _together(each)
    trained = {
        arm: [TrainedSeed(seed, weights, _values(each[place], arm)) for place, (seed, weights) in enumerate(numbers)]
        for arm, numbers in seeds.items()
    }
    return dataclasses.replace(found, training_seeds=trained)


def _values(comparison: Comparison, arm: str) -> dict[str, float]:
    """What one seed shows by itself."""
    found = {f"recovery on {row.label}": recovery for row in comparison.benchmarks if (recovery := row.recovery.get(arm))}
    if arm in comparison.median_recovery:
        found = {"median recovery": comparison.median_recovery[arm], **found}
    if arm in comparison.fidelity:
        row = comparison.fidelity[arm]
        found |= {"KL divergence": row.kl, "top-1 agreement": row.top1, "perplexity": row.perplexity}
    return {name: estimate.value for name, estimate in found.items()}


# --- together ------------------------------------------------------------------------------------


def _together(each: list[Comparison]) -> Comparison:
    """Numbers that differ between seeds as means over them; what was measured of one seed only is that seed's."""
    first = each[0]
    if len({(tuple(r.label for r in c.benchmarks), len(c.contrasts), len(c.outputs)) for c in each}) > 1:
        raise DataError(
            "the seeds of an arm were not measured on the same benchmarks, or one has no valid score: measure them again"
        )
    benchmarks = [_row(list(rows)) for rows in zip(*(c.benchmarks for c in each), strict=True)]
    contrasts = [_contrast(list(found)) for found in zip(*(c.contrasts for c in each), strict=True)]
    found: dict[str, Any] = {name: dict(collections.ChainMap(*(getattr(c, name) for c in each))) for name in _OF_ONE}
    found |= {name: _fold([getattr(c, name) for c in each]) for name in _FOLDED}
    return dataclasses.replace(
        first,
        benchmarks=benchmarks,
        worst={arm: worst for arm in first.worst if (worst := worst_of(arm, benchmarks))},
        contrasts=_adjusted(contrasts, benchmarks),
        outputs=[_fold(list(rows)) for rows in zip(*(c.outputs for c in each), strict=True)],
        emulated=list(dict.fromkeys(arm for c in each for arm in c.emulated)),
        not_compared=list(dict.fromkeys(note for c in each for note in c.not_compared)),
        **found,
    )


_FOLDED = ("median_recovery", "fidelity", "kl_ratio", "kl_ratio_plain", "perplexity_gap_closed", "median_gain")
_OF_ONE = ("throughput_ratio", "memory_ratio", "failure_share", "serving_ratio", "noise_floor", "sources")


def _fold(values: list[Any]) -> Any:
    """One value from one a seed: estimates as above, numbers as means, what is equal as it is, what one lacks as None."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if any(value is None for value in values):
        return None
    if isinstance(first, Estimate):
        return _estimate(values)
    if isinstance(first, dict):
        return {key: _fold([v[key] for v in values]) for key in first if all(key in v for v in values)}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = {f.name: _fold([getattr(v, f.name) for v in values]) for f in dataclasses.fields(first)}
        return dataclasses.replace(first, **fields)
    return float(np.mean(values)) if isinstance(first, float) else first


def _estimate(values: list[Estimate]) -> Estimate:
    mean, first = float(np.mean([v.value for v in values])), values[0]
    note = ", ".join(part for part in (f"{len(values)} training seeds", first.note) if part)
    method = f"{first.method}; {len(values)} training seeds, Student's t"
    if any(v.low is None or v.high is None for v in values):
        return dataclasses.replace(first, value=mean, low=None, high=None, method="none", note=note)
    between = _between([v.value for v in values])
    below = math.hypot(float(np.mean([v.value - v.low for v in values if v.low is not None])), between)
    above = math.hypot(float(np.mean([v.high - v.value for v in values if v.high is not None])), between)
    return dataclasses.replace(first, value=mean, low=mean - below, high=mean + above, method=method, note=note)


def _between(values: Sequence[float]) -> float:
    """Half-width of the mean over seeds."""
    return student_t(len(values)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _row(rows: list[BenchmarkRow]) -> BenchmarkRow:
    """flips are those of all seeds together."""
    arms = rows[0].flips
    flips = {
        arm: arms[arm] if all(row.flips.get(arm) == arms[arm] for row in rows) else _sum([row.flips[arm] for row in rows])
        for arm in arms
    }
    return dataclasses.replace(
        rows[0],
        score=_fold([row.score for row in rows]),
        recovery=_fold([row.recovery for row in rows]),
        recovery_above_chance=_fold([row.recovery_above_chance for row in rows]),
        flips=flips,
    )


def _sum(pairs: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(worse for worse, _ in pairs), sum(better for _, better in pairs)


def _contrast(found: list[Contrast]) -> Contrast:
    """p from the difference's own interval: Student's t on (seeds - 1) degrees of freedom. The verdict is `_verdict`'s."""
    first = found[0]
    if all(one == first for one in found):
        return first
    difference = _estimate([one.difference for one in found])
    p, verdict = None, "undecided"
    if difference.low is not None and difference.high is not None and first.p is not None:
        values = [one.difference.value for one in found]
        side = difference.value - difference.low if difference.value > 0 else difference.high - difference.value
        within = math.sqrt(max(0.0, side**2 - _between(values) ** 2)) / Z
        error = math.hypot(within, float(np.std(values, ddof=1)) / math.sqrt(len(values)))
        p = 2 * float(stdtr(len(values) - 1, -abs(difference.value) / error)) if error > 0 else 1.0
    worse, better = _sum([(one.worse, one.better) for one in found])
    return dataclasses.replace(
        first,
        difference=difference,
        worse=worse,
        better=better,
        p=p,
        p_holm=None,
        test=f"t over {len(found)} training seeds",
        verdict=verdict,
        items_needed=None,
    )


def _adjusted(contrasts: list[Contrast], benchmarks: list[BenchmarkRow]) -> list[Contrast]:
    """Holm over each pair's headline benchmarks, and the verdict of contrasts over seeds."""
    rows = {row.label: row for row in benchmarks}
    done: dict[tuple[str, str, str], float | None] = {}
    for pair in dict.fromkeys((c.arm, c.against) for c in contrasts):
        mine = [c for c in contrasts if (c.arm, c.against) == pair]
        adjusted = holm([c.p if rows[c.benchmark].headline else None for c in mine])
        done |= {(c.arm, c.against, c.benchmark): p for c, p in zip(mine, adjusted, strict=True)}
    return [
        dataclasses.replace(
            c, p_holm=done[c.arm, c.against, c.benchmark], verdict=_verdict(c, rows[c.benchmark].score[c.against].value)
        )
        for c in contrasts
    ]


def _verdict(c: Contrast, score: float) -> str:
    """Over seeds a loss beyond the margin is excluded where the whole 95 % interval lies above it; other verdicts stay."""
    if "training seeds" not in c.test or c.difference.low is None or c.difference.high is None:
        return c.verdict
    lost = -c.margin * score
    return "non-inferior" if c.difference.low > lost else "inferior" if c.difference.high < lost else "undecided"


def merge_seeds(records: Sequence[Record]) -> list[Record]:
    """Accuracy records that differ in their seed alone become one, with a list of seeds among its settings.

    Items keep their order and their clusters, so that several answers to one question are no independent items. Arms measured
    under other lists of seeds then differ in a setting, and are not compared. Everything else is passed on as it is.
    """
    alike: dict[object, list[Record]] = {}
    for record in sorted(records, key=lambda r: str(r.settings.get("seed"))):
        seed, key = record.settings.get("seed"), _but_the_seed(record)
        if seed is None or any(other.settings["seed"] == seed for other in alike.get(key, [])):
            key = object()  # no other seed of anything
        alike.setdefault(key, []).append(record)
    return [_joined(group) if len(group) > 1 else group[0] for group in alike.values()]


def _but_the_seed(record: Record) -> object:
    """What records of accuracy share that differ in their seed alone; another record shares it with none."""
    if not isinstance(record.data, AccuracyData):
        return object()
    settings = {name: value for name, value in record.settings.items() if name != "seed"}
    tasks = [(task.task, task.filter, task.metric) for task in record.data.tasks]
    return canonical([record.arm, record.checkpoint, dataclasses.asdict(record.engine), record.model, settings, tasks])


def _joined(records: Sequence[Record]) -> Record:
    seeds = [record.settings["seed"] for record in records]
    scores = [record.data.tasks for record in records if isinstance(record.data, AccuracyData)]
    return dataclasses.replace(
        records[0],
        settings={**records[0].settings, "seed": [one for seed in seeds for one in (seed if isinstance(seed, list) else [seed])]},
        seconds=sum(record.seconds for record in records),
        data=AccuracyData([_task(tasks) for tasks in zip(*scores, strict=True)]),
    )


def _task(scores: Sequence[TaskScore]) -> TaskScore:
    outputs = [score.outputs for score in scores if score.outputs is not None]
    columns = [[value for one in outputs for value in getattr(one, field.name)] for field in dataclasses.fields(Outputs)]
    return dataclasses.replace(
        scores[0],
        items=[item for score in scores for item in score.items],
        outputs=Outputs(*columns) if len(outputs) == len(scores) else None,
    )
