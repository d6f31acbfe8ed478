"""Accuracy through lm-eval: the tasks shipped here, a folder of one's own, or any task lm-eval knows, item by item.

lm-eval's own `evaluate` scores; nothing is cached between runs, so no score can be credited to other weights. The
shipped tasks and local JSON files need no network and leave nothing behind.

Which score. One metric a task, the first in the task's own list that is a plain number per item and is averaged
(`acc` for multiple choice): two metrics of the same answers (acc, acc_norm) would count the task twice in a median
over benchmarks. Every filter of a task is a TaskScore of its own.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import numbers
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from harness.protocol import explicit_generation, protocol, require_room, thinking_model
from harness.records import AccuracyData, Item, TaskScore
from qad.errors import DataError

SHIPPED = Path(__file__).parent / "tasks"

_GUESSABLE = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")


def require_tasks(tasks: list[str], task_path: Path | None = None) -> None:
    """Raises DataError, with the nearest name, for a task that exists neither locally nor in lm-eval.

    lm-eval is asked only if a name is not local; names that begin with `qad_` are always ours.
    """
    if not tasks:
        raise DataError(f"no tasks given: name some, for example {', '.join(_local_tasks(SHIPPED))}")
    if not set(tasks) <= _local_names(task_path):
        with _quiet():
            _open_manager(tasks, task_path)


def measure_accuracy(
    model: Any,
    tokenizer: Any,
    tasks: list[str],
    *,
    limit: int | None = None,
    n_shot: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    task_path: Path | None = None,
    think_end: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> AccuracyData:
    """Score an in-memory transformers model. Prompts are plain text, no chat template.

    limit: items per task, None for all. n_shot: None for each task's own; a task whose file says 0 stays at 0, as in
    lm-eval. task_path: a folder of task files, searched before the shipped ones; `data_files` in them may be relative
    to the file. think_end: what ends a reasoning model's thinking; only what follows is scored. progress: called with
    (requests scored, requests of this kind in all).

    Raises DataError for an unknown task, one whose data cannot be read, one without a score per item, one that leaves no
    room for its prompts, or prompts that begin with two BOS tokens.
    """
    with _quiet(), tempfile.TemporaryDirectory(prefix="qad-tasks-") as cache:
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        loaded = _load(tasks, task_path, Path(cache))
        for name, task in loaded.items():
            _prepare(name, task, n_shot, seed)
        kind = thinking_model(HFLM) if think_end else HFLM
        lm = kind(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, think_end_token=think_end)
        for name, task in loaded.items():
            require_room(name, task, lm)
        if progress:
            _report_progress(lm, progress)
        # `simple_evaluate` would do the same after running `pip list` and asking the hub for this model.
        results = lm_eval.evaluate(lm=lm, task_dict={"tasks": loaded}, limit=limit, bootstrap_iters=0, log_samples=True)
        scores = [
            score for name, task in loaded.items() for score in _scores(name, task, lm, results["samples"][name], limit)
        ]
    return AccuracyData(scores)


# --- tasks ---------------------------------------------------------------------------------------


def _folders(task_path: Path | None) -> list[Path]:
    if task_path is not None and not task_path.is_dir():
        raise DataError(f"task folder {task_path} does not exist: give the folder that holds the tasks' YAML files")
    return [SHIPPED] if task_path is None else [SHIPPED, task_path]


def _local_tasks(folder: Path) -> dict[str, Path]:
    """Name of a task or group -> YAML file. Read as plain YAML, so that nothing is imported to learn a name."""
    names = {}
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            document = yaml.load(path.read_text(encoding="utf-8"), _IgnoringTags)
        except yaml.YAMLError as error:
            raise DataError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
        for key in ("group", "task"):
            if isinstance(document, dict) and isinstance(document.get(key), str):
                names[document[key]] = path
    return names


class _IgnoringTags(yaml.SafeLoader):
    """Reads `!function x.y` as nothing: no code of a task file runs."""


_IgnoringTags.add_multi_constructor("!", lambda _loader, _suffix, _node: None)


def _local_names(task_path: Path | None) -> set[str]:
    return {name for folder in _folders(task_path) for name in _local_tasks(folder)}


def _open_manager(tasks: list[str], task_path: Path | None) -> Any:
    """lm-eval's index of the local tasks, and of its own where a name asks for it. Raises DataError as above."""
    local = sorted(_local_names(task_path))
    reserved = [task for task in tasks if task.startswith("qad_") and task not in local]
    known = local
    if not reserved:
        folders = _folders(task_path)
        manager = _index(folders, defaults=False) if set(tasks) <= set(local) else _full_index(*folders)
        known = manager.all_tasks
    unknown = reserved or [task for task in tasks if task not in known]
    if unknown:
        near = next((m for names in (local, known) for m in difflib.get_close_matches(unknown[0], names, 1)), None)
        hint = f"did you mean {near}?" if near else f"shipped tasks are {', '.join(_local_tasks(SHIPPED))}"
        raise DataError(f"task {unknown[0]!r} is neither shipped nor known to lm-eval: {hint}")
    return manager


def _index(folders: list[Path], defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=defaults)


@functools.lru_cache(maxsize=1)
def _full_index(*folders: Path) -> Any:
    """lm-eval's own tasks are thousands of files, many seconds to read: once a process, and only when asked for."""
    return _index(list(folders), defaults=True)


