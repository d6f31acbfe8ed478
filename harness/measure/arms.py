"""Measure arms into records: OUT/measure/ARM/KIND.json. A record is made where none of the same weights and settings is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.accuracy.section import Scoring, finished
from harness.engines.available import run_engine
from harness.fidelity.section import test_sequences
from harness.measure import accuracy, fidelity, throughput
from harness.measure.subject import Found, Subject
from harness.memory.served import memory_of, memory_settings
from harness.records import record as records
from harness.serving.sweep import Plan
from qad.errors import EngineError, LoadToolError, UsageError
from qad.progress import Progress
from qad.recipes.recipe import Fidelity, Measure, Throughput
from qad.text.documents import Part
from qad.text.packing import Sequences

KINDS = ("memory", "fidelity", "accuracy", "throughput", "noise_floor")


class Measuring:
    """Measures arms as a recipe's section `measure` asks for.

    subjects: the arms; the one named bf16 is the teacher of the others.
    text: the documents of the test split, asked for where fidelity is measured.
    """

    def __init__(
        self, subjects: Sequence[Subject], section: Measure, text: Callable[[], list[Part]], out: Path, say: Callable[[str], None]
    ) -> None:
        self.subjects = {subject.arm: subject for subject in subjects}
        self.section, self.text, self.out, self.say = section, text, out, say

    def memory(self) -> None:
        """From the files, and from the engine where there is one; where `auto` found one that cannot serve, it is said."""
        if not self.section.memory:
            return
        choice = run_engine(self.section.engine)
        for subject in self._missing("memory", memory_settings(choice)):
            started, path = time.monotonic(), self._path("memory", subject)
            try:
                data, engine = memory_of(subject.folder, choice, path.with_suffix(".log"))
            except EngineError as error:
                if choice is None or self.section.engine != "auto":
                    raise
                self.say(f"   {subject.arm}: {choice.name} does not serve it, so its files are measured: {error}")
                choice = None
                data, engine = memory_of(subject.folder, None, path.with_suffix(".log"))
            subject.write(path, Found(data, engine, memory_settings(choice)), started)

    def fidelity(self) -> None:
        section = self.section.fidelity
        if section is None:
            return
        text, settings = self._test_text(section)
        missing = self._missing("fidelity", settings)
        if not missing:
            return
        started = time.monotonic()
        with Progress("fidelity", len(text.pairs), "seq") as bar:
            found = fidelity.measure(missing, self.subjects[fidelity.TEACHER], section, text, settings, bar.update)
        for subject in missing:
            subject.write(self._path("fidelity", subject), found[subject.arm], started)

    def accuracy(self, again: bool = False) -> None:
        section, first = self.section.accuracy, next(iter(self.subjects.values()))
        if section is None:
            return
        scoring = Scoring.of(section, first.seed)
        for subject in self._missing("accuracy", accuracy.settings(scoring, first.dtype), again):
            self.say(f"   {subject.arm}{' again' if again else ''}: {scoring.label}")
            started, path = time.monotonic(), self._path("accuracy", subject, again)
            if subject.device.startswith("cuda") and not again:
                for loaded in self.subjects.values():
                    loaded.release()
                accuracy.record_apart(subject, section, path)
                continue
            measure = accuracy.measure_again if again else accuracy.measure
            subject.write(path, measure(subject, scoring, path), started)
            finished(path)

    def throughput(self) -> None:
        """All arms interleaved, so that a drift of the machine's speed hits them alike. By the engine that serves them, else in
        this process."""
        section = self.section.throughput
        if section is None or self._served(section):
            return
        subjects = list(self.subjects.values())
        if not self._missing("throughput", throughput.settings(section, subjects[0])):
            return
        started = time.monotonic()
        with Progress("throughput", len(subjects) * section.repeats, "run") as bar:
            found = throughput.measure(subjects, section, bar.update)
        for subject in subjects:
            subject.write(self._path("throughput", subject), found[subject.arm], started)

    def _served(self, section: Throughput) -> bool:
        """Measure at a server of the run's engine. False: there is none, or `auto` found one that cannot be used."""
        choice, first = run_engine(self.section.engine), next(iter(self.subjects.values()))
        if choice is None:
            return False
        plan = Plan([section.batch], [section.input_tokens], [section.output_tokens], section.repeats, seed=first.seed)
        serving = throughput.Serving(choice.name, dtype=first.dtype)
        settings = throughput.serving_settings(plan, serving)
        if not self._missing("serving", settings):
            return True
        started = time.monotonic()
        places = [(subject, self._path("serving", subject)) for subject in self.subjects.values()]
        try:
            measured = throughput.measure_arms(places, plan, serving, self.say)
        except (EngineError, LoadToolError, UsageError) as error:
            if self.section.engine != "auto":
                raise
            self.say(f"   speed is measured in this process, not with {choice.name}: {error}")
            return False
        for subject, path in places:
            subject.write(path, measured[subject.arm], started)
        return True

    def noise_floor(self) -> None:
        """BF16 and NVFP4 (the PTQ arm) a second time, under conditions that should not matter."""
        if not self.section.noise_floor:
            return
        self.accuracy(again=True)
        if self.section.fidelity is None:
            return
        text, settings = self._test_text(self.section.fidelity)
        for subject in self._missing("fidelity", settings, again=True):
            started = time.monotonic()
            found = fidelity.measure_again(subject, self.section.fidelity, text, settings)
            subject.write(self._path("fidelity", subject, again=True), found, started)

    # --- which records are missing ---

    def _test_text(self, section: Fidelity) -> tuple[Sequences, dict[str, object]]:
        teacher = self.subjects[fidelity.TEACHER]
        return test_sequences(section, self.text(), teacher.tokenizer, teacher.seed, teacher.source, teacher.dtype)

    def _path(self, kind: str, subject: Subject, again: bool = False) -> Path:
        return self.out / "measure" / (f"{subject.arm}-again" if again else subject.arm) / f"{kind}.json"

    def _missing(self, kind: str, settings: dict[str, object], again: bool = False) -> list[Subject]:
        """Arms without a record of the same weights under the same settings; of controls those of BF16 and PTQ."""
        asked = [s for s in self.subjects.values() if not again or s.arm in ("bf16", "ptq")]
        return [s for s in asked if not _is_there(self._path(kind, s, again), s.identity, settings)]


def _is_there(path: Path, identity: str, settings: dict[str, object]) -> bool:
    try:
        found = records.read(path) if path.is_file() else None
    except ValueError:
        return False
    return found is not None and found.checkpoint == identity and found.settings == settings
