"""Result folders of lm-eval's own command -> records. The files alone are read; lm-eval is not imported."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.imported.stamp import imported_record, require_one_model
from harness.records.record import AccuracyData, Item, PublishedScore, Record, ScoresData, TaskScore
from qad.errors import DataError
from qad.untrusted import clean, count, is_number, json_lines, mapping, names, strict_json

_PROTOCOL = ("gen_kwargs", "limit", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_TEMPLATE = ("chat_template_sha", "fewshot_as_multiturn", "system_instruction_sha")
_GUESSABLE = ("acc", "acc_norm", "acc_bytes")


def lm_eval_records(files: list[Path], folder: Path, arm: str) -> list[Record]:
    """One record of items (where samples were logged) and one of printed means (for the other tasks). A group is the mean of
    tasks that are there themselves; where one is not, the group stands as printed. The provenance names what has no score.

    Raises DataError for a damaged file, results of two models or under unequal settings in one folder, or a task that is there
    twice.
    """
    results = {file: _read(file) for file in files}
    require_one_model(((file, _model(raw)) for file, raw in results.items()), "give the folder of one model")
    protocols = [_settings(raw) for raw in results.values()]
    if any(protocol != protocols[0] for protocol in protocols):
        raise DataError(f"{folder} holds results under unequal settings: give the folder of one run")
    sampled: list[TaskScore] = []
    printed: list[PublishedScore] = []
    used, left_out = list(files), []
    there = {file.parent: {path.name for path in file.parent.iterdir()} for file in files}  # a task may be no file's name
    for file, raw in results.items():
        for task in raw["results"]:
            children = names(mapping(raw.get("group_subtasks")).get(task))
            absent = [child for child in children if child not in raw["results"]]
            if children and not absent:
                continue
            if absent:
                left_out.append(f"{task}: of its {len(children)} tasks {', '.join(absent[:3])} {_are(absent)} not in {file.name}")
            samples = f"samples_{task}_{file.stem.removeprefix('results_')}.jsonl"
            if samples in there[file.parent] and (items := _sampled(raw, task, file.with_name(samples))):
                sampled += items
                used.append(file.with_name(samples))
            elif found := _printed(raw, task):
                printed += found
            else:
                left_out.append(f"{task}: its row in {file.name} has no score that is a number")
    scored = collections.Counter([(s.task, s.filter) for s in sampled] + [(p.task, p.filter) for p in printed])
    twice = next((task for (task, _), number in scored.items() if number > 1), None)
    if twice:
        raise DataError(f"{folder} holds {twice} twice: give the folder of one run")
    first = next(iter(results.values()))
    model = str(first.get("model_name") or folder.name)
    source = f"lm-eval {first.get('lm_eval_version', 'of unknown version')}, {folder.name}"
    engine = f"lm-eval {first.get('lm_eval_version', '')} {mapping(first.get('config')).get('model', '')}".strip()
    datas = [AccuracyData(sampled)] * bool(sampled) + [ScoresData(source, printed)] * bool(printed)
    if not datas:
        raise DataError(f"{folder} holds no score that is a number: check the run's log")
    return [imported_record(arm, data, protocols[0], engine, used, "lm-eval results", source, model, left_out) for data in datas]


def _are(things: Sequence[str]) -> str:
    return "is" if len(things) == 1 else "are" if len(things) <= 3 else f"and {len(things) - 3} more are"


def _model(raw: dict[str, Any]) -> str:
    """The evaluated model: its name, else what lm-eval was given."""
    given = mapping(raw.get("config")).get("model_args")
    found = raw.get("model_name") or (mapping(given).get("pretrained") if isinstance(given, dict) else given)
    return str(found or "")


def _read(file: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = strict_json(file.read_bytes(), nan_is_null=True)
        if not all(isinstance(row, dict) for row in raw["results"].values()):
            raise TypeError("a row of its results is not an object")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(
            f"{file} is no result file of lm-eval ({clean(error, 200)}): give the folder of its --output_path"
        ) from error
    return raw


def _settings(raw: dict[str, Any]) -> dict[str, Any]:
    config = mapping(raw.get("config"))
    return {name: config.get(name) for name in _PROTOCOL} | {name: raw.get(name) for name in _TEMPLATE}


def _task_facts(raw: dict[str, Any], task: str) -> dict[str, Any]:
    config, limit = mapping(mapping(raw.get("configs")).get(task)), mapping(raw.get("config")).get("limit")
    asked = count(_items(raw, task) or limit)
    return {
        "version": str(mapping(raw.get("versions")).get(task, "")),
        "n_shot": count(mapping(raw.get("n-shot")).get(task)),
        "limit": None if limit is None else asked or 0,
        "generation_kwargs": config.get("generation_kwargs"),
        "output_type": config.get("output_type"),
    }


# Metrics of lm-eval and of others whose result file may not say so.
LOWER_IS_BETTER = frozenset(
    ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter", "wer", "cer", "loss", "nll")
)


def _higher(raw: dict[str, Any], task: str, metric: str) -> bool:
    told = mapping(mapping(raw.get("higher_is_better")).get(task)).get(metric)
    return told if isinstance(told, bool) else metric not in LOWER_IS_BETTER


def _items(raw: dict[str, Any], task: str) -> int | None:
    """Questions that were asked, where the file tells."""
    return count(mapping(mapping(raw.get("n-samples")).get(task)).get("effective"))


def _sampled(raw: dict[str, Any], task: str, file: Path) -> list[TaskScore]:
    """One TaskScore a filter; the first metric that is a number per item and is among the results. None where no metric is, as
    a corpus's perplexity: its printed score counts."""
    try:
        rows = [row for _, row in json_lines(file, nan_is_null=True)]
        if rows and not all("filter" in row for row in rows):  # one row an item and filter, and nothing tells which
            raise DataError(
                f"{file} is of an lm-eval that wrote no filter: score again with 0.4.7 or later, or remove it for "
                "the printed scores"
            )
        metric = next(
            m for m in rows[0]["metrics"] if is_number(rows[0].get(m)) and f"{m},{rows[0]['filter']}" in raw["results"][task]
        )
        filters = dict.fromkeys(row["filter"] for row in rows)
        facts, asked = _task_facts(raw, task), _items(raw, task)
        for name in filters:
            held = sum(row["filter"] == name for row in rows)
            if asked and held != asked:
                raise DataError(
                    f"{file} holds {held} of the {asked} questions asked (filter {clean(name)}), so its mean is not the "
                    "score: fetch the whole file, or remove it for the printed scores"
                )
        return [
            TaskScore(
                task=task,
                version=facts["version"],
                metric=metric,
                filter=name,
                n_shot=facts["n_shot"],
                higher_is_better=_higher(raw, task, metric),
                limit=facts["limit"],
                chance=_chance(facts["output_type"], metric, [row for row in rows if row["filter"] == name]),
                items=[_item(row, metric) for row in rows if row["filter"] == name],
                protocol={"generation_kwargs": facts["generation_kwargs"]},
            )
            for name in filters
        ]
    except StopIteration:
        return []
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError, OSError) as error:
        reason = clean(repr(error), 200)
        raise DataError(f"{file} is no samples file of lm-eval ({reason}): give the folder of one run") from error


def _item(row: dict[str, Any], metric: str) -> Item:
    cluster = row["doc"].get("cluster") if isinstance(row["doc"], dict) else None
    doc, prompt, target = hashes = [row[name] for name in ("doc_hash", "prompt_hash", "target_hash")]
    if (not is_number(row[metric]) and not isinstance(row[metric], bool)) or not all(isinstance(text, str) for text in hashes):
        raise ValueError(f"{metric} of {str(row.get('doc_id'))[:40]} is {str(row[metric])[:40]!r}, or it has no hashes")
    return Item(doc, prompt, target, str(cluster or doc), float(row[metric]))


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
        higher = _higher(raw, task, metric)
        found[name] = PublishedScore(
            task=task,
            metric=metric,
            value=float(value),
            maximum=100.0 if higher and value > 1 else 1.0,
            higher_is_better=higher,
            chance=None,
            items=_items(raw, task) or None,
            repeats=None,
            stderr=float(error) if is_number(error) and error >= 0 else None,
            filter=name,
            settings=facts,
        )
    return list(found.values())
