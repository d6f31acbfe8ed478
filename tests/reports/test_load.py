"""A run folder with missing and damaged parts: each is named, none is invented, nothing raises."""

from __future__ import annotations

import json
from pathlib import Path

from harness.records import Record
from reports.load import load_records, load_run


def test_a_whole_run(run: Path, records: list[Record]) -> None:
    found = load_records(run)
    assert {(r.arm, r.kind) for r in found} == {(r.arm, r.kind) for r in records}
    loaded = load_run(run, found)
    assert loaded.missing == []
    assert [step.step for step in loaded.steps] == list(range(51))
    assert loaded.steps[0].kl is None
    assert loaded.steps[0].val_kl == 0.442
    assert loaded.steps[1].val_kl is None
    assert loaded.recipe.startswith("model: ")
    assert list(loaded.manifests) == ["arms/ptq", "arms/qad", "export/qad"]


def test_missing_parts_are_named(tmp_path: Path) -> None:
    loaded = load_run(tmp_path, load_records(tmp_path))
    assert len(loaded.missing) == 4 * 3 + 2
    assert loaded.missing[0] == ("accuracy of bf16", "not measured: there is no record")
    assert loaded.missing[-2][0] == "training curve"
    assert loaded.missing[-1][0] == "recipe"


def test_a_damaged_record_is_named_with_its_reason(run: Path) -> None:
    (run / "measure" / "ptq" / "fidelity.json").write_text('{"kind": "fidelity"}', encoding="utf-8")
    (run / "measure" / "qad" / "parity.json").write_text("not JSON", encoding="utf-8")
    found = load_records(run)
    assert len(found) == 11
    missing = dict(load_run(run, found).missing)
    assert "record has schema None" in missing["fidelity of ptq"]
    assert "cannot be read" in missing["parity of qad"]


def test_a_resumed_log_counts_each_step_once(run: Path) -> None:
    """Killed after step 7 and resumed at 5: the later lines count. The line cut off by the kill is named."""
    lines = [{"step": s, "tokens": 10 * s, "kl": 1.0, "lr": 0.1, "tokens_per_s": 5.0, "val_kl": None} for s in range(8)]
    again = [{**line, "kl": 2.0} for line in lines[5:]]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 8, "tok\n' + "\n".join(map(json.dumps, again)) + "\n"
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    loaded = load_run(run, load_records(run))
    assert [(s.step, s.kl) for s in loaded.steps] == [(s, 1.0 if s < 5 else 2.0) for s in range(8)]
    assert loaded.missing == [("1 lines of metrics.jsonl", "they cannot be read")]


def test_numbers_that_are_none_are_unknown(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "tokens": 5, "kl": NaN, "val_kl": "x", "lr": true}\n', encoding="utf-8"
    )
    (step,) = load_run(run, load_records(run)).steps
    assert (step.kl, step.val_kl, step.lr) == (None, None, None)
