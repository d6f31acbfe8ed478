"""Failed requests: no wrong answers, shown beside the score, and no comparison where arms failed in other shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.compare.failures import answered
from harness.compare.gate import judge
from harness.compare.policy import load_policy
from harness.compare.recovery import compare
from harness.records.comparison import from_json, to_json
from harness.records.record import AccuracyData, Engine, Item, Outputs, Record, TaskScore
from harness.records.verdict import INCONCLUSIVE
from reports.render import render
from reports.sections.items import pairs
from reports.sections.tables import accuracy_group

N = 200
SERVER = Engine("server", "vllm", "", "", "completions", emulated=False)


def outputs(finish: list[str]) -> Outputs:
    n = len(finish)
    return Outputs([3] * n, [None] * n, finish, [False] * n, [how == "error" for how in finish])


def arm(name: str, failing: Callable[[int], bool], right: Callable[[int], bool] = lambda i: i % 2 == 0) -> Record:
    """N items, right by `right`; what fails scores 0, as an empty answer does."""
    scores = [float(right(i) and not failing(i)) for i in range(N)]
    items = [Item(f"d{i}", f"p{i}", f"t{i}", f"c{i}", score) for i, score in enumerate(scores)]
    said = outputs(["error" if failing(i) else "stop" for i in range(N)])
    task = TaskScore("sums", "1", "exact_match", "none", 0, True, None, None, items, outputs=said)
    return Record(name, "tiny", f"hash-{name}", SERVER, {"seed": 0}, {}, "", 1.0, AccuracyData([task]))


def never(_: int) -> bool:
    return False


def long_ones(i: int) -> bool:
    return i >= N - 20


def test_what_failed_under_one_arm_counts_for_none() -> None:
    comparison = compare([arm("bf16", long_ones), arm("qad", lambda i: i < 20)])
    (row,) = comparison.benchmarks
    assert row.n == N - 40
    assert {name: score.value for name, score in row.score.items()} == {"bf16": 0.5, "qad": 0.5}
    assert row.recovery["qad"] is not None
    assert row.recovery["qad"].value == 1.0
    assert row.failed == {"bf16": (20, N), "qad": (20, N)}
    assert "sums (filter none): 40 of 200 items are left out, their requests failed under an arm" in comparison.not_compared
    assert {name: share.value for name, share in comparison.failure_share.items()} == {"bf16": 0.1, "qad": 0.1}
    assert from_json(to_json(comparison)) == comparison
    assert len(pairs([arm("bf16", long_ones), arm("qad", lambda i: i < 20)])) == N - 40


@pytest.mark.parametrize(("failing", "refused"), [(0, False), (2, False), (3, True), (20, True), (N, True)])
@pytest.mark.parametrize("which", ["bf16", "qad"])
def test_arms_whose_failures_differ_are_refused(failing: int, refused: bool, which: str) -> None:
    """Of 200 requests two more or less are 1 %. The other arm is exact: what failed would be the whole difference."""
    records = [arm(name, (lambda i: i < failing) if name == which else never) for name in ("bf16", "qad")]
    comparison = compare(records)
    (row,) = comparison.benchmarks
    if not refused:
        assert row.recovery["qad"] is not None
        assert row.recovery["qad"].value == 1.0
        assert not row.doubt
        return
    assert row.recovery == {"qad": None}
    assert f"{failing} of {N}" in row.doubt["qad"] or "every request failed" in row.doubt["qad"]
    assert not comparison.contrasts
    assert any("recovery of qad is n/a" in note for note in comparison.not_compared)
    verdict = judge(comparison, load_policy("drop-1pct"))
    assert verdict.outcome == INCONCLUSIVE
    if failing < N:
        assert row.score[which].value == pytest.approx(0.5, abs=0.01), "of what was answered"
        cells = accuracy_group(comparison).rows[0].cells
        assert f"{failing} of 200 requests failed" in cells[comparison.arms.index(which)].detail


def test_one_arm_that_failed_spoils_no_other() -> None:
    records = [arm("bf16", never), arm("ptq", lambda i: i < 100), arm("qad", never, lambda i: i % 2 == 0 and i > 9)]
    comparison = compare(records)
    (row,) = comparison.benchmarks
    assert row.n == N
    assert row.recovery["ptq"] is None
    assert row.recovery["qad"] is not None
    assert row.recovery["qad"].value == pytest.approx(0.95)
    assert {(c.arm, c.against) for c in comparison.contrasts} == {("qad", "bf16")}


def test_a_verdict_does_not_pass_beside_a_benchmark_that_failed() -> None:
    def both(name: str, failing: Callable[[int], bool]) -> Record:
        bad, good = arm(name, failing), arm(name, never)
        assert isinstance(bad.data, AccuracyData)
        assert isinstance(good.data, AccuracyData)
        tasks = [*good.data.tasks, dataclasses.replace(bad.data.tasks[0], task="others")]
        return dataclasses.replace(bad, data=AccuracyData(tasks))

    comparison = compare([both("bf16", long_ones), both("qad", never)])
    assert comparison.median_recovery["qad"].value == 1.0
    verdict = judge(comparison, load_policy("drop-1pct"))
    assert verdict.outcome == INCONCLUSIVE
    assert "20 of 200 under bf16" in verdict.paragraph


def test_items_keep_their_order_and_their_answers() -> None:
    first, second = arm("bf16", long_ones), arm("qad", lambda i: i < 20)
    assert isinstance(first.data, AccuracyData)
    assert isinstance(second.data, AccuracyData)
    backwards = dataclasses.replace(
        second.data.tasks[0], items=second.data.tasks[0].items[::-1], outputs=outputs(["stop"] * (N - 20) + ["error"] * 20)
    )
    found = answered("sums", {"bf16": first.data.tasks[0], "qad": backwards})
    kept = [[item.doc_hash for item in score.items] for score in found.scores.values()]
    assert kept[0] == kept[1] == [f"d{i}" for i in range(20, N - 20)]
    assert all(score.outputs and set(score.outputs.finish) == {"stop"} for score in found.scores.values())


def test_the_report_says_what_failed_was_cut_off_and_was_left_out(tmp_path: Path) -> None:
    bf16, qad = arm("bf16", never), arm("qad", long_ones)
    assert isinstance(qad.data, AccuracyData)
    said = qad.data.tasks[0].outputs
    assert said is not None
    cut = dataclasses.replace(said, finish=["length"] * 5 + said.finish[5:])
    task = dataclasses.replace(qad.data.tasks[0], outputs=cut)
    told = {"HTTP 400, <b>too\x1b[31m long</b>": 20}
    imported = {"imported": {"left_out": ["empty: its row in r.json has no score that is a number"]}}
    qad = dataclasses.replace(qad, data=AccuracyData([task], failures=told), provenance=imported)
    records = [bf16, qad]
    comparison = compare(records)
    render(tmp_path, comparison, records, judge(comparison, load_policy("drop-1pct")))
    for name in ("report.md", "report.html"):
        page = (tmp_path / "report" / name).read_text()
        for words in (
            "20 of 200 requests failed under qad",
            "Answers cut off",
            "2.8 %",
            "empty: its row in r.json",
            "20 requests failed: HTTP 400",
        ):
            assert words in page, (name, words)
        assert "\x1b" not in page
        assert "<b>too" not in page
