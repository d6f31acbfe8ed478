"""Accuracy: one folder on a suite, in this process, in one of its own, by a server, or a second time under other conditions."""

from __future__ import annotations

import dataclasses
import datetime
import time
from pathlib import Path

from harness.accuracy.section import Scoring, ServerChoice, finished, score, score_loaded
from harness.measure.own_process import run_apart
from harness.measure.subject import Found, Subject
from qad.model.loader import code_is_trusted, remote_code
from qad.model.template_clock import instant, template_clock
from qad.recipes.recipe import Accuracy

SAMPLES_APART = 10_000  # more than any suite has samples an item
OTHER_ATTENTION = "eager"  # transformers' own choice is sdpa wherever a model has it


def settings(scoring: Scoring, dtype: str) -> dict[str, object]:
    return {**scoring.settings, "dtype": dtype}


def measure(subject: Subject, scoring: Scoring, record: Path, server: ServerChoice | None = None) -> Found:
    """record: where the record will be; samples and the journal lie beside it. server: one that has loaded the folder."""
    if server is not None:
        backend, engine = server.open(subject.folder, scoring.suite)
        data = score(backend, scoring, {"checkpoint": subject.identity, "server": server.url}, record)
        return Found(data, engine, settings(scoring, engine.dtype))
    data = score_loaded(subject.loaded, scoring, subject.identity, record)
    return Found(data, subject.loaded.engine, settings(scoring, subject.dtype))


def measure_again(subject: Subject, scoring: Scoring, record: Path) -> Found:
    """Under another batch size, attention kernel and seed of the samples. Few-shot examples stay, so that the prompts do."""
    batch_size = scoring.batch_size // 2 or 2
    conditions: dict[str, object] = {"batch_size": batch_size, "attention": OTHER_ATTENTION}
    loaded = subject.load(OTHER_ATTENTION)
    suite = scoring.suite.reseeded(SAMPLES_APART)
    changed = dataclasses.replace(scoring, batch_size=batch_size, suite=suite)
    data = score_loaded(loaded, changed, subject.identity, record)
    if any(task.outputs is not None for task in data.tasks):
        conditions["seed"] = f"+{SAMPLES_APART}"
    return Found(data, loaded.engine, settings(scoring, subject.dtype), conditions)


def record_apart(subject: Subject, section: Accuracy, record: Path) -> None:
    """The record, made in a process of its own: an engine that does not give a GPU's memory back would decide how the next arm is
    measured."""
    run_apart(_record, subject, section, record, code_is_trusted(), instant())


def _record(subject: Subject, section: Accuracy, record: Path, trusted: bool, time_seen: datetime.datetime | None) -> None:
    started = time.monotonic()
    with remote_code(trusted), template_clock(time_seen):
        subject.write(record, measure(subject, Scoring.of(section, subject.seed), record), started)
    finished(record)
