"""The comparison of arms: what is refused, what is n/a, which way recovery points, what is paired with what."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from harness.compare.recovery import compare
from harness.records.comparison import to_json
from harness.records.record import (
    AccuracyData,
    Data,
    Engine,
    FidelityData,
    FidelitySequence,
    Item,
    MemoryData,
    Record,
    TaskScore,
    ThroughputData,
    ThroughputPoint,
)
from qad.errors import DataError

ENGINE = Engine("transformers", "5.24", "float32", "cpu", "torch", emulated=False)


def record(arm: str, data: Data, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "arm": arm,
        "model": "tiny",
        "checkpoint": f"hash-{arm}",
        "engine": ENGINE,
        "settings": {},
        "provenance": {},
        "created": "2026-01-01T00:00:00Z",
        "seconds": 1.0,
        "data": data,
    }
    return Record(**{**fields, **changes})


def task(scores: Sequence[float], name: str = "facts", **changes: Any) -> TaskScore:
    items = [Item(f"d{i}", f"p{i}", f"t{i}", f"c{i}", float(score)) for i, score in enumerate(scores)]
    fields: dict[str, Any] = {
        "task": name,
        "version": "1",
        "metric": "acc",
        "filter": "none",
        "n_shot": 0,
        "higher_is_better": True,
        "chance": None,
        "limit": None,
        "items": items,
    }
    return TaskScore(**{**fields, **changes})


def arms(**tasks: list[TaskScore]) -> list[Record]:
    return [record(arm, AccuracyData(scores)) for arm, scores in tasks.items()]


def right(k: int, n: int = 100) -> list[float]:
    return [1.0] * k + [0.0] * (n - k)


def fidelity(arm: str, kl: float, nll: float, *, n: int = 24, teacher: float = 3.0, **changes: Any) -> Record:
    rng = np.random.default_rng(n)
    spread, tokens = np.exp(0.3 * rng.standard_normal(n)), rng.integers(200, 512, n)
    level = teacher + 0.2 * rng.standard_normal(n)
    sequences = [
        FidelitySequence(
            f"s{i}", int(t), float(t * kl * x), round(t * (1 - kl / 2)), float(t * a), float(t * (a + (nll - teacher) * x))
        )
        for i, (t, x, a) in enumerate(zip(tokens, spread, level, strict=True))
    ]
    return record(arm, FidelityData("test", sequences, {"p50": kl / 2, "max": kl * 50}), **changes)


def throughput(arm: str, prefill: list[float], decode: list[float], **changes: Any) -> Record:
    points = [ThroughputPoint("prefill", 1, 256, 16, prefill), ThroughputPoint("decode", 1, 256, 16, decode)]
    return record(arm, ThroughputData(points), **changes)


# --- recovery: direction, zero, missing -----------------------------------------------------


def test_higher_is_better() -> None:
    row = compare(arms(bf16=[task(right(80))], ptq=[task(right(60))])).benchmarks[0]
    assert row.recovery["ptq"] is not None
    assert row.recovery["ptq"].value == pytest.approx(0.75)
    assert row.score["bf16"].value == 0.8
    assert "bf16" not in row.recovery
    assert row.flips == {"ptq": (20, 0)}
    assert row.n == 100


def test_lower_is_better() -> None:
    """Perplexity 10 -> 12.5 is a recovery of 80 %, not 125 %."""
    base = np.linspace(5, 15, 41)
    lower = {"metric": "ppl", "higher_is_better": False}
    row = compare(arms(bf16=[task(list(base), **lower)], ptq=[task(list(base * 1.25), **lower)])).benchmarks[0]
    assert row.recovery["ptq"] is not None
    assert row.recovery["ptq"].value == pytest.approx(0.8)
    assert row.flips == {"ptq": (41, 0)}


def test_above_100_percent_is_shown() -> None:
    row = compare(arms(bf16=[task(right(60))], qad=[task(right(90))])).benchmarks[0]
    assert row.recovery["qad"] is not None
    assert row.recovery["qad"].value == pytest.approx(1.5)
    assert row.recovery["qad"].high is not None
    assert row.recovery["qad"].high > 1.5


@pytest.mark.parametrize("candidate", [0, 10])
def test_zero_baseline_is_not_available(candidate: int) -> None:
    found = compare(arms(bf16=[task(right(0)), task(right(80), "other")], ptq=[task(right(candidate)), task(right(60), "other")]))
    assert found.benchmarks[0].recovery == {"ptq": None}
    assert found.median_recovery["ptq"].value == pytest.approx(0.75)
    assert found.median_recovery["ptq"].n == 1
    assert found.worst["ptq"][0] == "other"
    assert "median recovery of ptq: 1 of 2 benchmarks are n/a, left out" in found.not_compared
    assert any("bf16 scores 0" in note for note in found.not_compared)


def test_a_baseline_below_0_has_no_recovery_and_is_said_as_it_is() -> None:
    found = compare(arms(bf16=[task([-0.5] * 100, metric="bleurt")], ptq=[task([-0.6] * 100, metric="bleurt")]))
    assert found.benchmarks[0].recovery == {"ptq": None}
    assert any("bf16 scores -0.5" in note for note in found.not_compared)


def test_missing_task_is_not_available() -> None:
    found = compare(arms(bf16=[task(right(80)), task(right(50), "other")], ptq=[task(right(60))]))
    assert [row.task for row in found.benchmarks] == ["facts", "other"]
    assert found.benchmarks[1].recovery == {}
    assert "other (filter none): no scores of ptq" in found.not_compared
    assert found.median_recovery["ptq"].n == 1


def test_nan_is_not_available() -> None:
    found = compare(arms(bf16=[task(right(80))], ptq=[task([math.nan, *right(60, 99)])], qad=[task(right(79))]))
    row = found.benchmarks[0]
    assert row.recovery["ptq"] is None
    assert "ptq" not in row.score
    assert row.recovery["qad"] is not None
    assert "ptq" not in found.median_recovery
    assert any("scores of ptq are not all numbers" in note for note in found.not_compared)


def test_no_baseline() -> None:
    found = compare(arms(ptq=[task(right(60))], qad=[task(right(70))]))
    assert found.benchmarks[0].recovery == {"ptq": None, "qad": None}
    assert found.benchmarks[0].score["qad"].value == 0.7
    assert found.median_recovery == {}
    assert found.worst == {}


def test_no_records() -> None:
    found = compare([])
    assert (found.arms, found.benchmarks, found.fidelity) == ([], [], {})


def test_the_report_is_plain_json() -> None:
    found = compare([*arms(bf16=[task(right(80))], ptq=[task(right(75))]), fidelity("ptq", 0.1, 3.1)])
    assert json.loads(json.dumps(to_json(found), allow_nan=False))["arms"] == ["bf16", "ptq"]


# --- chance --------------------------------------------------------------------------------------


def test_recovery_above_chance() -> None:
    """(0.6 - 0.25) / (0.8 - 0.25); its interval is wider than the raw one's."""
    row = compare(arms(bf16=[task(right(80), chance=0.25)], ptq=[task(right(60), chance=0.25)])).benchmarks[0]
    above, raw = row.recovery_above_chance["ptq"], row.recovery["ptq"]
    assert above is not None
    assert raw is not None
    assert above.value == pytest.approx(0.35 / 0.55)
    assert above.low is not None
    assert raw.low is not None
    assert above.low < raw.low


