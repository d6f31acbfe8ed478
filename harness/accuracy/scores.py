"""Accuracy through lm-eval: a suite of tasks, item by item, sample by sample.

lm-eval's own `evaluate` scores. One pass asks every item once; k samples an item are k passes under k seeds, so that avg@k is the
mean over samples and every sample is an item of its own, of its question's cluster.

Which score. One metric a task, the first in the task's own list that is a plain number per item and is averaged
(`acc` for multiple choice): two metrics of the same answers (acc, acc_norm) would count the task twice in a median
over benchmarks. Every filter of a task is a TaskScore of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval

from harness.accuracy.journal import Answer, Journal
from harness.accuracy.protocol import protocol, require_room
from harness.accuracy.quiet import quiet
from harness.accuracy.resumed import Asking
from harness.accuracy.samples import Sample
from harness.accuracy.suite import Suite
from harness.accuracy.task_files import SHIPPED, Places, ReadyTask, load_tasks
from harness.records.record import AccuracyData, Item, Outputs, TaskScore
from qad.errors import DataError

__all__ = ["SHIPPED", "Measured", "measure_suite"]

_GUESSABLE = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")


@dataclasses.dataclass(frozen=True)
class Measured:
    """data: for the record. samples: every answer, for the file beside it, in the order of the record's items."""

    data: AccuracyData
    samples: list[Sample]


