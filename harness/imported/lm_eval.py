"""Result folders of lm-eval's own command -> records. The files alone are read; lm-eval is not imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.imported.stamp import imported_record
from harness.records.record import AccuracyData, Item, PublishedScore, Record, ScoresData, TaskScore
from qad.errors import DataError
from qad.untrusted import is_number

_PROTOCOL = ("gen_kwargs", "limit", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_TEMPLATE = ("chat_template_sha", "fewshot_as_multiturn", "system_instruction_sha")
_GUESSABLE = ("acc", "acc_norm", "acc_bytes")


def lm_eval_records(files: list[Path], folder: Path, arm: str) -> list[Record]:
    """One record of items (where samples were logged) and one of printed means (for the other tasks).

    Raises DataError for a damaged file, results under unequal settings in one folder, or a task that occurs twice.
    """
    results = {file: _read(file) for file in files}
    protocols = [_settings(raw) for raw in results.values()]
    if any(protocol != protocols[0] for protocol in protocols):
        raise DataError(f"{folder} holds results under unequal settings: give the folder of one run")
    sampled: list[TaskScore] = []
    printed: list[PublishedScore] = []
    used = list(files)
    for file, raw in results.items():
        for task in raw["results"]:
            if task in raw.get("group_subtasks", {}) and raw["group_subtasks"][task]:
                continue  # a group is the mean of tasks that are here themselves
            samples = file.with_name(f"samples_{task}_{file.stem.removeprefix('results_')}.jsonl")
            if samples.is_file():
                sampled += _sampled(raw, task, samples)
                used.append(samples)
            else:
                printed += _printed(raw, task)
    names = [(s.task, s.filter) for s in sampled] + [(p.task, p.filter) for p in printed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise DataError(f"{folder} holds {twice[0]} twice: give the folder of one run")
    first = next(iter(results.values()))
    model = str(first.get("model_name") or folder.name)
    source = f"lm-eval {first.get('lm_eval_version', 'of unknown version')}, {folder.name}"
    engine = f"lm-eval {first.get('lm_eval_version', '')} {first.get('config', {}).get('model', '')}".strip()
    datas = [AccuracyData(sampled)] * bool(sampled) + [ScoresData(source, printed)] * bool(printed)
    if not datas:
        raise DataError(f"{folder} holds no score that is a number: check the run's log")
    return [imported_record(arm, data, protocols[0], engine, used, "lm-eval results", source, model) for data in datas]


def _read(file: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw["results"], dict):
            raise TypeError("results is not an object")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(
            f"{file} is no result file of lm-eval ({error}): give the folder of its --output_path"
        ) from error
    return raw


def _settings(raw: dict[str, Any]) -> dict[str, Any]:
    config = raw.get("config") or {}
    return {name: config.get(name) for name in _PROTOCOL} | {name: raw.get(name) for name in _TEMPLATE}


def _task_facts(raw: dict[str, Any], task: str) -> dict[str, Any]:
    config = raw.get("configs", {}).get(task, {})
    limit = (raw.get("config") or {}).get("limit")
    return {
        "version": str(raw.get("versions", {}).get(task, "")),
        "n_shot": raw.get("n-shot", {}).get(task),
        "limit": None if limit is None else int(raw.get("n-samples", {}).get(task, {}).get("effective", limit)),
        "generation_kwargs": config.get("generation_kwargs"),
        "output_type": config.get("output_type"),
    }


def _higher(raw: dict[str, Any], task: str, metric: str) -> bool:
    return raw.get("higher_is_better", {}).get(task, {}).get(metric) is not False


def _sampled(raw: dict[str, Any], task: str, file: Path) -> list[TaskScore]:
    """One TaskScore a filter; the first metric that is a number per item and is among the results."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        metric = next(
            m for m in rows[0]["metrics"] if is_number(rows[0].get(m)) and f"{m},{rows[0]['filter']}" in raw["results"][task]
        )  # fmt: skip
        filters = dict.fromkeys(row["filter"] for row in rows)
        facts = _task_facts(raw, task)
        return [
            TaskScore(
                task=task, version=facts["version"], metric=metric, filter=name, n_shot=facts["n_shot"],
                higher_is_better=_higher(raw, task, metric), limit=facts["limit"],
                chance=_chance(facts["output_type"], metric, [row for row in rows if row["filter"] == name]),
                items=[_item(row, metric) for row in rows if row["filter"] == name],
                protocol={"generation_kwargs": facts["generation_kwargs"]},
            )
            for name in filters
        ]  # fmt: skip
    except StopIteration as error:
        raise DataError(f"{file} has no score per item: arms cannot be paired on it") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{file} is no samples file of lm-eval ({error!r}): give the folder of one run") from error


def _item(row: dict[str, Any], metric: str) -> Item:
    cluster = row["doc"].get("cluster") if isinstance(row["doc"], dict) else None
    return Item(
        row["doc_hash"], row["prompt_hash"], row["target_hash"], str(cluster or row["doc_hash"]), float(row[metric])
    )


def _chance(output_type: Any, metric: str, rows: list[dict[str, Any]]) -> float | None:
    """Mean of 1 / choices; None for anything but multiple choice."""
    if output_type != "multiple_choice" or metric not in _GUESSABLE:
        return None
    return sum(1 / len(row["arguments"]) for row in rows) / len(rows)


def _printed(raw: dict[str, Any], task: str) -> list[PublishedScore]:
    """Without samples: the first metric of each filter, with its standard error."""
    facts = _task_facts(raw, task)
    found: dict[str, PublishedScore] = {}
    for key, value in raw["results"][task].items():
        metric, _, name = key.partition(",")
        if not name or metric.endswith("_stderr") or not is_number(value) or name in found:
            continue
        error = raw["results"][task].get(f"{metric}_stderr,{name}")
        count = raw.get("n-samples", {}).get(task, {}).get("effective")
        found[name] = PublishedScore(
            task=task, metric=metric, value=float(value), maximum=1.0, higher_is_better=_higher(raw, task, metric),
            chance=None, items=count, repeats=None, stderr=float(error) if is_number(error) else None,
            filter=name, settings=facts,
        )  # fmt: skip
    return list(found.values())