def test_baseline_at_chance_has_no_recovery_above_it() -> None:
    found = compare(arms(bf16=[task(right(55), chance=0.5)], ptq=[task(right(50), chance=0.5)]))
    assert found.benchmarks[0].recovery_above_chance == {"ptq": None}
    assert any("not clearly above chance" in note for note in found.not_compared)


# --- noise ---------------------------------------------------------------------------------


def test_few_differing_items_are_wide_and_say_so() -> None:
    """Two of 30 items differ. 93 % (84-100), the bootstrap's answer, is too sure of itself."""
    row = compare(arms(bf16=[task(right(28, 30))], ptq=[task(right(26, 30))])).benchmarks[0]
    found = row.recovery["ptq"]
    assert found is not None
    assert found.note == "only 2 of 30 items differ"
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.80
    assert found.high > 1.05


def test_a_broken_arm_does_not_widen_the_others() -> None:
    """A candidate's own scatter never becomes the tolerance: bf16's score interval depends on bf16 alone."""
    steady = compare(arms(bf16=[task(right(80))], ptq=[task(right(79))]))
    broken = compare(arms(bf16=[task(right(80))], ptq=[task([0.0, 1.0] * 50)]))
    assert steady.benchmarks[0].score["bf16"] == broken.benchmarks[0].score["bf16"]


def test_limit_is_kept() -> None:
    row = compare(arms(bf16=[task(right(8, 10), limit=10)], ptq=[task(right(7, 10), limit=10)])).benchmarks[0]
    assert row.limit == 10


