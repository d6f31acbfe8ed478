"""reports/schema.json is what the data classes say, and every report keeps to it."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from harness.compare.gate import judge
from harness.compare.policy import DEFAULT, load_policy
from harness.compare.recovery import compare
from harness.records.record import MemoryData, Record
from reports import schema
from reports.render import render


def test_the_published_schema_is_current() -> None:
    assert schema.PATH.read_text(encoding="utf-8") == schema.text(), "run python -m reports.schema"


def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    published = json.loads(schema.PATH.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def report(run: Path, records: list[Record], verdict: bool = True) -> dict[str, Any]:
    comparison = compare(records)
    judged = judge(comparison, load_policy(DEFAULT)) if verdict else None
    raw: dict[str, Any] = json.loads(render(run, comparison, records, judged)[2].read_text(encoding="utf-8"))
    return raw


def test_reports_keep_to_it(run: Path, tmp_path: Path, records: list[Record]) -> None:
    check = validator()
    assert list(check.iter_errors(report(run, records))) == []
    assert list(check.iter_errors(report(tmp_path / "empty", [], verdict=False))) == []


def test_numbers_that_are_not_finite_keep_to_it(run: Path, records: list[Record]) -> None:
    def empty(record: Record) -> Record:
        if not isinstance(record.data, MemoryData):
            return record
        return dataclasses.replace(record, data=dataclasses.replace(record.data, parameters=0), seconds=float("nan"))

    raw = report(run, [empty(record) for record in records])
    assert raw["memory"]["qad"]["effective_bits"] is None
    assert list(validator().iter_errors(raw)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema_version"], 1),
        (["verdict", "outcome"], 3),
        (["comparison", "benchmarks", 0, "n"], "300"),
        (["comparison", "fidelity", "qad", "kl", "low"], "0"),
        (["training", 0, "extra"], 1),
        (["memory", "qad", "data", "bytes_by_class"], []),
    ],
)
def test_it_refuses_what_a_report_is_not(run: Path, records: list[Record], path: list[Any], value: Any) -> None:
    raw = report(run, records)
    changed = copy.deepcopy(raw)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert list(validator().iter_errors(changed))
