"""The gate: thresholds against intervals, what was not measured, the words, and the shipped policies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.compare.gate import judge
from harness.compare.policy import DEFAULT, SHIPPED, Policy, load_policy
from harness.records.comparison import BenchmarkRow, Comparison, Estimate, FidelityRow
from harness.records.verdict import FAIL, INCONCLUSIVE, PASS
from qad.errors import DataError, UsageError
from qad.recipes.strict_yaml import shipped_names


def estimate(value: float, low: float | None, high: float | None, n: int = 11, note: str = "") -> Estimate:
    return Estimate(value, low, high, n, n, "by hand", note)


def row(task: str, **recovery: Estimate | None) -> BenchmarkRow:
    score = {arm: estimate(0.5, 0.4, 0.6) for arm in ("bf16", *recovery)}
    return BenchmarkRow(task, "acc", "none", 0, True, None, 100, 100, score, recovery, {}, {})


def comparison(rows: list[BenchmarkRow] | None = None, **medians: Estimate) -> Comparison:
    rows = rows if rows is not None else [row("a", **medians)]
    arms = ["bf16", *medians]
    worst = {
        arm: min(((r.label, e) for r in rows if (e := r.recovery.get(arm))), key=lambda pair: pair[1].value) for arm in medians
    }
    return Comparison(arms, rows, dict(medians), worst, {}, None, None, {}, [])


def policy(**thresholds: object) -> Policy:
    return Policy.model_validate({"name": "mine", **thresholds})


RECOVERY = {"at_least": 0.99}


@pytest.mark.parametrize(
    "thresholds",
    [
        {"top1": {"at_least": 90}},
        {"median_recovery": {"at_least": 99}},
        {"failure_share": {"at_most": 1.5}},
        {"confidence": 1 - 1e-16},
    ],
)
def test_a_threshold_that_nothing_can_meet_or_miss_is_refused(thresholds: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"is a share, at most|less than or equal"):
        policy(**{"kl": {"at_most": 1}, **thresholds})


@pytest.mark.parametrize("threshold", ["median_recovery", "worst_benchmark"])
@pytest.mark.parametrize(("low", "outcome"), [(1.5, INCONCLUSIVE), (0.5, INCONCLUSIVE)])
def test_a_doubtful_recovery_is_never_a_pass(threshold: str, low: float, outcome: str) -> None:
    good, odd = estimate(1.0, 0.995, 1.005), estimate(66.069, low, 80.0)
    rows = [row("good", qad=good), dataclasses.replace(row("odd", qad=odd), doubt={"qad": "6607% is above 200%"})]
    found = judge(comparison(rows, qad=good), policy(**{threshold: RECOVERY}))
    assert found.outcome == outcome
    assert "6607% is above 200%" in found.paragraph or threshold == "worst_benchmark"
    failing = [*rows, row("bad", qad=estimate(0.5, 0.4, 0.6))]
    assert judge(comparison(failing, qad=good), policy(worst_benchmark=RECOVERY)).outcome == FAIL


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (0.99, 1.01, PASS),  # the limit itself is kept
        (0.98999, 1.01, INCONCLUSIVE),  # 99.0 % when rounded
        (0.95, 0.99, INCONCLUSIVE),
        (0.95, 0.98999, FAIL),
        (None, None, INCONCLUSIVE),
    ],
)
def test_a_threshold_is_held_against_the_interval_unrounded(low: float | None, high: float | None, outcome: str) -> None:
    found = judge(comparison(ptq=estimate(0.985, low, high)), policy(median_recovery=RECOVERY))
    assert found.outcome == outcome
    assert found.exit_code == {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}[outcome]


@pytest.mark.parametrize("threshold", ["median_recovery", "worst_benchmark"])
def test_scores_without_a_recovery_are_not_called_unmeasured(threshold: str) -> None:
    """bf16 at chance on every benchmark: the reason is that, and measuring the same again is no remedy."""
    scored = [dataclasses.replace(row(task, ptq=None), chance=0.5) for task in ("a", "b")]
    at_chance = Comparison(["bf16", "ptq"], scored, {}, {}, {}, None, None, {}, [])
    found = judge(at_chance, policy(**{threshold: RECOVERY}))
    assert found.outcome == INCONCLUSIVE
    assert "BF16 does not score clearly above chance on a and 1 more" in found.reason
    below = [dataclasses.replace(one, score=dict.fromkeys(one.score, estimate(-0.5, -0.6, -0.4))) for one in scored]
    found = judge(dataclasses.replace(at_chance, benchmarks=below), policy(**{threshold: RECOVERY}))
    assert "BF16 does not score above 0 on a and 1 more" in found.reason
    assert "measured" not in found.paragraph
    assert found.next_action == "measure benchmarks that BF16 can answer"


def test_a_number_that_rounds_onto_the_limit_is_shown_apart_from_it() -> None:
    found = judge(comparison(ptq=estimate(0.98996, 0.9898, 0.98998)), policy(median_recovery=RECOVERY))
    assert found.outcome == FAIL
    assert "median recovery is 98.996 % (98.98-98.998), outside the limit of at least 99.0 %" in found.paragraph


def test_ptq_is_enough() -> None:
    found = judge(comparison(ptq=estimate(0.994, 0.989, 0.998)), policy(median_recovery={"at_least": 0.98}))
    assert found.outcome == PASS
    assert found.paragraph.startswith("PTQ recovers 99.4 % (98.9-99.8) of BF16's score")
    assert "QAD is not needed" in found.paragraph


def test_qad_is_judged_and_ptq_is_told() -> None:
    both = comparison(ptq=estimate(0.9924, 0.991, 0.994), qad=estimate(0.9897, 0.9805, 0.994))
    both = dataclasses.replace(both, median_gain=estimate(-0.0027, -0.016, 0.016))
    found = judge(both, policy(median_recovery=RECOVERY))
    assert (found.arm, found.outcome, found.others) == ("qad", INCONCLUSIVE, {"ptq": PASS})
    assert "PTQ alone recovers 99.2 % (99.1-99.4) and passes too: QAD is not needed." in found.paragraph
    assert "-0.3 points (-1.6 to +1.6): within noise" in found.paragraph
    assert judge(both, policy(median_recovery=RECOVERY), arm="ptq").outcome == PASS


def test_a_gain_outside_its_noise_stands_out() -> None:
    both = comparison(ptq=estimate(0.9633, 0.955, 0.972), qad=estimate(0.9972, 0.991, 1.003))
    both = dataclasses.replace(both, median_gain=estimate(0.0339, 0.018, 0.05))
    found = judge(both, policy(median_recovery=RECOVERY))
    assert (found.outcome, found.others) == (PASS, {"ptq": FAIL})
    assert "+3.4 points (+1.8 to +5.0): it stands out" in found.paragraph
    assert "not needed" not in found.paragraph


def test_one_collapsed_benchmark_fails_whatever_the_median_says() -> None:
    """23 -> 6 % on one task of three."""
    good = estimate(1.0, 0.995, 1.005)
    rows = [row("a", qad=good), row("b", qad=good), row("c", qad=estimate(0.26, 0.1, 0.5))]
    found = judge(comparison(rows, qad=good), load_policy(DEFAULT))
    assert found.outcome == FAIL
    assert "recovery on c is 26.0 % (10.0-50.0), outside the limit of at least 95.0 %" in found.paragraph


def test_a_benchmark_that_the_arm_did_not_run_is_named() -> None:
    good = estimate(1.0, 0.995, 1.005)
    rows = [row("a", ptq=good, qad=good), row("b", ptq=good)]
    found = judge(comparison(rows, ptq=good, qad=good), load_policy(DEFAULT), arm="qad")
    assert found.outcome == INCONCLUSIVE
    assert "recovery on b was not measured" in found.paragraph


def test_everything_not_measured_is_named() -> None:
    everything = policy(
        median_recovery=RECOVERY,
        worst_benchmark=RECOVERY,
        kl={"at_most": 0.1},
        top1={"at_least": 0.9},
        memory_ratio={"at_most": 0.4},
        speed_up={"at_least": 1.2},
        served={"at_least": 1.2},
        failure_share={"at_most": 0.01},
    )
    empty = Comparison(["bf16", "ptq"], [], {}, {}, {}, None, None, {}, [])
    found = judge(empty, everything)
    assert found.outcome == INCONCLUSIVE
    assert [check.outcome for check in found.checks] == [INCONCLUSIVE] * 8
    for name in (
        "median recovery",
        "recovery of every benchmark",
        "KL divergence to BF16",
        "top-1 agreement",
        "size on disk",
        "decode speed",
        "served tokens_per_s",
        "share of failed requests",
    ):
        assert f"{name} was not measured" in found.paragraph.replace(" with BF16 was", " was").replace(
            " relative to BF16 was", " was"
        )


def test_the_other_thresholds() -> None:
    fidelity = FidelityRow(
        kl=estimate(0.2, 0.18, 0.22),
        top1=estimate(0.75, 0.73, 0.77),
        perplexity=estimate(39, 38, 40),
        perplexity_ratio=estimate(1.05, 1.04, 1.06),
        token_kl={},
        sequences=24,
        tokens=6000,
    )
    measured = dataclasses.replace(
        comparison(qad=estimate(1.0, 0.99, 1.01)),
        fidelity={"qad": fidelity},
        memory_ratio={"qad": estimate(0.433, 0.433, 0.433)},
        throughput_ratio={"qad": {"decode": estimate(1.8, 1.7, 1.9)}},
        failure_share={"qad": estimate(0.0, 0.0, 0.004, 1000)},
        serving_ratio={
            "qad": {
                "concurrency 1": {"tokens_per_s": estimate(1.6, 1.5, 1.7), "ttft_ms": estimate(0.9, 0.8, 0.95)},
                "concurrency 8": {"tokens_per_s": estimate(1.4, 1.3, 1.5)},
            }
        },
    )
    outcomes = {
        "kl": ({"at_most": 0.22}, {"at_most": 0.2}, {"at_most": 0.17}),
        "top1": ({"at_least": 0.73}, {"at_least": 0.75}, {"at_least": 0.78}),
        "speed_up": ({"at_least": 1.7}, {"at_least": 1.75}, {"at_least": 2.0}),
        "served": ({"at_least": 1.3}, {"at_least": 1.35}, {"at_least": 1.55}),
    }
    for name, thresholds in outcomes.items():
        assert [judge(measured, policy(**{name: t})).outcome for t in thresholds] == [PASS, INCONCLUSIVE, FAIL], name
    assert judge(measured, policy(memory_ratio={"at_most": 0.433})).outcome == PASS
    assert judge(measured, policy(memory_ratio={"at_most": 0.4})).outcome == FAIL
    assert judge(measured, policy(failure_share={"at_most": 0.01})).outcome == PASS
    shrunk = judge(measured, policy(memory_ratio={"at_most": 0.4}))
    assert shrunk.next_action == "quantize more of the model (quantize.include, quantize.formats)"
    slower = judge(measured, policy(served={"at_least": 1.0, "metric": "ttft_ms"}))
    assert (slower.outcome, slower.reason.partition(" is ")[0]) == (FAIL, "served ttft_ms relative to BF16 at concurrency 1")
    assert "no recovery" not in judge(dataclasses.replace(measured, median_recovery={}), policy(kl={"at_most": 0.3})).paragraph
    emulated = judge(dataclasses.replace(measured, emulated=["qad"]), policy(speed_up={"at_least": 1.7}))
    assert emulated.outcome == INCONCLUSIVE
    assert "without FP4 arithmetic" in emulated.paragraph


def test_there_has_to_be_an_arm() -> None:
    with pytest.raises(DataError, match="nothing to judge"):
        judge(Comparison(["bf16"], [], {}, {}, {}, None, None, {}, []), load_policy(DEFAULT))
    with pytest.raises(DataError, match="no measured arm 'qat'"):
        judge(comparison(ptq=estimate(1, 1, 1)), load_policy(DEFAULT), arm="qat")


def test_shipped_policies_load() -> None:
    assert shipped_names(SHIPPED) == ["drop-1pct", "drop-half-pct", "mlperf-99", "served-faster", "size-first"]
    for name in shipped_names(SHIPPED):
        found = load_policy(name)
        assert found.name == name
        assert found.about
        assert {"median_recovery", "served"} & set(found.thresholds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n", "it has no threshold"),
        ("name: x\nmedian_recovry: {at_least: .9}\n", "median_recovry"),
        ("name: x\nmedian_recovery: {at_most: .9}\n", "at_least"),
        ("name: x\nmedian_recovery: {at_least: '0.9'}\n", "valid number"),
        ("name: x\nkl: {at_most: .nan}\n", "finite"),
        ("name: [\n", "is not YAML"),
        ("- 1\n", "the policy"),
    ],
)
def test_a_policy_is_read_strictly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_policy(str(path))
    assert "\n" not in str(caught.value)


def test_an_unknown_policy_names_the_shipped_ones() -> None:
    with pytest.raises(UsageError, match="shipped policies are drop-1pct, drop-half-pct, mlperf-99, served-faster, size-first"):
        load_policy("drop-2pct")