def _load(tasks: list[str], task_path: Path | None, cache: Path) -> dict[str, Any]:
    """Name -> lm-eval task, groups taken apart. Raises DataError for an unknown task or data that cannot be read."""
    if not tasks:
        raise DataError(f"no tasks given: name some, for example {', '.join(_local_tasks(SHIPPED))}")
    manager = _open_manager(tasks, task_path)
    try:
        loaded: dict[str, Any] = manager.load([_resolved(manager, task, cache) for task in tasks])["tasks"]
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"tasks {', '.join(tasks)} cannot be loaded: {reason}") from error
    return loaded


def _resolved(manager: Any, task: str, cache: Path) -> Any:
    """A name, or for a local JSON, CSV or Parquet task its name with `data_files` made absolute.

    `datasets` would look for them relative to the working directory and keep a copy in the user's cache.
    """
    entry = manager.task_index[task]
    config = entry.cfg or {}
    arguments = dict(config.get("dataset_kwargs") or {})
    if entry.yaml_path is None or config.get("dataset_path") not in ("json", "csv", "parquet", "text"):
        return task
    arguments["data_files"] = _absolute(arguments.get("data_files"), Path(entry.yaml_path).parent)
    changed = {"task": task, "dataset_kwargs": {**arguments, "cache_dir": str(cache)}}
    return {"group": f"{task}_here", "task": [changed]}  # lm-eval overrides a registered task only inside a group


def _absolute(files: Any, folder: Path) -> Any:
    if isinstance(files, dict):
        return {split: _absolute(value, folder) for split, value in files.items()}
    if isinstance(files, list):
        return [_absolute(value, folder) for value in files]
    return str(folder / files) if isinstance(files, str) and (folder / files).exists() else files


def _prepare(name: str, task: Any, n_shot: int | None, seed: int) -> None:
    """Few-shot count and seed, by lm-eval's own rule: a task file that says 0 is not overruled."""
    own = task.get_config("num_fewshot")
    if n_shot is not None and own != 0:
        task.set_config(key="num_fewshot", value=n_shot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)
    explicit_generation(task)
    if (task.get_config("repeats") or 1) > 1:
        raise DataError(f"task {name} samples each item {task.get_config('repeats')} times: only one sample is scored")


# --- scores --------------------------------------------------------------------------------------


def _scores(name: str, task: Any, lm: Any, samples: list[dict[str, Any]], limit: int | None) -> list[TaskScore]:
    """One TaskScore a filter, in the order lm-eval applied them."""
    metric = _primary_metric(name, task, samples[0])
    facts = protocol(name, task, lm, samples)
    by_filter: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_filter.setdefault(sample["filter"], []).append(sample)
    return [
        TaskScore(
            task=name,
            version=str(task.VERSION),
            metric=metric,
            filter=key,
            n_shot=int(task.get_config("num_fewshot") or 0),
            higher_is_better=bool(task.higher_is_better().get(metric, True)),
            chance=_chance(task, metric, group),
            limit=limit,
            items=[_item(sample, metric) for sample in group],
            protocol=facts,
        )
        for key, group in by_filter.items()
    ]


def _primary_metric(name: str, task: Any, sample: dict[str, Any]) -> str:
    aggregation = task.aggregation()
    for metric in sample["metrics"]:
        averaged = getattr(aggregation.get(metric), "__name__", "mean") in ("mean", "nanmean")
        if averaged and isinstance(sample[metric], numbers.Real):
            return str(metric)
    raise DataError(f"task {name} has no score per item ({', '.join(sample['metrics'])}): arms cannot be paired on it")


def _item(sample: dict[str, Any], metric: str) -> Item:
    cluster = sample["doc"].get("cluster") or sample["doc_hash"]
    return Item(sample["doc_hash"], sample["prompt_hash"], sample["target_hash"], str(cluster), float(sample[metric]))


def _chance(task: Any, metric: str, samples: list[dict[str, Any]]) -> float | None:
    """Mean over the items of right choices / choices; None for anything but multiple choice."""
    if task.OUTPUT_TYPE != "multiple_choice" or metric not in _GUESSABLE:
        return None
    shares = []
    for sample in samples:
        right = len(set(sample["target"])) if isinstance(sample["target"], list) else 1
        shares.append(right / len(task.doc_to_choice(sample["doc"])))
    return sum(shares) / len(shares)


# --- lm-eval's voice -----------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log lines below ERROR and no progress bars from lm-eval and datasets, whose bars have no switch."""
    import datasets
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.models.huggingface as hf

    modules: list[Any] = [lm_eval.api.task, lm_eval.api.model, hf]
    bars = [module.tqdm for module in modules]
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    shown = not datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    for module, bar in zip(modules, bars, strict=True):
        module.tqdm = _without_bar(bar)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for module, bar in zip(modules, bars, strict=True):
            module.tqdm = bar
        if shown:
            datasets.enable_progress_bars()


def _without_bar(bar: Any) -> Any:
    return lambda *args, **kwargs: bar(*args, **{**kwargs, "disable": True})


def _report_progress(lm: Any, progress: Callable[[int, int], object]) -> None:
    """lm-eval tells its response cache of every answer as it comes: listen there, store nothing."""

    class Listener:
        done = total = 0

        def add_partial(self, *_: object) -> None:
            self.done += 1
            progress(self.done, self.total)

    def counted(method: Any, listener: Listener) -> Any:
        def run(requests: list[Any], *args: Any, **kwargs: Any) -> Any:
            listener.done, listener.total = 0, len(requests)
            return method(requests, *args, **kwargs)

        return run

    listener = Listener()
    lm.set_cache_hook(listener)
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(lm, name, counted(getattr(lm, name), listener))
