"""What answers look like, failed requests, several seeds of one arm."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from harness.compare.gate import judge
from harness.compare.policy import AtMost, Policy
from harness.compare.recovery import compare
from harness.records.comparison import from_json as comparison_from_json
from harness.records.comparison import to_json as comparison_to_json
from harness.records.record import AccuracyData, Engine, Item, Outputs, Record, TaskScore, from_json, to_json
from qad.errors import DataError

ENGINE = Engine("transformers", "5.24", "float32", "cpu", "torch", emulated=False)
SERVER = dataclasses.replace(ENGINE, name="server")


def outputs(tokens: list[int | None], **changes: Any) -> Outputs:
    n = len(tokens)
    plain: dict[str, Any] = {
        "tokens": tokens,
        "thinking_tokens": [None] * n,
        "finish": ["stop"] * n,
        "loops": [False] * n,
        "empty": [False] * n,
    }
    return Outputs(**{**plain, **changes})


def record(arm: str, scores: list[float], answers: Outputs | None = None, *, prefix: str = "", **changes: Any) -> Record:
    items = [Item(f"d{i}", f"{prefix}p{i}", f"t{i}", f"c{i}", score) for i, score in enumerate(scores)]
    task = TaskScore("sums", "1", "exact_match", "none", 0, True, None, None, items, outputs=answers)
    fields: dict[str, Any] = {
        "arm": arm,
        "model": "tiny",
        "checkpoint": f"hash-{arm}",
        "engine": ENGINE,
        "settings": {"seed": 0},
        "provenance": {},
        "created": "",
        "seconds": 1.0,
        "data": AccuracyData([task]),
    }
    return Record(**{**fields, **changes})


def test_lengths_cut_offs_and_tokens_per_correct_answer_by_hand() -> None:
    n = 20
    base = record("bf16", [1.0] * 10 + [0.0] * 10, outputs([10] * n))
    longer = outputs(
        [*[10] * 15, *[30] * 5],
        finish=[*["stop"] * 15, *["length"] * 5],
        loops=[False] * 16 + [True] * 4,
        empty=[True] + [False] * 19,
    )
    comparison = compare([base, record("ptq", [1.0] * 5 + [0.0] * 15, longer)])
    (row,) = comparison.outputs
    assert row.benchmark == "sums"
    assert {arm: e.value for arm, e in row.tokens.items()} == {"bf16": 10.0, "ptq": 15.0}
    ratio = row.length_ratio["ptq"]
    assert ratio is not None
    assert ratio.value == 1.5
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1.0 < ratio.low < 1.5 < ratio.high
    assert {arm: e.value for arm, e in row.truncated.items()} == {"bf16": 0.0, "ptq": 0.25}
    assert row.loops["ptq"].value == 0.2
    assert row.empty["ptq"].value == 0.05
    costs = {arm: e.value for arm, e in row.tokens_per_correct.items() if e}
    assert costs == {"bf16": 20.0, "ptq": 60.0}
    assert comparison_from_json(comparison_to_json(comparison)) == comparison


def test_nothing_right_and_nothing_counted_are_not_zero() -> None:
    base = record("bf16", [1.0, 0.0], outputs([4, 4]))
    comparison = compare([base, record("ptq", [0.0, 0.0], outputs([4, 4])), record("qad", [1.0, 1.0], outputs([None, None]))])
    (row,) = comparison.outputs
    assert row.tokens_per_correct["ptq"] is None
    assert "qad" not in row.tokens
    assert "qad" not in row.length_ratio
    assert row.empty["qad"].value == 0.0


def test_tasks_that_generate_nothing_have_no_row() -> None:
    assert compare([record("bf16", [1.0, 0.0]), record("ptq", [1.0, 1.0])]).outputs == []


@pytest.mark.parametrize(("engine", "share"), [(SERVER, 0.1), (ENGINE, None)])
def test_failed_requests_reach_the_gate(engine: Engine, share: float | None) -> None:
    failing = outputs([5] * 30, finish=["error"] * 3 + ["stop"] * 27, empty=[True] * 3 + [False] * 27)
    base = record("bf16", [1.0] * 30, outputs([5] * 30), engine=engine)
    comparison = compare([base, record("ptq", [1.0] * 27 + [0.0] * 3, failing, engine=engine)])
    found = comparison.failure_share.get("ptq")
    assert (found.value if found else None) == share
    verdict = judge(comparison, Policy(name="p", failure_share=AtMost(at_most=0.01)))
    assert verdict.outcome == ("FAIL" if share else "INCONCLUSIVE")
    assert comparison.outputs[0].empty["ptq"].value == 0.0, "a failed request is no empty answer"


# --- seeds ---


def test_several_seeds_of_one_arm_are_clusters() -> None:
    """Five seeds of 40 questions are 200 answers to 40 questions: the interval is about as wide as of 40."""
    rng = np.random.default_rng(0)
    skill = (rng.random(40) < 0.6).astype(float)
    worse = np.where(rng.random(40) < 0.25, 1 - skill, skill)
    records = [
        record(arm, scores.tolist(), settings={"seed": seed}, checkpoint=f"hash-{arm}")
        for seed in range(5)
        for arm, scores in (("bf16", skill), ("ptq", worse))
    ]
    (row,) = compare(records).benchmarks
    (single,) = compare(records[:2]).benchmarks
    assert (row.n, row.clusters) == (200, 40)
    assert (single.n, single.clusters) == (40, 40)
    wide, narrow = row.recovery["ptq"], single.recovery["ptq"]
    assert wide is not None
    assert narrow is not None
    assert wide.value == narrow.value
    assert wide.high is not None
    assert wide.low is not None
    assert narrow.high is not None
    assert narrow.low is not None
    assert wide.high - wide.low > 0.8 * (narrow.high - narrow.low)


def test_arms_under_other_seeds_are_not_compared() -> None:
    records = [record("bf16", [1.0, 0.0], settings={"seed": s}) for s in (0, 1)]
    with pytest.raises(DataError, match=r"seed \(bf16 \[0, 1\], ptq 0\)"):
        compare([*records, record("ptq", [1.0, 0.0])])
    with pytest.raises(DataError, match="two accuracy records of arm bf16"):
        compare([records[0], records[0]])
    with pytest.raises(DataError, match="two accuracy records of arm bf16"):
        compare([records[0], record("bf16", [1.0, 0.0], settings={"seed": 1}, checkpoint="other")])


# --- records of other versions ---


def test_a_record_without_the_new_fields_is_written_as_before() -> None:
    raw = to_json(record("bf16", [1.0]))
    assert "control" not in raw
    assert "samples" not in raw["data"]
    assert "outputs" not in raw["data"]["tasks"][0]
    assert from_json(raw) == record("bf16", [1.0])
    full = record("bf16", [1.0], outputs([3]), control={"batch_size": 2})
    assert from_json(to_json(full)) == full
