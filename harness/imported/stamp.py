"""A record of scores that were made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.records.record import Data, Engine, Record
from qad import provenance
from qad.artifact import digest_of, sha256_file

MODEL = "imported scores"


def imported_record(
    arm: str, data: Data, settings: dict[str, Any], engine: str, files: list[Path], form: str, source: str, model: str
) -> Record:
    """A record whose provenance says that it was imported, from what, and the files' hashes."""
    hashes = {path.name: sha256_file(path) for path in files}
    facts = {"format": form, "source": source, "files": hashes}
    return Record(
        arm=arm, model=model, checkpoint=digest_of(hashes), settings=settings,
        engine=Engine(engine, "", "", "", f"imported from {form}", emulated=False),
        provenance={**provenance.provenance(), "imported": facts}, created=provenance.now(), seconds=0.0, data=data,
    )  # fmt: skip
