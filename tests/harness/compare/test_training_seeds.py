"""Several trainings of one recipe as one arm: the mean, an interval that holds what lies between seeds, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from harness.compare.recovery import compare
from harness.records.comparison import Comparison, from_json, to_json
from harness.records.record import (
    AccuracyData,
    Engine,
    FidelityData,
    FidelitySequence,
    Item,
    MemoryData,
    Record,
    TaskScore,
    Training,
)
from qad.errors import DataError

ENGINE = Engine("transformers", "5.24.0", "float32", "cpu", "torch", emulated=False)
RECIPE = {"train": {"lr": 1e-5, "tokens": 1000}, "source": "f" * 64}
T3 = 4.302652729911275  # Student's t, two degrees of freedom


def record(arm: str, data: Any, seed: int | None = None, **changes: Any) -> Record:
    training = None if seed is None else Training(seed, RECIPE)
    fields: dict[str, Any] = {
        "arm": arm,
        "model": "m",
        "checkpoint": f"{arm} {seed}",
        "engine": ENGINE,
        "settings": {"seed": 0},
        "provenance": {},
        "created": "2026-01-01T00:00:00Z",
        "seconds": 1.0,
        "data": data,
        "training": training,
    }
    return Record(**{**fields, **changes})


def scores(values: np.ndarray[Any, Any], task: str = "facts") -> AccuracyData:
    items = [Item(f"d{i}", "p", "t", f"c{i}", float(v)) for i, v in enumerate(values)]
    return AccuracyData([TaskScore(task, "1", "acc", "none", 0, True, None, None, items)])


def answered(rng: np.random.Generator, n: int, spread: float, seeds: int) -> list[np.ndarray[Any, Any]]:
    """Scores of bf16 and of the seeds: an item's margin is shared, each seed moves all of them alike and each by itself."""
    margin = rng.standard_normal(n) + 0.7
    base = margin > 0
    moved = [margin - 0.1 + spread * rng.standard_normal() + 0.3 * rng.standard_normal(n) > 0 for _ in range(seeds)]
    return [found.astype(float) for found in (base, *moved)]


def records(spread: float = 0.2, seeds: int = 3, n: int = 400) -> list[Record]:
    base, *moved = answered(np.random.default_rng(4), n, spread, seeds)
    ptq = np.where(np.arange(n) % 9 == 0, 0.0, base)
    trained = [record("qad", scores(values), seed) for seed, values in enumerate(moved)]
    return [record("bf16", scores(base)), record("ptq", scores(ptq)), *trained]


def fidelity(kl: float) -> FidelityData:
    sequences = [FidelitySequence(f"s{i}", 100, kl * (90 + i), 80, 200.0, 200.0 + kl * i) for i in range(20)]
    return FidelityData("text", sequences, {"p50": kl})


