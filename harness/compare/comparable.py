"""Which records may stand side by side: everything but the weights must be equal, else a difference of protocol
would be read as a loss of accuracy. Every difference is named, not only the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from harness.records.comparison import BenchmarkRow, Estimate
from harness.records.record import ARMS, AccuracyData, FidelityData, PublishedScore, Record, ScoresData, TaskScore, arm_order
from harness.statistics.intervals import Floats, Ints, cluster_index
from qad.errors import DataError

BASELINE = ARMS[0]
PLAUSIBLE = 2.0  # recovery above which a bounded score is a mistake of units, settings or names before it is a success
TaskKey = tuple[str, str, str]  # task, filter, metric


def by_kind(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """kind -> arm -> record, arms in the order bf16, ptq, qat, qad, then by name.

    Raises DataError where an arm has two records of one kind, or records of different weights.
    """
    found: dict[str, dict[str, Record]] = {}
    weights: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: arm_order(r.arm)):
        kind = found.setdefault(record.kind, {})
        if record.arm in kind:
            runs = "; runs of one server are imported from one file, a JSON object a line" * (record.kind == "serving")
            raise DataError(f"two {record.kind} records of arm {record.arm}: give one of them another arm name{runs}")
        kind[record.arm] = record
        first = weights.setdefault(record.arm, record)
        if first.checkpoint != record.checkpoint:
            raise DataError(
                f"the records of arm {record.arm} are of different weights ({first.kind} of {first.checkpoint[:12]}, "
                f"{record.kind} of {record.checkpoint[:12]}): measure that arm again"
            )
    return found


def require_comparable(kind: str, arms: Mapping[str, Record]) -> None:
    """Raises DataError naming every setting in which an arm's record differs from the first arm's."""
    differences = []
    reference, *others = arms
    for arm in others:
        for name, a, b in _differences(_settings(arms[reference]), _settings(arms[arm])):
            differences.append(f"{name} ({reference} {_short(a)}, {arm} {_short(b)})")
    if differences:
        raise DataError(
            f"{kind} records are not comparable, they differ in {'; '.join(differences)}: "
            "measure the arms again under equal settings"
        )


Facts = dict[tuple[str, str], Any]  # (task, or "" for the whole record; setting) -> value


def _settings(record: Record) -> Facts:
    """Everything that has to be equal, under the names the user knows it by. Not the model's name: an arm measured by hand has
    its folder's, and what was asked is compared item by item."""
    engine = record.engine
    facts: Facts = {("", name): value for name, value in flat("", record.settings)}
    facts["", "engine"] = f"{engine.name} {engine.version}"
    facts["", "engine dtype"] = engine.dtype
    if isinstance(record.data, FidelityData):
        facts["", "text"] = record.data.data
    if isinstance(record.data, AccuracyData):
        for score in record.data.tasks:
            facts.setdefault((score.task, "filters"), []).append(score.filter)
            for name in ("version", "metric", "n_shot", "higher_is_better", "limit"):
                facts[score.task, f"{name} under filter {score.filter}"] = getattr(score, name)
            for name, value in flat("", score.protocol):
                facts[score.task, f"{name} under filter {score.filter}"] = value
    if isinstance(record.data, ScoresData):
        for printed in record.data.scores:
            for name in ("metric", "higher_is_better", "maximum", "chance", "items", "repeats"):
                facts[printed.task, f"{name} under filter {printed.filter}"] = getattr(printed, name)
            for name, value in flat("", printed.settings):
                facts[printed.task, f"{name} under filter {printed.filter}"] = value
    return facts


def flat(prefix: str, value: object) -> Iterator[tuple[str, Any]]:
    """Nested settings, one by one: (a.b.c, value), by name."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from flat(f"{prefix}.{key}" if prefix else str(key), value[key])
    else:
        yield prefix, value


def _differences(a: Facts, b: Facts) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) of what differs. A task that only one of them ran is no difference but n/a for
    the other; a filter that only one of them has is named by the task's list of filters alone."""
    for task, name in {**a, **b}:
        key = (task, name)
        if task and not (key in a and key in b):
            continue
        x, y = a.get(key, "absent"), b.get(key, "absent")
        if x != y:
            yield f"{task}: {name}" if task else name, x, y


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "..."


# --- items ---------------------------------------------------------------------------------------


def task_keys(arms: Mapping[str, Record]) -> list[TaskKey]:
    """Every (task, filter, metric) of any arm, in the order in which they first appear."""
    keys: dict[TaskKey, None] = {}
    for record in arms.values():
        assert isinstance(record.data, AccuracyData)
        for score in record.data.tasks:
            keys.setdefault(_key(score))
    return list(keys)


def task_scores(arms: Mapping[str, Record], key: TaskKey) -> dict[str, TaskScore]:
    """arm -> that task's scores, for the arms that have it."""
    found = {}
    for arm, record in arms.items():
        assert isinstance(record.data, AccuracyData)
        matching = [score for score in record.data.tasks if _key(score) == key]
        if len(matching) > 1:
            raise DataError(f"{key[0]} (filter {key[1]}, {key[2]}) appears {len(matching)} times in the record of {arm}")
        if matching and matching[0].items:
            found[arm] = matching[0]
    return found