def test_clusters_widen_the_interval() -> None:
    """30 templates in which all items flip together are 30 observations, not 300."""
    rng = np.random.default_rng(3)
    base = np.repeat(rng.random(30) < 0.8, 10).astype(float)
    other = np.where(np.repeat(rng.random(30) < 0.2, 10), 1 - base, base)

    def width(cluster: Callable[[int], str]) -> float:
        scores = [task(list(values)) for values in (base, other)]
        scores = [
            dataclasses.replace(s, items=[dataclasses.replace(item, cluster=cluster(i)) for i, item in enumerate(s.items)])
            for s in scores
        ]
        found = compare(arms(bf16=[scores[0]], ptq=[scores[1]])).benchmarks[0].recovery["ptq"]
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        return found.high - found.low

    assert width(lambda i: f"c{i // 10}") > 2.5 * width(lambda i: f"c{i}")


# --- over benchmarks ------------------------------------------------------------------------


def test_one_collapsed_task_is_the_worst() -> None:
    """The median of three hides a benchmark that fell from 23 to 6 %; `worst` does not."""
    found = compare(
        arms(
            bf16=[task(right(80), "a"), task(right(70), "b"), task(right(23), "c")],
            qad=[task(right(79), "a"), task(right(70), "b"), task(right(6), "c")],
        )
    )
    assert found.median_recovery["qad"].value == pytest.approx(79 / 80)
    label, worst = found.worst["qad"]
    assert label == "c"
    assert worst.value == pytest.approx(6 / 23)
    assert found.median_recovery["qad"].note == "only 3 benchmarks"


def test_median_without_interval_names_the_reason() -> None:
    base = list(np.linspace(0.1, 0.9, 50))
    other = [0.5, *base[1:]]
    found = compare(arms(bf16=[task(base), task(right(80), "b")], ptq=[task(other), task(right(60), "b")]))
    median = found.median_recovery["ptq"]
    assert (median.low, median.high) == (None, None)
    assert median.note == "inconclusive: facts has no interval"


def test_published_medians() -> None:
    """Nine benchmarks of 100 items whose recoveries are 92 ... 100 %: the median is the fifth."""
    names = [f"t{i}" for i in range(9)]
    found = compare(
        arms(bf16=[task(right(100), name) for name in names], ptq=[task(right(92 + i), name) for i, name in enumerate(names)])
    )
    median = found.median_recovery["ptq"]
    assert median.value == pytest.approx(0.96)
    assert median.low is not None
    assert median.high is not None
    assert 0.92 < median.low < 0.96 < median.high < 1.0
    assert found.worst["ptq"] == ("t0", found.benchmarks[0].recovery["ptq"])


def test_two_filters_are_both_shown_and_counted_once() -> None:
    """The same filter for both models, the first in the median, the other named and beside it."""
    found = compare(
        arms(
            bf16=[task(right(20), filter="strict"), task(right(78), filter="flexible")],
            ptq=[task(right(15), filter="strict"), task(right(76), filter="flexible")],
        )
    )
    assert [(row.filter, row.headline) for row in found.benchmarks] == [("strict", True), ("flexible", False)]
    assert found.median_recovery["ptq"].value == pytest.approx(0.75)
    assert found.median_recovery["ptq"].n == 1
    assert any("filter flexible is shown but not in the median" in note for note in found.not_compared)


# --- what is refused ------------------------------------------------------------------------


def test_differing_settings_are_all_named() -> None:
    with pytest.raises(DataError) as caught:
        compare(
            [
                record("bf16", AccuracyData([task(right(8, 10))]), settings={"seed": 0, "template": {"hash": "a"}}),
                record(
                    "ptq",
                    AccuracyData([task(right(8, 10), n_shot=1, version="2", limit=10)]),
                    settings={"seed": 1, "template": {"hash": "b"}, "temperature": 1.0},
                    engine=dataclasses.replace(ENGINE, name="vllm"),
                ),
            ]
        )
    message = str(caught.value)
    for part in (
        "seed (bf16 0, ptq 1)",
        "template.hash (bf16 a, ptq b)",
        "temperature (bf16 absent, ptq 1.0)",
        "facts: n_shot under filter none (bf16 0, ptq 1)",
        "facts: version under filter none (bf16 1, ptq 2)",
        "facts: limit under filter none (bf16 None, ptq 10)",
        "engine (bf16 transformers 5.24, ptq vllm 5.24)",
    ):
        assert part in message
    assert "\n" not in message


