"""Items beside BF16's: what changed is counted whole, shown in part, and said in the arms' own words where they were kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.compare.recovery import compare
from harness.records.record import AccuracyData, Item, Record, TaskScore
from reports.render import render
from reports.sections import items

Make = Callable[..., Record]
Keep = Callable[..., None]


def accuracy(arm: str, scores: list[float], make: Callable[..., Record], **task: Any) -> Record:
    """`scores` of as many questions."""
    asked = [Item(f"d{i}", f"p{i}", f"t{i}", f"d{i}", score) for i, score in enumerate(scores)]
    fields = {"higher_is_better": True, "chance": None, "limit": None, **task}
    return make(arm, AccuracyData([TaskScore("quiz", "1", "acc", "none", 0, items=asked, **fields)]))


def test_worse_better_and_same(record_of: Make) -> None:
    records = [accuracy(arm, scores, record_of) for arm, scores in (("bf16", [1, 1, 0, 0]), ("ptq", [1, 0, 1, 0]))]
    assert [pair.change for pair in items.pairs(records)] == ["same", "worse", "better", "same"]


def test_where_lower_is_better_more_is_worse(record_of: Make) -> None:
    records = [accuracy(arm, [score], record_of, higher_is_better=False) for arm, score in (("bf16", 2.0), ("ptq", 3.0))]
    assert [pair.change for pair in items.pairs(records)] == ["worse"]


def test_several_answers_to_one_question_pair_in_their_order(record_of: Make) -> None:
    def repeated(arm: str, scores: list[float]) -> Record:
        found = [Item("d", "p", "t", "d", score) for score in scores]
        data = AccuracyData([TaskScore("quiz", "1", "acc", "none", 0, True, None, None, found)])
        return record_of(arm, data)

    found = items.pairs([repeated("bf16", [1, 0]), repeated("qad", [1, 1])])
    assert [(pair.repeat, pair.change) for pair in found] == [(0, "same"), (1, "better")]


def test_an_item_that_bf16_did_not_answer_is_no_pair(record_of: Make) -> None:
    records = [accuracy("bf16", [1], record_of), accuracy("ptq", [1, 0], record_of)]
    assert len(items.pairs(records)) == 1


def test_the_page_shows_some_and_the_table_all(run: Path, records: list[Record], keep_samples: Keep) -> None:
    keep_samples(run, records)
    found = items.pairs(records)
    paths = render(run, compare(records), records)
    html, md = (path.read_text(encoding="utf-8") for path in paths[:2])
    import pyarrow.parquet as pq

    table = pq.read_table(run / "report" / "tables" / "items.parquet")
    assert table.num_rows == len(found) == 2 * (300 + 306)
    changed = {pair.key for pair in found if pair.task == "qad_facts" and pair.change != "same"}
    assert f"{len(changed)} items changed under some arm, {items.PER_BENCHMARK} shown" in html
    assert html.count('<p class="which">') == md.count("**Asked**") == 2 * items.PER_BENCHMARK
    assert "Is d" in html


def test_worse_items_come_first(records: list[Record]) -> None:
    rows = compare(records).benchmarks
    for groups in items.shown(rows, items.pairs(records)).values():
        places = [("worse", "better", "same").index(group[-1].change) for group in groups]
        assert places == sorted(places)
        assert places[0] == 0


def test_many_benchmarks_share_the_page(records: list[Record]) -> None:
    """A hundred tasks: one example each, not six hundred."""

    def many(record: Record) -> Record:
        if not isinstance(record.data, AccuracyData):
            return record
        tasks = [dataclasses.replace(record.data.tasks[0], task=f"task{i}") for i in range(100)]
        return dataclasses.replace(record, data=AccuracyData(tasks))

    changed = [many(record) for record in records if record.kind == "accuracy"]
    rows = [dataclasses.replace(compare(records).benchmarks[0], task=f"task{i}") for i in range(100)]
    shown = items.shown(rows, items.pairs(changed))
    assert len(shown) == 100
    assert {len(groups) for groups in shown.values()} == {1}


def test_damaged_samples_are_no_samples(run: Path, records: list[Record], keep_samples: Keep) -> None:
    keep_samples(run, records)
    for arm in ("bf16", "ptq", "qad"):
        (run / "measure" / arm / items.SAMPLES).write_bytes(b"no Parquet")
    md = render(run, compare(records), records)[1].read_text(encoding="utf-8")
    assert "**Asked**" not in md
    assert "items changed under some arm" in md


def test_flips_add_up(records: list[Record]) -> None:
    found = [pair for pair in items.pairs(records) if pair.task == "qad_facts" and pair.arm == "qad"]
    table = items._flips("quiz", found)
    assert table.columns == ["", "Both right", "Only BF16", "Only the arm", "Both wrong", "n"]
    *counts, n = [cell.text for cell in table.groups[0].rows[0].cells]
    assert sum(map(int, counts)) == 306
    assert n == "306 answers"
    worse, better = compare(records).benchmarks[1].flips["qad"]
    assert counts[1:3] == [str(worse), str(better)]


def test_scores_between_right_and_wrong_have_no_right_and_wrong(record_of: Make) -> None:
    records = [accuracy(arm, scores, record_of) for arm, scores in (("bf16", [0.5, 0.2]), ("ptq", [0.5, 0.4]))]
    table = items._flips("quiz", items.pairs(records))
    assert table.columns == ["", "Worse", "Equal", "Better", "n"]
    assert [cell.text for cell in table.groups[0].rows[0].cells] == ["0", "1", "1", "2 answers"]