def _key(score: TaskScore) -> TaskKey:
    return score.task, score.filter, score.metric


def with_recovery(
    label: str,
    arms: Iterable[str],
    means: Mapping[str, float],
    low: float | None,
    score: TaskScore | PublishedScore,
    notes: list[str],
) -> Iterator[tuple[str, str, str]]:
    """(arm, of its ratio the upper, the lower) of every arm but bf16 that has a recovery; of the others a note says why not.

    means: of the arms whose score is a number. low: the lower limit of bf16's score. score: anybody's, for what a task is.
    """
    for arm in (arm for arm in arms if arm != BASELINE):
        top, bottom = (arm, BASELINE) if score.higher_is_better else (BASELINE, arm)
        absent = next((name for name in (BASELINE, arm) if name not in means), None)
        if absent:
            notes.append(f"{label}: recovery of {arm} is n/a, {absent} has no valid score")
        elif not means[bottom] > 0:
            notes.append(f"{label}: recovery of {arm} is n/a, {bottom} scores {means[bottom]:.3g}")
        elif score.higher_is_better and score.chance is not None and (low is None or low <= score.chance):
            notes.append(f"{label}: recovery of {arm} is not scored, {BASELINE} is not clearly above chance")
        else:
            yield arm, top, bottom


def doubtful(recovery: Estimate | None) -> str:
    """Why a recovery of a score with a largest value decides nothing; "" where it may."""
    if recovery is None or recovery.value <= PLAUSIBLE:
        return ""
    return f"{recovery.value:.0%} is above {PLAUSIBLE:.0%}, which is not plausible: look at units, settings and names"


def worst_of(arm: str, rows: Iterable[BenchmarkRow]) -> tuple[str, Estimate] | None:
    """Label and recovery of the row on which an arm has its lowest."""
    found = [(row.label, recovery) for row in rows if (recovery := row.recovery.get(arm))]
    return min(found, key=lambda row: row[1].value, default=None)


def paired(task: str, scores: Mapping[str, TaskScore]) -> tuple[dict[str, Floats], Ints]:
    """Scores of the same items in the same order -> arm -> float64 [n], and the items' clusters, int64 [n].

    Raises DataError as `item_order` does.
    """
    order = item_order(task, scores)
    values = {arm: np.array([score.items[i].score for i in order[arm]], dtype=np.float64) for arm, score in scores.items()}
    return values, cluster_index([item.cluster for item in next(iter(scores.values())).items] if scores else [])


def item_order(task: str, scores: Mapping[str, TaskScore]) -> dict[str, list[int]]:
    """arm -> positions of its items, so that all arms go through the same items in the order of the first.

    Raises DataError, with counts, where the arms saw other documents, other prompts or other targets.
    """
    if not scores:
        return {}
    reference, *others = scores
    index = {arm: _index(score) for arm, score in scores.items()}
    for arm in others:
        _require_same_items(task, reference, arm, index)
    return {arm: [entries[key] for key in index[reference]] for arm, entries in index.items()}


ItemKey = tuple[str, str, int]


def _index(score: TaskScore) -> dict[ItemKey, int]:
    """(doc_hash, prompt_hash, how often it was seen before) -> position."""
    seen: dict[tuple[str, str], int] = {}
    index = {}
    for position, item in enumerate(score.items):
        key = (item.doc_hash, item.prompt_hash)
        index[*key, seen.get(key, 0)] = position
        seen[key] = seen.get(key, 0) + 1
    return index


def _require_same_items(task: str, a: str, b: str, index: Mapping[str, dict[ItemKey, int]]) -> None:
    unpaired = set(index[a]) ^ set(index[b])
    if not unpaired:
        return
    docs = {arm: {key[0] for key in entries} for arm, entries in index.items()}
    other = len(docs[a] ^ docs[b])
    what = (
        f"{other} documents are in only one of them"
        if other
        else f"prompts differ for {len({key[0] for key in unpaired})} of {len(docs[a])} documents "
        "(few-shot examples, chat template or tokenizer)"
    )
    raise DataError(f"{task}: {a} and {b} did not answer the same questions, {what}: measure both again")


def require_same_targets(task: str, scores: Mapping[str, TaskScore]) -> None:
    """Raises DataError where the right answer of an item differs between arms."""
    reference, *others = scores
    index = {arm: _index(score) for arm, score in scores.items()}
    for arm in others:
        differing = sum(
            scores[reference].items[position].target_hash != scores[arm].items[index[arm][key]].target_hash
            for key, position in index[reference].items()
        )
        if differing:
            raise DataError(
                f"{task}: targets of {differing} of {len(index[reference])} items differ between {reference} and {arm}: "
                "the task's data changed, measure both again"
            )