def test_differing_filters_are_refused() -> None:
    with pytest.raises(DataError, match=r"facts: filters \(bf16 \['strict'\], ptq \['flexible'\]\)"):
        compare(arms(bf16=[task(right(5), filter="strict")], ptq=[task(right(5), filter="flexible")]))


def _with_items(change: Callable[[int, Item], Item]) -> list[Record]:
    base = task(right(8, 10))
    other = dataclasses.replace(base, items=[change(i, item) for i, item in enumerate(base.items)])
    return arms(bf16=[base], ptq=[other])


def test_other_prompts_are_refused() -> None:
    changed = _with_items(lambda i, item: dataclasses.replace(item, prompt_hash="x") if i < 3 else item)
    with pytest.raises(DataError, match="prompts differ for 3 of 10 documents"):
        compare(changed)


def test_other_documents_are_refused() -> None:
    changed = _with_items(lambda i, item: dataclasses.replace(item, doc_hash="x") if i == 0 else item)
    with pytest.raises(DataError, match="2 documents are in only one of them"):
        compare(changed)


def test_other_targets_are_refused() -> None:
    changed = _with_items(lambda i, item: dataclasses.replace(item, target_hash="x") if i < 4 else item)
    with pytest.raises(DataError, match="targets of 4 of 10 items differ"):
        compare(changed)


def test_items_are_paired_by_hash_not_by_position() -> None:
    base = task(right(8, 10))
    shuffled = dataclasses.replace(base, items=base.items[::-1])
    assert compare(arms(bf16=[base], ptq=[shuffled])).benchmarks[0].flips == {"ptq": (0, 0)}


def test_weights_that_changed_between_records_are_refused() -> None:
    with pytest.raises(DataError, match="arm ptq are of different weights"):
        compare([*arms(ptq=[task(right(5))]), fidelity("ptq", 0.1, 3.1, checkpoint="other")])


def test_two_records_of_one_arm_are_refused() -> None:
    with pytest.raises(DataError, match="two accuracy records of arm ptq"):
        compare(arms(ptq=[task(right(5))]) * 2)


def test_memory_alone_is_no_comparison_and_no_error() -> None:
    data = MemoryData({"bf16": 10}, 10, 12, 5, 0)
    assert compare([record("bf16", data), record("ptq", data)]).not_compared == []


# --- fidelity ------------------------------------------------------------------------------------


def three(ptq: float = 3.30, qad: float = 3.07) -> list[Record]:
    return [fidelity("bf16", 0.0, 3.0), fidelity("ptq", 0.4, ptq), fidelity("qad", 0.2, qad)]


def test_fidelity_rows() -> None:
    found = compare(three()).fidelity
    data = three()[1].data
    assert isinstance(data, FidelityData)
    tokens = sum(s.tokens for s in data.sequences)
    assert found["ptq"].tokens == tokens
    assert found["ptq"].sequences == 24
    assert found["ptq"].kl.value == pytest.approx(sum(s.kl_sum for s in data.sequences) / tokens)
    assert found["ptq"].perplexity.value == pytest.approx(math.exp(sum(s.nll_student_sum for s in data.sequences) / tokens))
    for estimate in (found["ptq"].kl, found["ptq"].top1, found["ptq"].perplexity, found["ptq"].perplexity_ratio):
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
        assert (estimate.n, estimate.clusters) == (24, 24)
    assert (found["bf16"].kl.low, found["bf16"].kl.high) == (0.0, 0.0)
    assert found["bf16"].perplexity_ratio.value == 1.0


def test_a_share_of_tokens_stays_a_share_however_wide_its_interval() -> None:
    record = fidelity("ptq", 0.4, 3.3, n=3)
    assert isinstance(record.data, FidelityData)
    agreed = [0, record.data.sequences[1].tokens, 0]  # one sequence all right, two all wrong
    sequences = [dataclasses.replace(s, top1_agree=n) for s, n in zip(record.data.sequences, agreed, strict=True)]
    changed = dataclasses.replace(record, data=dataclasses.replace(record.data, sequences=sequences))
    found = compare([fidelity("bf16", 0.0, 3.0, n=3), changed]).fidelity["ptq"].top1
    assert found.low == 0.0
    assert found.high == 1.0


def test_the_ratio_is_paired() -> None:
    """Perplexity varies between sequences far more than the ratio of two models on the same sequences."""
    row = compare(three()).fidelity["ptq"]
    assert row.perplexity.low is not None
    assert row.perplexity_ratio.low is not None
    assert row.perplexity.low / row.perplexity.value < 0.95 < row.perplexity_ratio.low / row.perplexity_ratio.value


