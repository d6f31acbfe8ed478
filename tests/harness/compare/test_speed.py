"""What the two kinds of speed share: who is held against bf16, and the mean of paired ratios."""

from __future__ import annotations

import math

import pytest

from harness.compare.speed import beside_baseline, differing_settings, mean_ratio
from harness.records.record import Engine, MemoryData, Record
from harness.statistics.intervals import log_ratio_t

ENGINE = Engine("e", "1", "bfloat16", "cpu", "", True)


def record(arm: str, **settings: object) -> Record:
    return Record(arm, "m", arm, ENGINE, settings, {}, "2026-11-30T00:00:00Z", 1.0, MemoryData({}, 1, 1, 1, 0))


def test_every_arm_is_held_against_bf16_or_noted() -> None:
    arms = {arm: record(arm) for arm in ("bf16", "ptq", "qad")}
    notes: list[str] = []
    found = list(beside_baseline("kind", "speed", arms, lambda _, own: "slow" if own.arm == "ptq" else "", notes))
    assert found == [("qad", arms["bf16"], arms["qad"])]
    assert notes == ["speed of ptq has no ratio to bf16: slow"]
    assert list(beside_baseline("kind", "speed", {"ptq": arms["ptq"]}, lambda *_: "", notes)) == []
    assert notes[1:] == ["kind: bf16 was not measured, so there are no ratios"]
    assert list(beside_baseline("kind", "speed", {}, lambda *_: "", notes)) == []
    assert len(notes) == 2


def test_settings_that_only_one_has_differ() -> None:
    assert differing_settings(record("a", x=1, y=2, z=3), record("b", x=1, y=3, w=0)) == ["w", "y", "z"]


def test_the_mean_is_geometric_and_paired() -> None:
    found, interval = mean_ratio([(2.0, 1.0), (8.0, 1.0)]), log_ratio_t([2.0, 8.0], [1.0, 1.0])
    assert found is not None
    assert found.value == pytest.approx(4.0)
    assert (found.low, found.high, found.n) == (interval.low, interval.high, 2)
    one = mean_ratio([(3.0, 2.0)])
    assert one is not None
    assert (one.value, one.low, one.high) == (math.exp(math.log(1.5)), None, None)
    assert mean_ratio([]) is None
