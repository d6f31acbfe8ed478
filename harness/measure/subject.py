"""What is measured: a checkpoint folder under an arm's name. And what comes of it, which becomes a record."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from pathlib import Path
from typing import Any

import torch

from harness.engines.transformers import LoadedModel, load
from harness.records import record as records
from harness.records.record import Data, Engine
from qad import provenance
from qad.arms.origin import training_of
from qad.artifact import MANIFEST, open_artifact
from qad.model.loader import default_device, load_tokenizer, resolve_dtype
from qad.model.source import Checkpoint, open_checkpoint


@dataclasses.dataclass(frozen=True)
class Found:
    """A measurement before it is stamped.

    settings: what has to be equal between arms that are compared.
    control: of a second measurement, the conditions that were changed on purpose.
    """

    data: Data
    engine: Engine
    settings: dict[str, object]
    control: dict[str, object] | None = None


@dataclasses.dataclass(frozen=True)
class Subject:
    """One arm's folder.

    source: the folder, opened; BF16 or quantized.
    model: what a record calls the model.
    dtype: in which this process computes, resolved.
    seed: of everything that is drawn.
    """

    arm: str
    source: Checkpoint
    model: str
    dtype: str
    device: str
    seed: int

    @classmethod
    def open(cls, arm: str, folder: Path, dtype: str, seed: int, model: str | None = None) -> Subject:
        """Raises SourceError, UsageError for what is no checkpoint folder."""
        source, device = open_checkpoint(folder, allow_quantized=True), default_device()
        return cls(arm, source, model or source.display_name, resolve_dtype(dtype, device), device, seed)

    @property
    def folder(self) -> Path:
        return self.source.folder

    @functools.cached_property
    def identity(self) -> str:
        """Digest of the weights that are measured: of a folder this tool wrote its own, else the hash of its files."""
        return open_artifact(self.folder).digest if (self.folder / MANIFEST).is_file() else self.source.digest

    @functools.cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        """The model in this process, loaded once."""
        return self.load()

    def load(self, attention: str | None = None) -> LoadedModel:
        """attention: transformers' name of a kernel, None for its choice."""
        return load(self.folder, self.dtype, self.device, attention)

    def release(self) -> None:
        """Give back what the loaded model holds."""
        self.__dict__.pop("loaded", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def write(self, path: Path, found: Found, started: float) -> None:
        """Stamp and write the record. started: of the clock `time.monotonic`. Raises StorageError."""
        training = training_of(self.folder)
        record = records.Record(
            arm=self.arm,
            model=self.model,
            checkpoint=self.identity,
            engine=found.engine,
            settings=found.settings,
            provenance=provenance.provenance(),
            created=provenance.now(),
            seconds=round(time.monotonic() - started, 1),
            data=found.data,
            control=found.control,
            training=records.Training(**training) if training else None,
        )
        records.write(record, path)
