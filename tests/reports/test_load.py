"""A run folder with missing and damaged parts: each is named, none is invented, nothing raises."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from harness.records.record import Record
from reports.load import SplitText, load_records, load_run
from reports.sections import details, search


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
    (run / "metrics.jsonl").write_text('{"step": 1, "tokens": 5, "kl": NaN, "val_kl": "x", "lr": true}\n', encoding="utf-8")
    (step,) = load_run(run, load_records(run)).steps
    assert (step.kl, step.val_kl, step.lr) == (None, None, None)


def test_the_text_of_every_split_is_known_by_source(run: Path, records: list[Record]) -> None:
    """Calibration from the PTQ arm, train and validation from the trained one, test from the records; damage is no text."""
    assert load_run(run, records).text == []
    facts = {
        "ptq": {"tokens": {"calibration": 96}, "text": {"calibration": {"sources": {"a.txt": 96}, "counted": 96}}},
        "qad": {
            "tokens": {"train": 3000, "validation": 64},
            "text": {
                "train": {"sources": {"a.txt": 750, "random tokens": 250}, "counted": 400},
                "validation": {"sources": {"a.txt": 64}, "counted": 64},
                "odd": 3,
            },
        },
    }
    for arm, held in facts.items():
        (run / "arms" / arm / "arm.json").write_text(json.dumps(held), encoding="utf-8")
    (run / "arms" / "qat").mkdir()
    (run / "arms" / "qat" / "arm.json").write_text("{", encoding="utf-8")
    measured = [dataclasses.replace(record, settings={"sources": {"b.txt": 512}}) for record in records[:1]]
    text = load_run(run, measured).text
    assert text == [
        SplitText("calibration", {"a.txt": 96}),
        SplitText("train", {"a.txt": 750, "random tokens": 250}, counted=400, used=3000),
        SplitText("validation", {"a.txt": 64}),
        SplitText("test", {"b.txt": 512}),
    ]
    table = details.text(text)
    assert table is not None
    train = table.groups[1]
    assert train.title == "train: 1,000 tokens, 40.0 % of the positions in the loss, 3,000 over all epochs"
    assert [(row.label, *(cell.text for cell in row.cells)) for row in train.rows] == [
        ("a.txt", "750", "75.0 %"),
        ("random tokens", "250", "25.0 %"),
    ]


def test_a_search_is_shown_by_kind_and_by_layer_as_it_was_chosen(run: Path, records: list[Record]) -> None:
    """What is neither among the formats nor the usual one stays BF16; damage is no search."""
    assert search.searched(load_run(run, records)) is None
    units = [
        {"name": f"m.{layer}.{leaf}", "modules": [f"m.{layer}.{leaf}"], "kl": {"NVFP4": kl, "FP8": kl / 10}}
        for layer, leaf, kl in ((0, "q_proj", 0.2), (0, "o_proj", 0.1), (1, "q_proj", 0.4), (1, "o_proj", 0.3))
    ]
    (run / "search").mkdir()
    (run / "search" / "sensitivity.json").write_text(json.dumps({"tokens": 2048, "units": units}), encoding="utf-8")
    selection = {
        "format": "NVFP4",
        "formats": {"m.1.q_proj": "FP8"},
        "modules": {"m.0.q_proj": [16, 16], "m.0.o_proj": [16, 16], "m.1.q_proj": [16, 16]},
    }
    (run / "arms" / "ptq" / "selection.json").write_text(json.dumps(selection), encoding="utf-8")
    table = search.searched(load_run(run, records))
    assert table is not None
    assert "2,048 tokens" in table.note
    assert [[(row.label, *(cell.text for cell in row.cells)) for row in group.rows] for group in table.groups] == [
        [("q_proj", "0.600", "0.0600", "0.240", "1 FP8, 1 NVFP4"), ("o_proj", "0.400", "0.0400", "0.100", "1 BF16, 1 NVFP4")],
        [("Layer 0", "0.300", "0.0300", "0.300", "2 NVFP4"), ("Layer 1", "0.700", "0.0700", "0.0400", "1 BF16, 1 FP8")],
    ]
    (run / "search" / "sensitivity.json").write_text("{}", encoding="utf-8")
    assert search.searched(load_run(run, records)) is None