def measure_suite(
    backend: Any,
    suite: Suite,
    places: Places,
    *,
    seed: int = 0,
    journal: Journal | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Measured:
    """Score a back-end (harness.accuracy.in_memory, harness.accuracy.served) on a suite.

    seed: chooses few-shot examples, and is added to the seed of every sample. journal: where answers are kept until the record
    is written; those that are in it are not asked again.

    Raises DataError for an unknown task, one whose data cannot be read, one without a score per item, one that leaves no
    room for its prompts, or prompts that begin with two BOS tokens.
    """
    with quiet(), tempfile.TemporaryDirectory(prefix="qad-tasks-") as cache:
        asking = Asking(backend, journal or Journal(None, {}), suite.think_end, progress)
        ready = load_tasks(suite.tasks, places, Path(cache))
        for task in ready:
            require_room(task.name, task.task, backend)
        parts: dict[str, list[_Pass]] = {task.name: [] for task in ready}
        for number in range(max(task.repeats for task in ready)):
            for entry_seed, limit, group in _groups(ready, number):
                asking.seed = seed + entry_seed + number
                samples = _evaluate(asking, group, suite, limit, seed)
                for task in group:
                    parts[task.name].append(_Pass(task, number, asking, samples[task.name], suite))
        measured = _assembled(suite, ready, parts)
        data = dataclasses.replace(measured.data, failures=dict(asking.failures) or None)
        return dataclasses.replace(measured, data=data)


def _groups(ready: list[ReadyTask], number: int) -> list[tuple[int, int | None, list[ReadyTask]]]:
    """The tasks that take part in pass `number`, those of equal seed and limit together."""
    groups: dict[tuple[int, int | None], list[ReadyTask]] = {}
    for task in ready:
        if number < task.repeats:
            groups.setdefault((task.entry.seed, task.entry.limit), []).append(task)
    return [(seed, limit, group) for (seed, limit), group in groups.items()]


def _evaluate(
    asking: Asking, group: list[ReadyTask], suite: Suite, limit: int | None, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """One pass of lm-eval: task -> its samples under every filter."""
    for task in group:
        task.task.set_fewshot_seed(seed=seed)  # its generator moves on with use: every pass has the same examples
    # `simple_evaluate` would do the same after running `pip list` and asking the hub for this model.
    results = lm_eval.evaluate(
        lm=asking.lm,
        task_dict={"tasks": {task.name: task.task for task in group}},
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=suite.chat_template,
    )
    samples: dict[str, list[dict[str, Any]]] = results["samples"]
    return samples


# --- scores --------------------------------------------------------------------------------------


class _Pass:
    """One sample of every item of a task: items and samples by filter, in lm-eval's order."""

    def __init__(self, ready: ReadyTask, number: int, asking: Asking, samples: list[dict[str, Any]], suite: Suite) -> None:
        self.raw, self.metric = samples, _primary_metric(ready.name, ready.task, samples[0])
        self.rows: dict[str, list[Sample]] = {}
        generated = ready.task.OUTPUT_TYPE == "generate_until"
        asked = {instance.doc_id: instance.args for instance in ready.task.instances}
        for sample in samples:
            arguments = asked[sample["doc_id"]]
            answer = asking.answer(arguments) if generated else None
            row = _row(ready.name, sample, self.metric, answer, number, asking.seed, arguments[0])
            self.rows.setdefault(sample["filter"], []).append(row)
        self.facts = protocol(ready.name, ready.task, asking.lm, samples, suite.think_end)
        if suite.chat_template:
            template = getattr(getattr(asking.lm, "tokenizer", None), "chat_template", None) or "the server's"
            self.facts["chat_template"] = hashlib.sha256(str(template).encode()).hexdigest()[:16]
        if ready.repeats > 1:
            self.facts["samples_per_item"] = ready.repeats


def _row(name: str, sample: dict[str, Any], metric: str, answer: Answer | None, number: int, seed: int, prompt: Any) -> Sample:
    response = sample["filtered_resps"][0]
    return Sample(
        task=name,
        filter=sample["filter"],
        doc_hash=sample["doc_hash"],
        prompt_hash=sample["prompt_hash"],
        target_hash=sample["target_hash"],
        cluster=str(sample["doc"].get("cluster") or sample["doc_hash"]),
        repeat=number,
        seed=seed,
        score=float(sample[metric]),
        metric=metric,
        tokens=answer.tokens if answer else None,
        thinking_tokens=answer.thinking_tokens if answer else None,
        finish=answer.finish if answer else "",
        loops=bool(answer and answer.loops),
        empty=bool(answer) and not str(sample["resps"][0][0]).strip(),
        prompt=str(getattr(prompt, "prompt", prompt)),
        target=str(sample["target"]),
        text=answer.text if answer else _choice(sample),
        scored=str(response) if answer else "",
    )


def _choice(sample: dict[str, Any]) -> str:
    """The continuation with the highest log-likelihood, of a task that compares some; else ""."""
    values = [response[0] for response in sample["filtered_resps"] if isinstance(response, (list, tuple))]
    if len(values) < 2 or len(values) != len(sample["arguments"]):
        return ""
    return str(sample["arguments"][values.index(max(values))][-1])


def _assembled(suite: Suite, ready: list[ReadyTask], parts: dict[str, list[_Pass]]) -> Measured:
    """TaskScores in the order of the suite, every filter one; a group that counts as one is one."""
    scores: list[TaskScore] = []
    samples: list[Sample] = []
    for entry in suite.tasks:
        tasks = [task for task in ready if task.entry is entry]
        for group in [tasks] if entry.as_one else [[task] for task in tasks]:
            name = entry.task if entry.as_one else group[0].name
            for score, rows in _scores(name, group, parts):
                scores.append(score)
                samples += rows
    return Measured(AccuracyData(scores), samples)


def _scores(name: str, group: list[ReadyTask], parts: dict[str, list[_Pass]]) -> list[tuple[TaskScore, list[Sample]]]:
    """One TaskScore a filter, in the order lm-eval applied them, and its samples."""
    first, lead = group[0], parts[group[0].name][0]
    found = []
    for key in lead.rows:
        rows = [dataclasses.replace(row, task=name) for t in group for part in parts[t.name] for row in part.rows[key]]
        raw = [s for t in group for s in parts[t.name][0].raw if s["filter"] == key]
        score = TaskScore(
            task=name,
            version=str(first.task.VERSION),
            metric=lead.metric,
            filter=key,
            n_shot=int(first.task.get_config("num_fewshot") or 0),
            higher_is_better=bool(first.task.higher_is_better().get(lead.metric, True)),
            chance=_chance(first.task, lead.metric, raw),
            limit=first.entry.limit,
            items=[Item(r.doc_hash, r.prompt_hash, r.target_hash, r.cluster, r.score) for r in rows],
            protocol=lead.facts,
            outputs=_outputs(first.task, rows),
        )
        found.append((score, rows))
    return found


def _outputs(task: Any, rows: list[Sample]) -> Outputs | None:
    if task.OUTPUT_TYPE != "generate_until":
        return None
    return Outputs(
        tokens=[row.tokens for row in rows],
        thinking_tokens=[row.thinking_tokens for row in rows],
        finish=[row.finish for row in rows],
        loops=[row.loops for row in rows],
        empty=[row.empty for row in rows],
    )


def _primary_metric(name: str, task: Any, sample: dict[str, Any]) -> str:
    aggregation = task.aggregation()
    for metric in sample["metrics"]:
        averaged = getattr(aggregation.get(metric), "__name__", "mean") in ("mean", "nanmean")
        if averaged and isinstance(sample[metric], numbers.Real):
            return str(metric)
    raise DataError(f"task {name} has no score per item ({', '.join(sample['metrics'])}): arms cannot be paired on it")


def _chance(task: Any, metric: str, samples: list[dict[str, Any]]) -> float | None:
    """Mean over the items of right choices / choices; None for anything but multiple choice."""
    if task.OUTPUT_TYPE != "multiple_choice" or metric not in _GUESSABLE:
        return None
    shares = []
    for sample in samples:
        right = len(set(sample["target"])) if isinstance(sample["target"], list) else 1
        shares.append(right / len(task.doc_to_choice(sample["doc"])))
    return sum(shares) / len(shares)