def limits(estimate: Any) -> tuple[float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


def test_an_arm_is_the_mean_of_its_seeds_with_what_lies_between_them() -> None:
    every = records()
    found = compare(every)
    alone = [compare([*every[:2], one]) for one in every[2:]]
    values = [one.median_recovery["qad"].value for one in alone]
    within = [[abs(end - v) for end in limits(one.median_recovery["qad"])] for one, v in zip(alone, values, strict=True)]
    between = T3 * float(np.std(values, ddof=1)) / math.sqrt(3)
    median = found.median_recovery["qad"]
    assert median.value == pytest.approx(np.mean(values))
    below, above = np.mean(within, axis=0)
    assert limits(median) == pytest.approx((median.value - math.hypot(below, between), median.value + math.hypot(above, between)))
    assert "3 training seeds" in median.note
    assert [(s.seed, s.checkpoint, s.values["median recovery"]) for s in found.training_seeds["qad"]] == [
        (seed, f"qad {seed}", value) for seed, value in enumerate(values)
    ]
    assert found.arms == ["bf16", "ptq", "qad"]
    assert found.median_recovery["ptq"] == alone[0].median_recovery["ptq"], "an arm without seeds stays as it is"
    assert found.benchmarks[0].flips["qad"] == tuple(np.sum([one.benchmarks[0].flips["qad"] for one in alone], axis=0))
    assert found.worst["qad"][1].value == pytest.approx(np.mean(values))
    assert from_json(to_json(found)) == found


def test_every_number_of_a_trained_arm_holds_its_seeds() -> None:
    kinds = [
        record(arm, fidelity(kl), seed)
        for arm, kl, seed in (("bf16", 0.0, None), ("ptq", 0.4, None), ("qad", 0.2, 0), ("qad", 0.22, 1), ("qad", 0.27, 2))
    ]
    found = compare([*records(), *kinds, record("qad", MemoryData({"bf16": 1}, 1, 2, 1, 0), 0)])
    row = found.fidelity["qad"]
    assert row.kl.value == pytest.approx(0.23 * 99.5 / 100)
    low, high = limits(row.kl)
    assert low < 0.2 < 0.27 < high
    assert found.kl_ratio is not None
    assert limits(found.kl_ratio)[0] < 0.5 < 0.675 < limits(found.kl_ratio)[1]
    assert found.fidelity["ptq"].kl.note == ""
    assert row.token_kl["p50"] == pytest.approx(0.23)
    contrast = next(c for c in found.contrasts if (c.arm, c.against) == ("qad", "ptq"))
    assert contrast.test == "t over 3 training seeds"
    assert contrast.p is not None
    low, high = limits(contrast.difference)
    assert (contrast.p < 0.05) == (not low <= 0 <= high)
    untouched = next(c for c in found.contrasts if c.arm == "ptq")
    assert "McNemar" in untouched.test


@pytest.mark.parametrize(("seeds", "spread"), [(2, 0.1), (3, 0.0), (3, 0.3), (5, 0.1)])
def test_intervals_over_seeds_cover(seeds: int, spread: float) -> None:
    """The truth is the recovery over many items and many seeds."""
    rng = np.random.default_rng([seeds, round(100 * spread)])
    base, *many = answered(np.random.default_rng(1), 400_000, 0.0, 1)
    shifts = spread * np.linspace(-3, 3, 301)
    weights = np.exp(-0.5 * np.linspace(-3, 3, 301) ** 2)
    margin = np.random.default_rng(2).standard_normal(40_000) + 0.6 + 0.3 * np.random.default_rng(3).standard_normal(40_000)
    truth = float(np.average([(margin + s > 0).mean() for s in shifts], weights=weights)) / float(base.mean())
    assert many[0].mean() / base.mean() == pytest.approx(truth, abs=0.03)
    hits, simulations = 0, 120
    for _ in range(simulations):
        first, *others = answered(rng, 150, spread, seeds)
        trained = [record("qad", scores(values), seed) for seed, values in enumerate(others)]
        found = compare([record("bf16", scores(first)), *trained]).benchmarks[0].recovery["qad"]
        assert found is not None
        low, high = limits(found)
        hits += low <= truth <= high
    assert hits / simulations >= 0.93 - 3 * math.sqrt(0.93 * 0.07 / simulations)


def test_the_order_of_the_records_does_not_matter() -> None:
    every = records()
    assert to_json(compare(every[::-1])) == to_json(compare(every))


def test_one_seed_is_a_plain_arm() -> None:
    every = records(seeds=1)
    found = compare(every)
    assert found.training_seeds == {}
    assert "seeds" not in found.median_recovery["qad"].note


def changed(seed: int, **changes: Any) -> list[Record]:
    return [dataclasses.replace(r, **changes) if r.checkpoint == f"qad {seed}" else r for r in records()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"training": Training(1, {**RECIPE, "train": {"lr": 2e-5, "tokens": 1000}})},
            r"arm qad: qad 0 and qad 1 differ in more than the seed, in train\.lr \(1e-05, 2e-05\)",
        ),
        ({"training": Training(1, {**RECIPE, "teacher": "x"})}, r"in teacher \('absent', 'x'\)"),
        ({"training": Training(0, RECIPE)}, r"arm qad has several weights of one seed \(0, 0, 2\)"),
        ({"training": None}, r"those of qad 1 do not tell what they were trained with"),
        ({"settings": {"seed": 5}}, r"accuracy records are not comparable, they differ in seed \(bf16 0, qad 5\)"),
        ({"data": fidelity(0.1)}, r"arm qad: seed 1 has no accuracy record"),
    ],
)
def test_what_are_no_seeds_of_one_recipe_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        compare(changed(1, **change))
    assert "\n" not in str(caught.value)


def test_two_trained_arms_are_taken_together_seed_by_seed() -> None:
    every = records()
    qat = [dataclasses.replace(r, arm="qat", checkpoint=f"qat {i}") for i, r in enumerate(every[2:])]
    found: Comparison = compare([*every, *qat])
    assert found.median_recovery["qat"] == found.median_recovery["qad"]
    with pytest.raises(DataError, match=r"trained under different seeds \(qad 0, 1, 2; qat 0, 1\)"):
        compare([*every, *qat[:2]])


def test_weights_that_do_not_tell_are_refused_as_before() -> None:
    plain = [dataclasses.replace(r, training=None) for r in records()]
    with pytest.raises(DataError, match="two accuracy records of arm qad"):
        compare(plain)
