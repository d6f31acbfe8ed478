"""Every sample of an accuracy measurement, as a Parquet file beside its record: MEASURE/ARM/accuracy.samples.parquet."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from qad.place import write_whole
from qad.untrusted import utf8

SUFFIX = ".samples.parquet"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer under one filter. repeat: 0, 1, ... of one question; seed: what it was drawn with.

    tokens, thinking_tokens: generated; None for a task that generates nothing, or where nobody counted. finish: stop,
    length, error or "". text: all that was said, thinking included; of a multiple-choice task the choice. scored: what the
    filter left of it.
    """

    task: str
    filter: str
    doc_hash: str
    prompt_hash: str
    target_hash: str
    cluster: str
    repeat: int
    seed: int
    score: float
    metric: str
    tokens: int | None
    thinking_tokens: int | None
    finish: str
    loops: bool
    empty: bool
    prompt: str
    target: str
    text: str
    scored: str


_KINDS = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
_HINTS = {field.name: str(field.type) for field in dataclasses.fields(Sample)}  # as they are written above
_SCHEMA = pa.schema(
    [pa.field(name, _KINDS[hint.removesuffix(" | None")], nullable=hint.endswith("None")) for name, hint in _HINTS.items()]
)


def samples_path(record: Path) -> Path:
    """Where the samples of a record lie."""
    return record.with_name(record.stem + SUFFIX)


def write_samples(samples: list[Sample], path: Path) -> None:
    """Write aside, then rename."""
    found = {f.name: [getattr(s, f.name) for s in samples] for f in dataclasses.fields(Sample)}
    columns = {name: [utf8(v) if isinstance(v, str) else v for v in values] for name, values in found.items()}
    table = pa.table(columns, schema=_SCHEMA)
    with io.BytesIO() as content:
        pq.write_table(table, content, compression="zstd")
        write_whole(path, content.getvalue())
