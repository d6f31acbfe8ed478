"""From the names in a suite to lm-eval tasks that are ready to run: files found, data read, settings made explicit.

The tasks shipped here and local JSON, CSV and Parquet files need no network and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.accuracy.protocol import explicit_generation
from harness.accuracy.quiet import quiet
from harness.accuracy.suite import SuiteTask
from qad.errors import DataError
from qad.untrusted.yaml_text import read_yaml

SHIPPED = Path(__file__).parents[1] / "tasks"

_VOTES = ("majority_vote", "take_first_k")


@dataclasses.dataclass(frozen=True)
class Places:
    """Folders of task files, searched in this order, and one of data files that task files name."""

    folders: tuple[Path, ...]
    data: Path | None = None

    @classmethod
    def of(cls, *folders: Path | None, data: Path | None = None) -> Places:
        """The shipped tasks, then `folders`. Raises DataError for a folder that does not exist."""
        for folder in (*folders, data):
            if folder is not None and not folder.is_dir():
                what = "data folder" if folder is data else "task folder"
                raise DataError(f"{what} {folder} does not exist: give the folder that holds the tasks' files")
        return cls((SHIPPED, *(folder for folder in folders if folder is not None)), data)


@dataclasses.dataclass(frozen=True)
class ReadyTask:
    """An lm-eval task with the suite's entry that asked for it; several of one entry where it names a group."""

    name: str
    entry: SuiteTask
    task: Any
    repeats: int


def require_known(entries: list[SuiteTask], places: Places) -> None:
    """Raises DataError, with the nearest name and what the suite says it needs, for a task that exists neither locally nor in
    lm-eval.

    lm-eval is asked only if a name is not local; names that begin with `qad_` are always ours.
    """
    local = _local_names(places)
    for entry in entries:
        if entry.task not in local:
            with _named(entry), quiet():
                _open_manager([entry.task], places)


def load_tasks(entries: list[SuiteTask], places: Places, cache: Path) -> list[ReadyTask]:
    """Groups are taken apart. cache: folder for what `datasets` makes of the data files.

    Raises DataError for an unknown task, data that cannot be read or of another size than expected, settings that make no
    sense for a task. Where an entry says what it needs, the message does too.
    """
    ready: list[ReadyTask] = []
    for entry in entries:
        with _named(entry):
            loaded = _load(entry.task, places, cache)
            ready += [ReadyTask(name, entry, task, _prepare(name, task, entry)) for name, task in loaded.items()]
            _require_items(entry, loaded)
    return ready


@contextlib.contextmanager
def _named(entry: SuiteTask) -> Iterator[None]:
    """What goes wrong with a task is said together with what its suite says that it needs."""
    try:
        yield
    except DataError as error:
        if not entry.needs:
            raise
        raise DataError(f"{error}. Task {entry.task} needs {entry.needs}") from error


# --- names and files ---


def _local_tasks(folder: Path) -> dict[str, Path]:
    """Name of a task or group -> YAML file. Read as plain YAML, so that nothing is imported to learn a name."""
    names = {}
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            document = read_yaml(path, tags=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not YAML: {error}") from error
        for key in ("group", "task"):
            if isinstance(document, dict) and isinstance(document.get(key), str):
                names[document[key]] = path
    return names


def _local_names(places: Places) -> set[str]:
    return {name for folder in places.folders for name in _local_tasks(folder)}


def _open_manager(tasks: list[str], places: Places) -> Any:
    """lm-eval's index of the local tasks, and of its own where a name asks for it. Raises DataError as above."""
    local = sorted(_local_names(places))
    reserved = [task for task in tasks if task.startswith("qad_") and task not in local]
    known = local
    if not reserved:
        manager = _index(places.folders, defaults=False) if set(tasks) <= set(local) else _full_index(*places.folders)
        known = manager.all_tasks
    unknown = reserved or [task for task in tasks if task not in known]
    if unknown:
        near = next((m for names in (local, known) for m in difflib.get_close_matches(unknown[0], names, 1)), None)
        hint = f"did you mean {near}?" if near else f"shipped tasks are {', '.join(_local_tasks(SHIPPED))}"
        raise DataError(f"task {unknown[0]!r} is neither shipped nor known to lm-eval: {hint}")
    return manager


def _index(folders: tuple[Path, ...], defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager  # half a second that only tasks need

    return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=defaults)


@functools.lru_cache(maxsize=1)
def _full_index(*folders: Path) -> Any:
    """lm-eval's own tasks are thousands of files, many seconds to read: once a process, and only when asked for."""
    return _index(folders, defaults=True)


def _load(name: str, places: Places, cache: Path) -> dict[str, Any]:
    """Name -> lm-eval task, groups taken apart."""
    manager = _open_manager([name], places)
    try:
        loaded: dict[str, Any] = manager.load([_resolved(manager, name, places, cache)])["tasks"]
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"task {name} cannot be loaded: {reason}") from error
    return loaded


