"""The noise floor: an arm against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.compare.noise import noise_floors
from harness.compare.recovery import compare
from harness.records.record import AccuracyData, Engine, FidelityData, FidelitySequence, Item, Record, TaskScore
from qad.errors import DataError

ENGINE = Engine("transformers", "5.24", "float32", "cpu", "torch", emulated=False)
CONTROL = {"batch_size": 8, "attention": "eager"}


def record(arm: str, *tasks: np.ndarray, **changes: Any) -> Record:
    scores = [
        TaskScore(
            f"task{k}",
            "1",
            "acc",
            "none",
            0,
            True,
            None,
            None,
            [Item(f"d{i}", f"p{i}", f"t{i}", f"c{i}", float(score)) for i, score in enumerate(task)],
        )
        for k, task in enumerate(tasks)
    ]
    fields: dict[str, Any] = {
        "arm": arm,
        "model": "tiny",
        "checkpoint": f"hash-{arm}",
        "engine": ENGINE,
        "settings": {},
        "provenance": {},
        "created": "",
        "seconds": 1.0,
        "data": AccuracyData(scores),
    }
    return Record(**{**fields, **changes})


def noisy(rng: np.random.Generator, truth: np.ndarray, flips: float) -> np.ndarray:
    """A measurement: some items come out at random, without preference."""
    return np.where(rng.random(len(truth)) < flips, rng.random(len(truth)) < truth.mean(), truth)


def test_the_band_holds_95_percent_of_what_no_difference_shows() -> None:
    """Five benchmarks of 200 items; base, control and an arm that differs in nothing, each measured with 10 % flips."""
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(60):
        truths = [(rng.random(200) < p).astype(float) for p in (0.5, 0.6, 0.7, 0.8, 0.9)]
        base, again, arm = ([noisy(rng, t, 0.1) for t in truths] for _ in range(3))
        first, control = record("bf16", *base), record("bf16", *again, control=CONTROL)
        (floor,) = noise_floors([first], [control], []).values()
        median = float(np.median([a.mean() / b.mean() for a, b in zip(arm, base, strict=True)]))
        assert floor.median is not None
        inside += floor.median.low <= median <= floor.median.high
    assert 53 <= inside <= 60


def test_controls_are_no_arms() -> None:
    rng = np.random.default_rng(1)
    truth = (rng.random(300) < 0.7).astype(float)
    base, ptq = record("bf16", truth), record("ptq", noisy(rng, truth, 0.2))
    controls = [
        record("bf16", truth, control=CONTROL),
        record("ptq", noisy(rng, truth, 0.2), control={**CONTROL, "seed": "+10000"}),
    ]
    plain, floored = compare([base, ptq]), compare([base, controls[1], ptq, controls[0]])
    assert floored.arms == ["bf16", "ptq"]
    assert (floored.benchmarks, floored.median_recovery) == (plain.benchmarks, plain.median_recovery)
    assert list(floored.noise_floor) == ["ptq", "bf16"]
    none, some = floored.noise_floor["bf16"], floored.noise_floor["ptq"]
    assert none.median is not None
    assert (none.median.low, none.median.high) == (1.0, 1.0), "two equal measurements: no noise was seen"
    assert none.differing is not None
    assert none.differing.value == 0.0
    assert some.median == some.benchmarks["task0"]
    assert some.median is not None
    assert 0.85 < some.median.low < 1 < some.median.high < 1.15
    assert some.conditions == {**CONTROL, "seed": "+10000"}
    assert plain.noise_floor == {}


def test_a_control_of_other_weights_is_refused() -> None:
    ones = np.ones(3)
    with pytest.raises(DataError, match=r"the control of bf16 .* is of other weights"):
        compare([record("bf16", ones), record("bf16", ones, checkpoint="other", control=CONTROL)])
    notes = compare([record("bf16", ones), record("ptq", ones, control=CONTROL)]).not_compared
    assert "noise floor of ptq: accuracy was measured again, but there is no first measurement" in notes


def test_a_fidelity_control_is_a_distance_from_itself() -> None:
    def fidelity(kl: float, **changes: Any) -> Record:
        rows = [FidelitySequence(f"s{i}", 10, 10 * kl * (1 + 0.1 * i), 9, 20.0, 20.0) for i in range(6)]
        return record("bf16", data=FidelityData("text", rows, {"p50": kl}), **changes)

    comparison = compare([fidelity(0.0), fidelity(0.01, control={"attention": "eager"})])
    floor = comparison.noise_floor["bf16"]
    assert floor.kl is not None
    assert floor.kl.value == pytest.approx(0.0125)
    assert floor.top1 is not None
    assert floor.top1.value == pytest.approx(0.9)
    assert floor.median is None
