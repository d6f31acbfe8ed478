"""The flat tables: CSV and Parquet hold the same rows, every digit, and text that is text."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest

from harness.compare.recovery import compare
from harness.records.record import AccuracyData, Record
from reports.load import load_run
from reports.rows import table_files
from reports.sections import items

NAMES = ["estimates", "items", "memory", "parity", "throughput", "training"]


def tables(run: Path, records: list[Record]) -> dict[str, bytes]:
    return table_files(compare(records), records, load_run(run, records), items.pairs(records))


@pytest.mark.parametrize("name", NAMES)
def test_csv_and_parquet_agree(run: Path, records: list[Record], name: str) -> None:
    files = tables(run, records)
    exact = pyarrow.parquet.read_table(io.BytesIO(files[f"{name}.parquet"]))
    types = pyarrow.csv.ConvertOptions(column_types=exact.schema, strings_can_be_null=False)
    read = pyarrow.csv.read_csv(io.BytesIO(files[f"{name}.csv"]), convert_options=types)
    assert (exact.num_rows > 0) == (name != "parity")  # no engine was held against the reference
    assert read.to_pylist() == exact.to_pylist()


def test_estimates_keep_every_digit(run: Path, records: list[Record]) -> None:
    comparison = compare(records)
    rows = pyarrow.parquet.read_table(io.BytesIO(tables(run, records)["estimates.parquet"])).to_pylist()
    (kl,) = [row for row in rows if row["quantity"] == "kl" and row["arm"] == "qad"]
    found = comparison.fidelity["qad"].kl
    assert (kl["value"], kl["low"], kl["high"]) == (found.value, found.low, found.high)
    assert {row["quantity"] for row in rows} == {
        "score",
        "recovery",
        "recovery_above_chance",
        "median_recovery",
        "worst_recovery",
        "median_gain",
        "difference",
        "kl",
        "top1",
        "perplexity",
        "perplexity_ratio",
        "kl_ratio",
        "perplexity_gap_closed",
        "speed_ratio",
        "size_ratio",
    }


def test_a_run_without_measurements_has_empty_tables(tmp_path: Path) -> None:
    files = tables(tmp_path, [])
    assert sorted(files) == sorted(f"{name}.{kind}" for name in NAMES for kind in ("csv", "parquet"))
    assert files["memory.csv"] == b'"arm","class","bytes"\n'


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ('=HYPERLINK("http://x")', '\'=HYPERLINK("http://x")'),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@x", "'@x"),
        ('a,b\nc\r"d"', 'a,b\ufffdc\ufffd"d"'),
        ("\u202egnp\x00\ud800", "\ufffdgnp\ufffd?"),
        ("W" * 10_000, "W" * 399 + "…"),
    ],
)
def test_hostile_names_are_one_line_of_text(run: Path, records: list[Record], name: str, shown: str) -> None:
    """In CSV; Parquet has them as they are, but for what is no UTF-8."""

    def renamed(record: Record) -> Record:
        data: Any = record.data
        if isinstance(data, AccuracyData):
            data = AccuracyData([dataclasses.replace(data.tasks[0], task=name)])
        return dataclasses.replace(record, data=data)

    files = tables(run, [renamed(record) for record in records if record.kind == "accuracy"])
    read = pyarrow.csv.read_csv(io.BytesIO(files["items.csv"]))
    assert read.num_rows == 600
    assert set(read["task"].to_pylist()) == {shown}
    exact = pyarrow.parquet.read_table(io.BytesIO(files["items.parquet"]))
    assert set(exact["task"].to_pylist()) == {name.replace("\ud800", "?")}
