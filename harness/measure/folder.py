"""One record of one checkpoint folder, by hand: `qad measure KIND`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from harness.accuracy.section import Scoring, ServerChoice, finished
from harness.engines.available import EngineChoice
from harness.fidelity.section import test_sequences
from harness.measure import accuracy, fidelity, throughput
from harness.measure.subject import Found, Subject
from harness.memory.served import memory_of, memory_settings
from harness.records.record import AccuracyData
from qad.arms.origin import origin_of, reference_of
from qad.errors import UsageError
from qad.recipes.recipe import Accuracy, Fidelity, Throughput
from qad.text.packing import MINIMUM
from qad.text.sources import Need, Reader
from qad.untrusted import clean


@dataclasses.dataclass(frozen=True)
class How:
    """What of a measurement is no part of its section.

    noise_floor: the arm's control instead, under other conditions.
    server: one that has loaded the folder and is asked; None computes here.
    teacher: the BF16 original, for fidelity.
    other_teacher: the teacher is not the folder's original, on purpose.
    """

    noise_floor: bool = False
    server: ServerChoice | None = None
    teacher: Path | None = None
    other_teacher: bool = False
    say: Callable[[str], None] = lambda line: None


def measure_memory(folder: Path, out: Path, arm: str, dtype: str, seed: int, choice: EngineChoice | None) -> None:
    """choice: the engine that serves the folder and reports, its log beside `out`; None: the files alone."""
    subject, started = Subject.open(arm, folder, dtype, seed), time.monotonic()
    data, engine = memory_of(folder, choice, out.with_suffix(".log"), dtype)
    subject.write(out, Found(data, engine, memory_settings(choice)), started)


def measure_folder(
    folder: Path, out: Path, arm: str, section: Fidelity | Accuracy | Throughput, dtype: str, seed: int, how: How
) -> None:
    """One record of one folder.

    Raises UsageError where there is no teacher, or not the folder's own, or no control of this kind.
    """
    if how.server is not None and how.noise_floor:
        raise UsageError("--server and --noise-floor: a running server cannot be asked under other conditions")
    if isinstance(section, Fidelity) and how.teacher is None:
        raise UsageError("fidelity is a distance from a teacher: give --teacher BF16_DIR")
    subject, started = Subject.open(arm, folder, dtype, seed), time.monotonic()
    if isinstance(section, Accuracy):
        found = _accuracy(subject, section, out, how)
    elif isinstance(section, Throughput):
        found = throughput.measure([subject], section)[arm]
    else:
        found = _fidelity(subject, section, how)
    subject.write(out, found, started)
    finished(out)
    if isinstance(found.data, AccuracyData) and found.data.failed:
        how.say(f"warning: {arm}, {clean(found.data.failed, 600)}")


def _accuracy(subject: Subject, section: Accuracy, out: Path, how: How) -> Found:
    scoring = Scoring.of(section, subject.seed)
    scoring.require_data()
    if how.noise_floor:
        return accuracy.measure_again(subject, scoring, out)
    return accuracy.measure(subject, scoring, out, how.server)


def _fidelity(subject: Subject, section: Fidelity, how: How) -> Found:
    """A teacher that is not the folder's original is named in the settings; such a record is compared with its like only."""
    assert how.teacher is not None
    teacher = Subject.open(fidelity.TEACHER, how.teacher, subject.dtype, subject.seed)
    reference, told = reference_of(subject.source, teacher.source, how.other_teacher)
    if told:
        how.say(told)
    if section.split and origin_of(subject.folder).get("original") == teacher.source.digest:
        raise UsageError(
            f"--split gives the teacher's weights the inputs of {subject.folder}, whose channels were balanced: they belong to "
            "other weights. Give the run's own folder balanced, which has the original's bits, as --teacher"
        )
    if subject.arm == fidelity.TEACHER and subject.source.digest != teacher.source.digest:
        raise UsageError(
            f"--arm {fidelity.TEACHER} is the original's name, and {subject.folder} is another model: name it otherwise"
        )
    need = Need("test", section.tokens, section.seq_len, MINIMUM)
    documents = Reader(teacher.tokenizer, subject.seed).parts(section.data, need)
    text, settings = test_sequences(section, documents, teacher.tokenizer, subject.seed, teacher.source, subject.dtype)
    settings |= {"reference": reference} if reference else {}
    if how.server is not None:
        return fidelity.measure_served(how.server, teacher, section, text, settings)
    if how.noise_floor:
        return fidelity.measure_again(subject, section, text, settings)
    return fidelity.measure([subject], teacher, section, text, settings)[subject.arm]