def test_kl_ratio_of_sequences_in_proportion_is_exact() -> None:
    """QAD halves the KL of every sequence: the paired ratio has no spread."""
    ratio = compare(three()).kl_ratio
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))


def test_gap_closed() -> None:
    found = compare(three())
    gap = found.perplexity_gap_closed
    assert gap is not None
    ppl = {arm: row.perplexity.value for arm, row in found.fidelity.items()}
    assert gap.value == pytest.approx((ppl["ptq"] - ppl["qad"]) / (ppl["ptq"] - ppl["bf16"]))
    assert gap.low is not None
    assert gap.high is not None
    assert gap.low < gap.value < gap.high


def test_gap_closed_needs_a_gap() -> None:
    """PTQ is as often above its teacher as below: there is no gap to close."""
    records = three()
    data = records[1].data
    assert isinstance(data, FidelityData)
    level = [dataclasses.replace(s, nll_student_sum=s.nll_teacher_sum + (-1) ** i * 20.0) for i, s in enumerate(data.sequences)]
    records[1] = dataclasses.replace(records[1], data=dataclasses.replace(data, sequences=level))
    found = compare(records)
    assert found.perplexity_gap_closed is None
    assert any("perplexity gap closed is n/a" in note for note in found.not_compared)


def test_a_negative_gap_is_not_closed() -> None:
    assert compare(three(ptq=2.8, qad=2.9)).perplexity_gap_closed is None


def test_gap_does_not_need_the_teachers_own_record() -> None:
    assert compare(three()[1:]).perplexity_gap_closed == compare(three()).perplexity_gap_closed


def test_other_text_is_refused() -> None:
    with pytest.raises(DataError, match="is of other sequences"):
        compare([fidelity("bf16", 0.0, 3.0), fidelity("ptq", 0.4, 3.3, n=23)])


def test_other_teacher_is_refused() -> None:
    with pytest.raises(DataError, match="against different teachers"):
        compare([fidelity("ptq", 0.4, 3.3), fidelity("qad", 0.2, 3.1, teacher=2.9)])


def test_other_sequence_length_is_named() -> None:
    with pytest.raises(DataError, match=r"seq_len \(ptq 256, qad 512\)"):
        compare([fidelity("ptq", 0.4, 3.3, settings={"seq_len": 256}), fidelity("qad", 0.2, 3.1, settings={"seq_len": 512})])


# --- throughput ----------------------------------------------------------------------------------


def test_speed_is_a_paired_ratio() -> None:
    """The machine slows down by half; each repeat's ratio does not."""
    found = compare(
        [throughput("bf16", [100.0, 70.0, 50.0], [10.0, 7.0, 5.0]), throughput("ptq", [200.0, 141.0, 99.0], [5.0, 3.5, 2.5])]
    )
    prefill, decode = found.throughput_ratio["ptq"]["prefill"], found.throughput_ratio["ptq"]["decode"]
    assert prefill.value == pytest.approx(2.0, rel=0.01)
    assert prefill.low is not None
    assert prefill.low > 1.9
    assert prefill.n == 3
    assert (decode.value, decode.low, decode.high) == pytest.approx((0.5, 0.5, 0.5))


def test_speed_on_another_device_has_no_ratio() -> None:
    found = compare(
        [
            throughput("bf16", [100.0], [10.0]),
            throughput("ptq", [900.0], [90.0], engine=dataclasses.replace(ENGINE, device="cuda:0")),
        ]
    )
    assert found.throughput_ratio == {}
    assert found.not_compared == ["throughput of ptq has no ratio to bf16: measured on cuda:0, bf16 on cpu"]


def test_speed_of_another_shape_is_not_compared() -> None:
    other = ThroughputData([ThroughputPoint("prefill", 8, 256, 16, [100.0, 100.0])])
    found = compare([throughput("bf16", [100.0, 99.0], [10.0, 9.0]), record("ptq", other)])
    assert found.throughput_ratio == {"ptq": {}}
    assert any("prefill, batch 8, 256 + 16 tokens was measured in only one" in note for note in found.not_compared)


def test_zero_speed_is_not_compared() -> None:
    found = compare([throughput("bf16", [0.0, 99.0], [10.0, 9.0]), throughput("ptq", [10.0, 9.0], [10.0, 9.0])])
    assert set(found.throughput_ratio["ptq"]) == {"decode"}


def test_comparing_needs_no_torch() -> None:
    code = "import sys, harness.compare.recovery; print([m for m in ('torch', 'pandas', 'lm_eval') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
