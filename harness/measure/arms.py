"""Measure the arms of a run into records, each on its checkpoint folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from harness.accuracy.section import Scoring, finished, score_loaded
from harness.engines.available import run_engine
from harness.fidelity.section import measure_distances, test_sequences
from harness.measure.again import accuracy_again, fidelity_again
from harness.measure.own_process import run_alone
from harness.measure.stamp import throughput_settings, write_record
from harness.memory.served import memory_of, memory_settings
from qad.arms.origin import training_of
from qad.artifact import open_artifact
from qad.errors import EngineError, LoadToolError, UsageError
from qad.recipes.job import Job
from qad.recipes.recipe import Accuracy, Fidelity, Throughput
from qad.text.packing import Sequences

if TYPE_CHECKING:
    from harness.records.record import Data, Engine


class Measuring:
    """Measures the arms of a run on their folders: BF16 is the source, PTQ and QAD are the exported folders.

    A record is made only where none of the same weights under the same settings is there.
    """

    def __init__(self, job: Job, out: Path, say: Callable[[str], None]) -> None:
        self.job, self.out, self.say = job, out, say
        self.arms = ("bf16", "ptq", *job.recipe.methods)
        self._models: dict[str, Any] = {}
        section = job.recipe.measure.accuracy
        self._scoring = Scoring.of(section, job.recipe.seed) if section else None

    def memory(self) -> None:
        """From the files, and from the engine where there is one; where `auto` found one that cannot serve, it is said."""
        if not self.job.recipe.measure.memory:
            return
        choice = run_engine(self.job.recipe.measure.engine)
        for arm in self.arms:
            if not self._missing("memory", arm, memory_settings(choice)):
                continue
            started, log = time.monotonic(), self._path("memory", arm).with_suffix(".log")
            try:
                data, engine = memory_of(self._folder(arm), choice, log)
            except EngineError as error:
                if choice is None or self.job.recipe.measure.engine != "auto":
                    raise
                self.say(f"   {arm}: {choice.name} does not serve it, so its files are measured: {error}")
                choice = None
                data, engine = memory_of(self._folder(arm), None, log)
            self._write(arm, memory_settings(choice), engine, data, started)

    def fidelity(self) -> None:
        section = self.job.recipe.measure.fidelity
        if section is None:
            return
        sequences, settings = self._test_sequences(section)
        arms = [arm for arm in self.arms if self._missing("fidelity", arm, settings)]
        if not arms:
            return
        started = time.monotonic()
        students = {arm: self._load(arm).model for arm in arms if arm != "bf16"}
        with tqdm(total=len(sequences.pairs), desc="fidelity", unit="seq", mininterval=2.0) as bar:
            measured = measure_distances(
                section, students, self._load("bf16").model, sequences, self.job.recipe.seed, bar.update
            )
        for arm in arms:
            self._write(arm, settings, self._load(arm).engine, measured[arm], started)

    def accuracy(self) -> None:
        scoring = self._scoring
        if scoring is None:
            return
        settings = {**scoring.settings, "dtype": self.job.dtype}
        for arm in self.arms:
            if self._missing("accuracy", arm, settings):
                self.say(f"   {arm}: {scoring.label}")
                started, path = time.monotonic(), self._path("accuracy", arm)
                if self.job.device.startswith("cuda"):
                    self._alone(arm, path)
                    continue
                loaded = self._load(arm)
                data = score_loaded(loaded, scoring, self._identity(arm), path)
                self._write(arm, settings, loaded.engine, data, started)
                finished(path)

    def _alone(self, arm: str, path: Path) -> None:
        """One process a model: an engine that does not give a GPU's memory back would decide how the next one is measured."""
        section = self.job.recipe.measure.accuracy
        assert section is not None
        self._models.clear()
        release()
        run_alone("harness.measure.arms:accuracy_alone", {
            "folder": str(self._folder(arm)), "record": str(path), "arm": arm, "model": self.job.source.display_name,
            "checkpoint": self._identity(arm), "section": section.model_dump(mode="json"),
            "seed": self.job.recipe.seed, "dtype": self.job.dtype, "device": self.job.device,
        })  # fmt: skip

    def throughput(self) -> None:
        """All arms interleaved, so that a drift of the machine's speed hits them alike. By the engine that serves them, else in
        this process."""
        from harness.serving.in_process import measure_throughput_interleaved

        section = self.job.recipe.measure.throughput
        if section is None or self._served(section):
            return
        settings = throughput_settings(section, self.job.recipe.seed, self.job.dtype)
        if not any(self._missing("throughput", arm, settings) for arm in self.arms):
            return
        started = time.monotonic()
        models = {arm: self._load(arm).model for arm in self.arms}
        with tqdm(total=len(self.arms) * section.repeats, desc="throughput", unit="run", mininterval=2.0) as bar:
            measured = measure_throughput_interleaved(
                models, **section.model_dump(), vocab_size=len(self.job.tokenizer), seed=self.job.recipe.seed,
                progress=bar.update,
            )  # fmt: skip
        for arm, data in measured.items():
            self._write(arm, settings, self._load(arm).engine, data, started)

    def _served(self, section: Throughput) -> bool:
        """Measure at a server of the run's engine. False: there is none, or `auto` found one that cannot be used."""
        from harness.measure.throughput import Serving, measure_arms, serving_settings
        from harness.serving.sweep import Plan

        choice, recipe = run_engine(self.job.recipe.measure.engine), self.job.recipe
        if choice is None:
            return False
        plan = Plan([section.batch], [section.input_tokens], [section.output_tokens], section.repeats, seed=recipe.seed)
        serving = Serving(choice.name, choice.python, recipe.dtype, choice.max_model_len, choice.options)
        settings = serving_settings(plan, serving)
        if not any(self._missing("serving", arm, settings) for arm in self.arms):
            return True
        started = time.monotonic()
        places = {arm: (self._folder(arm), self._path("serving", arm)) for arm in self.arms}
        try:
            measured = measure_arms(places, plan, serving, self.say)
        except (EngineError, LoadToolError, UsageError) as error:
            if recipe.measure.engine != "auto":
                raise
            self.say(f"   speed is measured in this process, not with {choice.name}: {error}")
            return False
        for arm, (data, engine) in measured.items():
            self._write(arm, settings, engine, data, started)
        return True

    def noise_floor(self) -> None:
        """BF16 and NVFP4 (the PTQ arm) a second time, under conditions that should not matter."""
        for arm in ("bf16", "ptq") if self.job.recipe.measure.noise_floor else ():
            self._accuracy_again(arm)
            self._fidelity_again(arm)

    def _accuracy_again(self, arm: str) -> None:
        scoring = self._scoring
        settings = {**scoring.settings, "dtype": self.job.dtype} if scoring else {}
        if scoring is None or not self._missing("accuracy", arm, settings, again=True):
            return
        self.say(f"   {arm} again: {scoring.label}")
        path, started = self._path("accuracy", arm, again=True), time.monotonic()
        found = accuracy_again(self._folder(arm), scoring, self.job.dtype, self.job.device, self._identity(arm), path)
        self._write(arm, settings, found.engine, found.data, started, found.conditions)
        finished(path)

    def _fidelity_again(self, arm: str) -> None:
        section = self.job.recipe.measure.fidelity
        if section is None:
            return
        sequences, settings = self._test_sequences(section)
        if self._missing("fidelity", arm, settings, again=True):
            started = time.monotonic()
            found = fidelity_again(
                self._load(arm).model,
                self._folder(arm),
                sequences.pairs,
                section.data.name,
                self.job.dtype,
                self.job.device,
            )
            self._write(arm, settings, found.engine, found.data, started, found.conditions)

    # --- folders and records ---

    def _test_sequences(self, section: Fidelity) -> tuple[Sequences, dict[str, Any]]:
        job = self.job
        return test_sequences(section, job.text["test"], job.tokenizer, job.recipe.seed, job.source, job.dtype)

    def _folder(self, arm: str) -> Path:
        return self.job.source.folder if arm == "bf16" else self.out / "export" / arm

    def _identity(self, arm: str) -> str:
        return self.job.source.digest if arm == "bf16" else open_artifact(self._folder(arm), "checkpoint").digest

    def _load(self, arm: str) -> Any:
        from harness.engines.transformers import load

        if arm not in self._models:
            self._models[arm] = load(self._folder(arm), self.job.dtype, self.job.device)
        return self._models[arm]

    def _path(self, kind: str, arm: str, again: bool = False) -> Path:
        return self.out / "measure" / (f"{arm}-again" if again else arm) / f"{kind}.json"

    def _missing(self, kind: str, arm: str, settings: dict[str, Any], again: bool = False) -> bool:
        from harness.records import record as records

        path = self._path(kind, arm, again)
        if not path.is_file():
            return True
        try:
            found = records.read(path)
        except ValueError:
            return True
        return found.checkpoint != self._identity(arm) or found.settings != settings

    def _write(
        self, arm: str, settings: dict[str, Any], engine: Engine, data: Data, started: float,
        control: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        path = self._path(data.KIND, arm, again=control is not None)
        name = self.job.source.display_name
        training = training_of(self._folder(arm))
        write_record(path, arm, name, self._identity(arm), settings, engine, data, started, control, training)


def release() -> None:
    """Give back what dropped models held."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def accuracy_alone(
    folder: str, record: str, arm: str, model: str, checkpoint: str, section: dict[str, Any], seed: int, dtype: str,
    device: str,
) -> None:  # fmt: skip
    """The accuracy record of one arm, for `run_alone`."""
    from harness.engines.transformers import load

    scoring, started, path = Scoring.of(Accuracy.model_validate(section), seed), time.monotonic(), Path(record)
    loaded = load(Path(folder), dtype, device)
    data = score_loaded(loaded, scoring, checkpoint, path)
    settings = {**scoring.settings, "dtype": dtype}
    training = training_of(Path(folder))
    write_record(path, arm, model, checkpoint, settings, loaded.engine, data, started, training=training)
    finished(path)
