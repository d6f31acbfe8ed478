"""What every record says of itself: whose weights were measured, on what, when and by what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.records import record as records
from harness.records.record import Data, Engine, Record
from qad import provenance
from qad.artifact import MANIFEST, open_artifact
from qad.errors import StorageError
from qad.model.source import Checkpoint


def folder_identity(source: Checkpoint) -> str:
    """The digest of a folder this tool wrote, else the hash of its files."""
    return open_artifact(source.folder).digest if (source.folder / MANIFEST).is_file() else source.digest


def write_record(
    path: Path,
    arm: str,
    model: str,
    checkpoint: str,
    settings: dict[str, Any],
    engine: Engine,
    data: Data,
    started: float,
    control: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
) -> None:
    """Stamp a measurement with its provenance and write it. started: of the clock `time.monotonic`. control: see
    `Record`; training: see `qad.arms.origin.training_of`."""
    record = records.Record(
        arm=arm,
        model=model,
        checkpoint=checkpoint,
        engine=engine,
        settings=settings,
        provenance=provenance.provenance(),
        created=provenance.now(),
        seconds=round(time.monotonic() - started, 1),
        data=data,
        control=control,
        training=records.Training(**training) if training else None,
    )
    keep(record, path)


def keep(record: Record, path: Path) -> None:
    """Write a record. Raises StorageError where that fails."""
    try:
        records.write(record, path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}. Make room, or choose a place that can be written, and run the same "
            "command again"
        ) from error
