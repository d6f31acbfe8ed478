"""The measuring half of a run: which folder stands for which arm, which records are already there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from qad import provenance, text
from qad.artifact import digest_of, open_artifact
from qad.stages import Job

if TYPE_CHECKING:
    from harness.records import Data, Engine

ROUND = ("bf16", "ptq", "qad", "qad", "ptq", "bf16")


class Measuring:
    """Measures the three arms of a run on their folders: BF16 is the source, PTQ and QAD are the exported folders."""

    def __init__(self, job: Job, out: Path, say: Callable[[str], None]) -> None:
        self.job, self.out, self.say = job, out, say
        self._models: dict[str, Any] = {}
        self._check_tasks()

    def _check_tasks(self) -> None:
        """An unknown task name is found before hours are spent."""
        from harness.accuracy import require_tasks

        if self.job.recipe.measure.accuracy:
            require_tasks(self.job.recipe.measure.accuracy.tasks)

    def folder(self, arm: str) -> Path:
        return self.job.source.folder if arm == "bf16" else self.out / "export" / arm

    def identity(self, arm: str) -> str:
        """Hash of the measured folder's contents."""
        return self.job.source.digest if arm == "bf16" else open_artifact(self.folder(arm), "checkpoint").digest

    # --- kinds ---

    def memory(self) -> None:
        from harness.engines.transformers import FILES
        from harness.memory import measure_memory

        if not self.job.recipe.measure.memory:
            return
        for arm in ROUND[:3]:
            if self._missing("memory", arm, {}):
                started = time.monotonic()
                self._write(arm, {}, FILES, measure_memory(self.folder(arm)), started)

    def fidelity(self) -> None:
        from harness.fidelity import measure_fidelity

        section = self.job.recipe.measure.fidelity
        if section is None:
            return
        docs = self.job.text["test"]
        sequences = text.sequences(docs, self.job.tokenizer, section.tokens, section.seq_len, self.job.recipe.seed)
        settings = {**section.model_dump(mode="json"), "text": text.digest_documents(docs), **self._teacher()}
        arms = [arm for arm in ROUND[:3] if self._missing("fidelity", arm, settings)]
        if not arms:
            return
        started = time.monotonic()
        students = {arm: self._load(arm).model for arm in arms if arm != "bf16"}
        with tqdm(total=len(sequences), desc="fidelity", unit="seq", mininterval=2.0) as bar:
            measured = measure_fidelity(
                students, self._load("bf16").model, sequences, section.data.path or section.data.source, bar.update
            )
        for arm in arms:
            self._write(arm, settings, self._load(arm).engine, measured[arm], started)

    def accuracy(self) -> None:
        from harness.accuracy import measure_accuracy

        section = self.job.recipe.measure.accuracy
        if section is None:
            return
        settings = {**section.model_dump(mode="json"), "seed": self.job.recipe.seed}
        for arm in ROUND[:3]:
            if not self._missing("accuracy", arm, settings):
                continue
            self.say(f"   {arm}: {', '.join(section.tasks)}")
            started = time.monotonic()
            loaded = self._load(arm)
            data = measure_accuracy(
                loaded.model, self.job.tokenizer, section.tasks, limit=section.limit, n_shot=section.n_shot,
                batch_size=section.batch_size, seed=self.job.recipe.seed,
            )  # fmt: skip
            self._write(arm, settings, loaded.engine, data, started)

    def throughput(self) -> None:
        """All arms interleaved, so that a drift of the machine's speed hits them alike."""
        from harness.throughput import measure_throughput_interleaved

        section = self.job.recipe.measure.throughput
        if section is None:
            return
        settings = {**section.model_dump(mode="json"), "seed": self.job.recipe.seed, **provenance.environment()}
        settings = {"shape": section.model_dump(mode="json"), "environment": digest_of(settings)}
        if not any(self._missing("throughput", arm, settings) for arm in ROUND[:3]):
            return
        started = time.monotonic()
        measured = measure_throughput_interleaved(
            {arm: self._load(arm).model for arm in ROUND[:3]}, vocab_size=len(self.job.tokenizer), batch=section.batch,
            input_tokens=section.input_tokens, output_tokens=section.output_tokens, repeats=section.repeats,
            seed=self.job.recipe.seed,
        )  # fmt: skip
        for arm, data in measured.items():
            self._write(arm, settings, self._load(arm).engine, data, started)

    # --- records ---

    def _teacher(self) -> dict[str, str]:
        return {"teacher": self.job.source.digest, "dtype": self.job.dtype}

    def _load(self, arm: str) -> Any:
        from harness.engines.transformers import load

        if arm not in self._models:
            self._models[arm] = load(self.folder(arm), self.job.dtype, self.job.device)
        return self._models[arm]

    def _path(self, kind: str, arm: str) -> Path:
        return self.out / "measure" / arm / f"{kind}.json"

    def _missing(self, kind: str, arm: str, settings: dict[str, Any]) -> bool:
        """True unless a record of the same weights under the same settings is there."""
        from harness import records

        path = self._path(kind, arm)
        if not path.is_file():
            return True
        try:
            found = records.read(path)
        except ValueError:
            return True
        return found.checkpoint != self.identity(arm) or found.settings != settings

    def _write(self, arm: str, settings: dict[str, Any], engine: Engine, data: Data, started: float) -> None:
        from harness import records

        record = records.Record(
            arm=arm,
            model=self.job.source.display_name,
            checkpoint=self.identity(arm),
            engine=engine,
            settings=settings,
            provenance=provenance.provenance(),
            created=provenance.now(),
            seconds=round(time.monotonic() - started, 1),
            data=data,
        )
        records.write(record, self._path(record.kind, arm))
