"""A record of scores that were made elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.records.record import Data, Engine, Record, from_json, to_json
from qad import provenance
from qad.artifact import digest_of, sha256_file
from qad.errors import DataError
from qad.untrusted import clean

MODEL = "imported results"


def require_one_model(models: Iterable[tuple[Path, str]], remedy: str) -> None:
    """models: files and the model each names, "" where it names none. Raises DataError naming two that differ."""
    named = {model: file for file, model in models if model}
    if len(named) > 1:
        (a, first), (b, second), *_ = named.items()
        raise DataError(f"{first} is of the model {clean(a)}, {second} of {clean(b)}: {remedy}")


def imported_record(
    arm: str,
    data: Data,
    settings: dict[str, object],
    engine: str,
    files: list[Path],
    form: str,
    source: str,
    model: str,
    left_out: Sequence[str] = (),
) -> Record:
    """A record whose provenance says that it was imported, from what, the files' hashes, and what of them it is without. Raises
    DataError where a value is not what a record holds in its place."""
    hashes = {path.name: sha256_file(path) for path in files}
    facts = {"format": form, "source": source, "files": hashes, "left_out": list(left_out)}
    record = Record(
        arm=arm,
        model=model,
        checkpoint=digest_of(hashes),
        settings=settings,
        engine=Engine(engine, "", "", "", f"imported from {form}", emulated=False),
        provenance={**provenance.provenance(), "imported": facts},
        created=provenance.now(),
        seconds=0.0,
        data=data,
    )
    try:
        return from_json(json.loads(json.dumps(to_json(record), allow_nan=False)))
    except (ValueError, OverflowError) as error:
        raise DataError(f"{files[0]} holds what no result is made of ({clean(error, 200)}): check the file") from error
