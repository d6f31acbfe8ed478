"""`qad measure throughput` of served checkpoints, and `qad measure import`: records of kind "serving"."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from harness.engines.environment import engine_python
from harness.engines.server import Server, serve
from harness.imported.scores import serving_record
from harness.measure.offline import Offline, measure_offline
from harness.measure.subject import Found, Subject
from harness.records import record as records
from harness.records.record import Data
from harness.records.serving import ServingData
from harness.serving.drivers import choose_driver
from harness.serving.in_process import measure_throughput
from harness.serving.remote import running_server
from harness.serving.statistics import summarize
from harness.serving.sweep import Plan, measure_serving
from qad import provenance
from qad.artifact import digest_of
from qad.errors import UsageError
from qad.recipes.recipe import Throughput

INVALID = 1  # exit code: what was measured must not be used


def settings(section: Throughput, subject: Subject) -> dict[str, object]:
    """Of speed in this process. Speeds are comparable on the same machine with the same packages only."""
    machine = digest_of(provenance.environment())
    return {**section.model_dump(mode="json"), "seed": subject.seed, "dtype": subject.dtype, "machine": machine}


def measure(
    subjects: Sequence[Subject], section: Throughput, progress: Callable[[int], object] = lambda runs: None
) -> dict[str, Found]:
    """Speed in this process, the arms in turns; by arm."""
    measured = measure_throughput(
        {subject.arm: subject.loaded.model for subject in subjects},
        **section.model_dump(),
        vocab_size=len(subjects[0].tokenizer),
        seed=subjects[0].seed,
        progress=progress,
    )
    return {s.arm: Found(measured[s.arm], s.loaded.engine, settings(section, s)) for s in subjects}


@dataclasses.dataclass(frozen=True)
class Serving:
    """How the arms are served: by an engine that is started, or by a server that runs.

    engine: vllm or trtllm, started where `url` is None. python, dtype, max_model_len, options: of the engine. url, log: of the
    running server. driver, driver_python: the load tool and the environment it is in (default: the first found). ready_s: how
    long a started engine may take until it answers.
    """

    engine: str | None
    python: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    options: tuple[str, ...] = ()
    url: str | None = None
    log: Path | None = None
    driver: str | None = None
    driver_python: str | None = None
    ready_s: float = 600.0


def measure_served(
    folders: Sequence[Path], arms: Sequence[str], out: Path, plan: Plan, serving: Serving, say: Callable[[str], None]
) -> int:
    """Records of the arms (several: OUT/ARM/serving.json), and the exit code: 1 where a cell is invalid.

    Raises UsageError for arms that do not fit the folders, or several of them behind one running server.
    """
    places = _places(folders, arms, out, plan)
    if serving.url and len(folders) > 1:
        raise UsageError("one running server is one arm: measure each with its own --server, or let --engine start them")
    started = time.monotonic()
    return _written(places, measure_arms(places, plan, serving, say), started, say)


def measure_benched(
    folders: Sequence[Path], arms: Sequence[str], out: Path, plan: Plan, offline: Offline, say: Callable[[str], None]
) -> int:
    """The same by `trtllm-bench`; its files go to a folder beside each record."""
    places, started = _places(folders, arms, out, plan), time.monotonic()
    beside = {subject.arm: (subject.folder, path.with_suffix(".trtllm-bench")) for subject, path in places}
    measured = measure_offline(beside, plan, offline, places[0][0].tokenizer, say)
    settings = {**_settings(plan, offline.options, offline.max_model_len), "mode": offline.mode}
    return _written(places, {arm: Found(*found, settings) for arm, found in measured.items()}, started, say)


Places = Sequence[tuple[Subject, Path]]  # what is measured, and where its record goes


def _places(folders: Sequence[Path], arms: Sequence[str], out: Path, plan: Plan) -> Places:
    if len(arms) != len(folders) or len(set(arms)) != len(arms):
        raise UsageError(f"--arm {','.join(arms)} names {len(set(arms))} arms, {len(folders)} folders were given")
    subjects = [Subject.open(arm, folder, "auto", plan.seed) for arm, folder in zip(arms, folders, strict=True)]
    return [(subject, out if len(arms) == 1 else out / subject.arm / "serving.json") for subject in subjects]


def _written(places: Places, measured: Mapping[str, Found], started: float, say: Callable[[str], None]) -> int:
    for subject, path in places:
        found = measured[subject.arm]
        subject.write(path, found, started)
        say(f"record: {path} ({found.engine.kernel_path})")
    return max(_report(subject.arm, measured[subject.arm].data, say) for subject, _ in places)


def measure_arms(places: Places, plan: Plan, serving: Serving, say: Callable[[str], None]) -> dict[str, Found]:
    """By arm. The log of an engine that is started goes beside the record."""
    first, settings = places[0][0], serving_settings(plan, serving)
    driver = choose_driver(serving.driver, load_pythons(serving))
    starts = {subject.arm: _start(serving, subject.folder, record) for subject, record in places}
    measured = measure_serving(starts, plan, driver, first.folder, say, tokenizer=first.tokenizer)
    return {arm: Found(*found, settings) for arm, found in measured.items()}


def serving_settings(plan: Plan, serving: Serving) -> dict[str, object]:
    return {**_settings(plan, serving.options, serving.max_model_len), "dtype": serving.dtype}


def _settings(plan: Plan, options: Sequence[str], max_model_len: int | None) -> dict[str, object]:
    """Speeds are comparable on the same machine with the same packages only."""
    return {
        **dataclasses.asdict(plan),
        "options": list(options),
        "max_model_len": max_model_len,
        "machine": digest_of(provenance.environment()),
    }


def load_pythons(serving: Serving) -> list[str]:
    """Where a load tool may be: the named environment, else this one and the engine's."""
    if serving.driver_python:
        return [serving.driver_python]
    pythons = [sys.executable]
    if serving.engine:
        with contextlib.suppress(UsageError):
            pythons.append(str(engine_python(serving.engine, serving.python)))
    return pythons


def _start(serving: Serving, folder: Path, out: Path) -> Callable[[], AbstractContextManager[Server]]:
    if serving.url:
        url = serving.url
        return lambda: contextlib.nullcontext(running_server(url, folder, serving.engine, serving.log))
    assert serving.engine is not None
    engine, log = serving.engine, out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    return lambda: serve(
        engine,
        folder,
        log=log,
        python=serving.python,
        dtype=serving.dtype,
        max_model_len=serving.max_model_len,
        options=serving.options,
        ready_s=serving.ready_s,
    )


def _report(arm: str, data: Data, say: Callable[[str], None]) -> int:
    """Say what of each cell has to be known; the exit code."""
    assert isinstance(data, ServingData)
    code = 0
    for cell in data.cells:
        summary = summarize(cell)
        for warning in summary.warnings:
            say(f"warning: {arm}, {cell.name}: {warning}")
        if summary.invalid:
            say(f"invalid: {arm}, {cell.name}: {summary.invalid}")
            code = INVALID
    return code


def import_served(path: Path, tool: str | None, concurrency: int | None, arm: str, out: Path, say: Callable[[str], None]) -> int:
    """One record of a load tool's result file; the exit code is 1 where it is invalid."""
    record = serving_record(path, arm, tool, concurrency)
    records.write(record, out)
    say(f"record: {out}")
    return _report(arm, record.data, say)