def _resolved(manager: Any, task: str, places: Places, cache: Path) -> Any:
    """A name, or for a local JSON, CSV or Parquet task its name with `data_files` made absolute.

    `datasets` would look for them relative to the working directory and keep a copy in the user's cache.
    """
    entry = manager.task_index[task]
    config = entry.cfg or {}
    arguments = dict(config.get("dataset_kwargs") or {})
    if entry.yaml_path is None or config.get("dataset_path") not in ("json", "csv", "parquet", "text"):
        return task
    arguments["data_files"] = _absolute(arguments.get("data_files"), Path(entry.yaml_path).parent, places.data)
    changed = {"task": task, "dataset_kwargs": {**arguments, "cache_dir": str(cache)}}
    return {"group": f"{task}_here", "task": [changed]}  # lm-eval overrides a registered task only inside a group


def _absolute(files: Any, folder: Path, data: Path | None) -> Any:
    if isinstance(files, dict):
        return {split: _absolute(value, folder, data) for split, value in files.items()}
    if isinstance(files, list):
        return [_absolute(value, folder, data) for value in files]
    if not isinstance(files, str) or "://" in files or "*" in files:
        return files
    looked = [folder, *([data] if data else [])]
    found = next((place / files for place in looked if (place / files).exists()), None)
    if found is None:
        hint = "" if data else " (their folder: --suite-data, in a recipe suite_data)"
        raise FileNotFoundError(f"there is no {files} in {' nor in '.join(map(str, looked))}{hint}")
    return str(found)


# --- settings ---


def _prepare(name: str, task: Any, entry: SuiteTask) -> int:
    """Few-shot count by lm-eval's own rule (a task file that says 0 is not overruled), generation settings, repeats.

    Returns the number of samples an item. lm-eval itself takes one sample at a time: its default filter would throw the others
    away.
    """
    own = task.get_config("num_fewshot")
    if entry.n_shot is not None and own != 0:
        task.set_config(key="num_fewshot", value=entry.n_shot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    generated = task.OUTPUT_TYPE == "generate_until"
    if entry.generation.given and not generated:
        raise DataError(f"task {name} generates nothing: take its generation settings out of the suite")
    if generated:
        settings = {**(task.get_config("generation_kwargs") or {}), **entry.generation.given}
        task.set_config(key="generation_kwargs", value=settings)
    explicit_generation(task)
    repeats = int(entry.repeats or task.get_config("repeats") or 1)
    task.set_config(key="repeats", value=1)
    if repeats > 1 and not (generated and task.get_config("generation_kwargs")["do_sample"]):
        raise DataError(
            f"task {name} samples each item {repeats} times, which gives {repeats} equal answers without a temperature: "
            "set repeats to 1, or a temperature above 0"
        )
    _require_no_votes(name, task)
    return repeats


def _require_no_votes(name: str, task: Any) -> None:
    """A vote over samples is not their mean, and scoring them one by one would make it one under the vote's name."""
    for chain in task.get_config("filter_list") or []:
        if any(step.get("function") in _VOTES for step in chain["filter"]):
            raise DataError(f"filter {chain['name']} of task {name} votes over samples, which are scored one by one: remove it")


def _require_items(entry: SuiteTask, loaded: dict[str, Any]) -> None:
    if entry.items is None or entry.limit is not None:
        return
    found = sum(len(task.eval_docs) for task in loaded.values())
    if found != entry.items:
        raise DataError(f"task {entry.task} has {found:,} items, the suite's protocol {entry.items:,}: the data differ")
