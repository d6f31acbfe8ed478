"""The accuracy section of a recipe -> a suite, its files, and scores whose every sample is kept beside the record.

RECORD                          accuracy.json
RECORD with .samples.parquet    every sample: hashes, score, finish reason, text
RECORD with .answers.jsonl      while it is measured: what was answered so far; a measurement that was interrupted goes on from it
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from harness.accuracy.in_memory import InMemory
from harness.accuracy.journal import Journal
from harness.accuracy.quiet import quiet
from harness.accuracy.samples import samples_path, write_samples
from harness.accuracy.scores import measure_suite
from harness.accuracy.served import describe, open_server
from harness.accuracy.suite import Suite, load_suite, of_tasks
from harness.accuracy.task_files import Places, load_tasks, require_known
from harness.engines.transformers import LoadedModel
from harness.records.record import AccuracyData, Engine
from qad.progress import Progress
from qad.recipes.recipe import Accuracy


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What is asked, and where its files are."""

    suite: Suite
    places: Places
    batch_size: int
    settings: dict[str, object]
    seed: int

    @classmethod
    def of(cls, section: Accuracy, seed: int) -> Scoring:
        """Raises QadError for an unknown suite or task, or folders that do not exist."""
        if section.suite:
            suite, folder = load_suite(section.suite)
            suite = suite.limited(section.limit)
            if section.think_end and suite.think_end is None:
                suite = suite.model_copy(update={"think_end": section.think_end})
            data = Path(section.suite_data) if section.suite_data else None
            places = Places.of(folder if folder.is_dir() else None, data=data)
        else:
            suite = of_tasks(section.tasks, section.limit, section.n_shot, section.think_end)
            places = Places.of()
        require_known(suite.tasks, places)
        settings = section.model_dump(mode="json", exclude={"suite", "suite_data", "think_end"})
        if section.suite:
            settings["suite"] = suite.model_dump(mode="json", exclude_defaults=True)
        if suite.think_end:
            settings["think_end"] = suite.think_end
        return cls(suite, places, section.batch_size, {**settings, "seed": seed}, seed)

    def require_data(self) -> None:
        """Find data that is not here before a model is loaded. Raises DataError."""
        with quiet(), tempfile.TemporaryDirectory(prefix="qad-tasks-") as cache:
            load_tasks(self.suite.tasks, self.places, Path(cache))

    @property
    def label(self) -> str:
        return self.suite.name if "suite" in self.settings else ", ".join(self.suite.names)


@dataclasses.dataclass(frozen=True)
class ServerChoice:
    """An OpenAI server that has loaded the measured folder. chat: conversations through its template, as a suite with
    chat_template asks for; max_length, model: see `open_server`."""

    url: str
    max_length: int | None = None
    model: str | None = None
    concurrency: int = 16

    def describe(self) -> tuple[str, Engine]:
        """The served name and the record's engine. Raises QadError."""
        return describe(self.url, self.model, "completions")

    def open(self, folder: Path, suite: Suite) -> tuple[Any, Engine]:
        """lm-eval's back-end and the record's engine. Raises QadError."""
        return open_server(
            self.url,
            str(folder),
            chat=suite.chat_template,
            think_end=suite.think_end,
            max_length=self.max_length,
            concurrency=self.concurrency,
            model=self.model,
        )


def score(backend: Any, scoring: Scoring, identity: dict[str, object], record: Path) -> AccuracyData:
    """Score a back-end; write the samples beside `record` and say so in the data.

    identity: of weights and engine, everything that answers depend on beside the request.
    """
    journal = Journal(answers_path(record), {**identity, "think_end": scoring.suite.think_end})
    with Progress("accuracy", None, "req") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.done)

        try:
            measured = measure_suite(
                backend, scoring.suite, scoring.places, seed=scoring.seed, journal=journal, progress=progress
            )
        finally:
            journal.close()
    path = samples_path(record)
    write_samples(measured.samples, path)
    return dataclasses.replace(measured.data, samples=path.name)


def answers_path(record: Path) -> Path:
    return record.with_name(record.stem + ".answers.jsonl")


def finished(record: Path) -> None:
    """The record is written: what was kept to resume from goes."""
    answers_path(record).unlink(missing_ok=True)


def score_loaded(loaded: LoadedModel, scoring: Scoring, checkpoint: str, record: Path) -> AccuracyData:
    """Accuracy of a model in this process."""
    backend = InMemory(loaded.model, loaded.tokenizer, scoring.batch_size, scoring.suite.think_end)
    identity = {"checkpoint": checkpoint, "engine": dataclasses.asdict(loaded.engine), "batch_size": scoring.batch_size}
    return score(backend, scoring, identity, record)
