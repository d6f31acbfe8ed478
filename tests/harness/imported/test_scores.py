"""Scores made elsewhere: CSV tables, lm-eval folders, NeMo Evaluator runs, and the published numbers they carry."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.compare.contrasts import PairedScores
from harness.compare.gate import judge
from harness.compare.policy import load_policy
from harness.compare.published import published_rows, standard_error
from harness.compare.recovery import compare
from harness.imported.scores import read_imported
from harness.records.comparison import Comparison, standing
from harness.records.record import PublishedScore, Record, ScoresData
from harness.records.verdict import INCONCLUSIVE
from harness.statistics.intervals import Floats
from qad.errors import DataError

NANO_3 = """# source: arXiv 2601.20088, Nemotron 3 Nano 30B-A3B
# model: Nemotron 3 Nano 30B-A3B
benchmark,BF16,PTQ,QAT,QAD
AA-LCR,35.9,31.3,24.8,34.3
AIME25,89.1,85.0,83.3,87.9
GPQA-D,73.0,71.6,66.0,72.7
LCB v5,72.1,68.9,62.0,68.9
SciCode,33.0,30.5,25.8,32.3
"""
VISION = """benchmark,bf16,ptq,qat,qad,maximum
AI2D,87.3,86.8,86.5,86.7,
ChartQA,89.7,89.6,89.8,89.4,
DocVQA,94.3,93.8,93.7,93.9,
InfoVQA,79.3,78.2,78.3,78.4,
OCRBench,855,850,848,858,1000
TextVQA,85.2,84.8,84.8,85.2,
"""
# Eleven benchmarks of the published kinds: name, BF16 score in percent, questions, answers per question.
SUITE = [
    ("AIME25", 89.1, 30, 64),
    ("GPQA-D", 73.0, 198, 16),
    ("LCB", 72.1, 315, 8),
    ("SciCode", 33.0, 338, 8),
    ("IFBench", 71.0, 300, 8),
    ("MMLU-Pro", 78.3, 12_032, 1),
    ("AA-LCR", 35.9, 100, 16),
    ("HLE", 10.6, 2_158, 1),
    ("tau2", 49.0, 114, 8),
    ("MATH500", 97.8, 500, 4),
    ("IFEval", 87.5, 541, 4),
]


def read(path: Path, text: str, arm: str = "bf16") -> list[Record]:
    path.write_text(text, encoding="utf-8")
    found = read_imported(path, arm)
    assert found is not None
    return found


def suite(ptq: list[float], qad: list[float]) -> str:
    """A CSV whose recoveries are the given ones."""
    lines = [
        f"{name},{score},{score * p!r},{score * q!r},{items},{repeats}"
        for (name, score, items, repeats), p, q in zip(SUITE, ptq, qad, strict=True)
    ]
    return "benchmark,bf16,ptq,qad,items,repeats\n" + "\n".join(lines) + "\n"


def recoveries(comparison: Comparison, arm: str) -> list[float]:
    return [recovery.value for row in comparison.benchmarks if (recovery := row.recovery[arm])]


# --- CSV, and what was published -----------------------------------------------------------------


def test_the_published_table_of_nano_3(tmp_path: Path) -> None:
    records = read(tmp_path / "nano3.csv", NANO_3)
    assert [record.arm for record in records] == ["bf16", "ptq", "qat", "qad"]
    assert {record.model for record in records} == {"Nemotron 3 Nano 30B-A3B"}
    found = compare(records)
    assert found.sources == dict.fromkeys(found.arms, "arXiv 2601.20088, Nemotron 3 Nano 30B-A3B")
    assert recoveries(found, "ptq") == pytest.approx([31.3 / 35.9, 85 / 89.1, 71.6 / 73, 68.9 / 72.1, 30.5 / 33])
    medians = {arm: 100 * median.value for arm, median in found.median_recovery.items()}
    assert medians == pytest.approx({"ptq": 95.398, "qat": 85.992, "qad": 97.879}, abs=1e-3)
    assert {arm: worst[0] for arm, worst in found.worst.items()} == {"ptq": "AA-LCR", "qad": "AA-LCR", "qat": "AA-LCR"}
    qad = {c.benchmark: c for c in found.contrasts if (c.arm, c.against) == ("qad", "ptq")}
    assert all(c.difference.value >= 0 for c in qad.values()), "QAD is nowhere below PTQ"
    assert qad["AIME25"].difference.value == pytest.approx(0.029)
    for row in found.benchmarks:
        assert row.imported
        assert all(recovery is not None and recovery.low is None for recovery in row.recovery.values())
    assert found.median_recovery["qad"].note.startswith("inconclusive"), "no errors are published"
    assert standing(found.median_gain, 0.0) == "inconclusive"


def test_scores_out_of_a_thousand(tmp_path: Path) -> None:
    found = compare(read(tmp_path / "vision.csv", VISION))
    ocr = next(row for row in found.benchmarks if row.task == "OCRBench")
    assert ocr.score["bf16"].value == pytest.approx(0.855)
    assert recoveries(found, "qad")[4] == pytest.approx(858 / 855)
    assert 100 * found.median_recovery["qad"].value == pytest.approx((86.7 / 87.3 + 93.9 / 94.3) / 2 * 100, abs=0.2)


def test_the_noise_of_an_eleven_benchmark_suite(tmp_path: Path) -> None:
    """Equal models, run once more: how far the median of eleven benchmarks of the published kinds moves by itself.

    The reference is 98.7-101.4 % for a suite whose sizes are not all known; this one has its order of size."""
    arms = {record.arm: record for record in read(tmp_path / "equal.csv", suite([1.0] * 11, [1.0] * 11))}
    rows = published_rows(arms, 0, [])
    drawn = {arm: np.median([1 + deviations_of(row, arm) for row in rows], axis=0) for arm in ("ptq", "qad")}
    low, high = np.quantile(drawn["ptq"], [0.025, 0.975])
    assert 0.98 < low < 0.993
    assert 1.007 < high < 1.02
    assert 0.006 < 1.96 * np.std(drawn["qad"] - drawn["ptq"]) < 0.02
    found = compare(list(arms.values()))
    assert standing(found.median_gain, 0.0) == "within noise"
    assert standing(found.median_recovery["ptq"], 1.0) == "within noise"


def deviations_of(row: PairedScores, arm: str) -> Floats:
    found = row.deviations[arm]
    assert found is not None
    return found


def test_lightning_a_stands_out(tmp_path: Path) -> None:
    """Published: medians 96.33 -> 99.72, AIME25 -3.70 -> -0.57 points, 10 of 11 better. The other values are filled in."""
    aime = 89.1
    ptq = [1 - 3.70 / aime, 0.9633, 0.972, 0.951, 0.968, 0.9702, 0.940, 0.958, 0.981, 0.962, 0.9655]
    qad = [1 - 0.57 / aime, 0.9972, 0.999, 0.992, 0.9985, 0.9955, 0.985, 1.001, 0.9805, 0.9981, 0.9989]
    found = compare(read(tmp_path / "a.csv", suite(ptq, qad)))
    assert 100 * found.median_recovery["ptq"].value == pytest.approx(96.33)
    assert 100 * found.median_recovery["qad"].value == pytest.approx(99.72)
    gains = {c.benchmark: c.difference.value for c in found.contrasts if (c.arm, c.against) == ("qad", "ptq")}
    assert sum(gain > 0 for gain in gains.values()) == 10
    aime_loss = {c.arm: c.difference.value for c in found.contrasts if (c.benchmark, c.against) == ("AIME25", "bf16")}
    assert aime_loss == pytest.approx({"ptq": -0.0370, "qad": -0.0057})
    assert found.median_gain is not None
    assert 100 * found.median_gain.value == pytest.approx(3.39)
    assert standing(found.median_gain, 0.0) == "stands out"


def test_lightning_final_is_within_noise(tmp_path: Path) -> None:
    """Published: PTQ 99.24, QAD 98.97 median. The other values are filled in."""
    spread = np.array([0, -0.004, 0.003, -0.009, 0.006, 0.002, -0.015, 0.008, -0.006, 0.004, -0.002])
    found = compare(read(tmp_path / "b.csv", suite((0.9924 + spread).tolist(), (0.9897 + spread).tolist())))
    assert 100 * found.median_recovery["ptq"].value == pytest.approx(99.24)
    assert 100 * found.median_recovery["qad"].value == pytest.approx(98.97)
    assert standing(found.median_gain, 0.0) == "within noise"


def test_a_long_table_names_its_arms_in_a_column(tmp_path: Path) -> None:
    text = "Benchmark, arm, score, stderr, n_shot\narc, bf16, 0.61, 0.012, 25\narc, ptq, 0.58, 0.012, 25\n"
    found = compare(read(tmp_path / "long.csv", text))
    row = found.benchmarks[0]
    assert row.n_shot == 25
    recovery = row.recovery["ptq"]
    assert recovery is not None
    half = 1.96 * np.hypot(0.012 / 0.61, 0.58 * 0.012 / 0.61**2)
    assert (recovery.low, recovery.high) == pytest.approx((0.58 / 0.61 - half, 0.58 / 0.61 + half), abs=1e-4)
    assert recovery.method == "unpaired, printed standard error"
    assert found.sources["ptq"] == "long.csv"


def test_lower_is_better_zero_and_missing(tmp_path: Path) -> None:
    """Perplexity 10 -> 12.5 is 80 %, a zero baseline is n/a, so is what is missing or NaN."""
    text = "benchmark,bf16,ptq,higher_is_better\nppl,10,12.5,false\nzero,0,0.1,true\nnan,0.5,nan,true\nnone,0.5,-,true\n"
    found = compare(read(tmp_path / "f1.csv", text))
    by_task = {row.task: row.recovery.get("ptq") for row in found.benchmarks}
    assert by_task["ppl"] is not None
    assert by_task["ppl"].value == pytest.approx(0.8)
    assert by_task["zero"] is None
    assert by_task["nan"] is None
    assert by_task["none"] is None
    assert found.median_recovery["ptq"].n == 1
    assert "median recovery of ptq: 1 of 2 benchmarks are n/a, left out" in found.not_compared
    assert "nan (imported): no score of ptq" in found.not_compared


def test_settings_of_printed_scores_have_to_agree(tmp_path: Path) -> None:
    text = "benchmark,arm,score,n_shot,version\narc,bf16,0.61,25,1\narc,ptq,0.58,0,2\n"
    with pytest.raises(DataError, match=r"arc: n_shot under filter none \(bf16 25, ptq 0\).*version"):
        compare(read(tmp_path / "d7.csv", text))


@pytest.mark.parametrize(
    ("bf16", "items", "scored"), [(25.2, "14000", False), (25.2, "", True), (25, "", False), (80, "14000", True)]
)
def test_a_printed_baseline_at_chance_is_not_scored(tmp_path: Path, bf16: float, items: str, scored: bool) -> None:
    text = f"benchmark,bf16,ptq,chance,items\nmmlu,{bf16},{bf16},25,{items}\nother,90,90,,\n"
    found = compare(read(tmp_path / "t.csv", text))
    row = found.benchmarks[0]
    assert (row.recovery["ptq"] is not None) == (row.recovery_above_chance["ptq"] is not None) == scored
    assert any("bf16 is not clearly above chance" in note for note in found.not_compared) == (not scored)


def test_every_further_column_of_a_long_table_is_a_setting(tmp_path: Path) -> None:
    text = "benchmark,arm,score,thinking\naime,bf16,0.61,on\naime,ptq,0.58,off\n"
    with pytest.raises(DataError, match=r"thinking under filter none \(bf16 on, ptq off\)"):
        compare(read(tmp_path / "long.csv", text))
    assert compare(read(tmp_path / "equal.csv", text.replace("off", "on"))).benchmarks[0].recovery["ptq"] is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("benchmark,bf16,higher_is_better\nppl,9,f\n", "row 1: higher_is_better is 'f': write true or false"),
        ("benchmark,bf16\narc,high\n", "bf16 is 'high', expected a number"),
        ("benchmark,bf16\narc,1e400\n", "bf16 is '1e400', expected a finite number"),
        ("benchmark,bf16,items\narc,50,0\n", "items is '0', expected 1 or more"),
        ("benchmark,bf16,items,repeats\narc,50,9,-1\n", "repeats is '-1', expected 1 or more"),
        ("benchmark,bf16,stderr\narc,50,-2\n", "stderr is '-2', expected 0 or more"),
        ("benchmark,bf16\narc,50\narc,51\n", "row 2: arc of bf16 is there already: leave one of the two out"),
        ("task,bf16\narc,1\n", "has the columns task, bf16"),
        ("benchmark,bf16,qad\nmmlu,0.858,61.0\n", "row 1: bf16 of mmlu is 0.858 in a table of percent"),
        ("benchmark,bf16,qad\nmmlu,85.8,61.0\ngsm8k,0.9,0.55\n", "row 2: bf16 of gsm8k is 0.9 in a table of percent"),
        ("benchmark,bf16,qad\nmmlu,85.8%,0.847\n", "row 1: qad of mmlu is 0.847 in a table of percent"),
        ("benchmark,bf16,qad\nmmlu,0.5%,0.4\n", "row 1: qad of mmlu is 0.4 in a table of percent"),
        ("benchmark,arm,score\nmmlu,bf16,85.8\nmmlu,qad,0.61\n", "row 2: score of mmlu is 0.61 in a table of percent"),
        ("benchmark,bf16,qad\nocr,855,858\n", "row 1: ocr scores 855, above 100: give the largest possible score"),
        ("benchmark,bf16,qad,maximum\nocr,855,1858,1000\n", "ocr scores 1858, above 1000"),
        ("benchmark,bf16,qad,items\nmmlu,85.8,84.7,14,042\n", "row 1 has 5 cells, the header 4: quote what holds commas"),
        ("benchmark,bf16,BF16\nmmlu,85.8,84.7\n", "has two columns 'bf16'"),
        ('benchmark,bf16\n"mmlu,85.8\n', "cannot be read as a CSV table"),
        ("benchmark,n_shot\narc,1\n", "has the columns"),
        ("benchmark,bf16,stderr\nmmlu,62,0.01\n", "standard error of 0.01, which 2.36e\\+07 items would have"),
        ("benchmark,bf16,stderr\nmmlu,0.62,1.2\n", "standard error of 1.2, which 0.164 items would have"),
        ("benchmark,bf16,chance\nmmlu,62,0.25\n", "chance is 0.25: write both in percent"),
        ("benchmark,bf16,items\nmmlu,62,1e30\n", "items is '1e30', expected 1 or more, below 1e12"),
        ("benchmark,bf16\n", "has no rows"),
        ("benchmark,bf16\narc,n/a\n", "holds no score"),
    ],
)
def test_a_bad_table_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / "bad.csv", text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sign", ["", "%"])
def test_percent_is_percent_with_and_without_its_sign(tmp_path: Path, sign: str) -> None:
    small = f"benchmark,bf16,qad,maximum\nhle,0.9{sign},0.8{sign},{'' if sign else 100}\nmmlu,85.8{sign},0{sign},\n"
    found = compare(read(tmp_path / "t.csv", small))
    assert [row.score["bf16"].value for row in found.benchmarks] == pytest.approx([0.009, 0.858])


def test_a_recovery_that_is_not_plausible_is_named_and_passes_nothing(tmp_path: Path) -> None:
    """AIME of a broken baseline: a bounded score that more than doubles is a mistake before it is a success."""
    text = "benchmark,bf16,qad,stderr,maximum\naime,0.858,61,0.01,100\nmmlu,80,80,0.01,100\n"
    found = compare(read(tmp_path / "t.csv", text))
    assert list(found.benchmarks[0].doubt) == ["qad"]
    assert any("is above 200%, which is not plausible" in note for note in found.not_compared)
    verdict = judge(found, load_policy("drop-1pct"))
    assert verdict.outcome == INCONCLUSIVE
    perplexity = "benchmark,bf16,qad,higher_is_better,stderr\nppl,30,10,false,0.01\n"
    assert not compare(read(tmp_path / "p.csv", perplexity)).benchmarks[0].doubt, "perplexity has no largest value"


@pytest.mark.parametrize("lost", ["nan", ""])
def test_a_benchmark_that_an_arm_lost_passes_nothing(tmp_path: Path, lost: str) -> None:
    found = compare(read(tmp_path / "t.csv", f"benchmark,bf16,ptq,stderr\na,62,62,0.1\nb,55,{lost},0.1\n"))
    verdict = judge(found, load_policy("drop-1pct"))
    assert verdict.outcome == INCONCLUSIVE
    assert "recovery on b was not measured" in " ".join(check.why for check in verdict.checks)


def test_perplexity_is_better_when_lower_though_nobody_says_so(tmp_path: Path) -> None:
    found = compare(read(tmp_path / "t.csv", "benchmark,metric,bf16,ptq,stderr\nwiki,word_perplexity,10,14,0.05\n"))
    assert not found.benchmarks[0].higher_is_better
    assert recoveries(found, "ptq")[0] < 0.8


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\n", "\r\n"])
def test_a_quoted_cell_may_hold_any_separator(tmp_path: Path, separator: str) -> None:
    (tmp_path / "t.csv").write_bytes(f'benchmark,bf16\r\n"a{separator}b",85.8\r\nc,3\r\n'.encode())
    (record,) = read_imported(tmp_path / "t.csv", "bf16") or []
    assert isinstance(record.data, ScoresData)
    assert [score.task for score in record.data.scores] == [f"a{separator}b", "c"]


@pytest.mark.parametrize(
    ("extra", "value", "low", "code"),
    [
        (",0", 0.796, None, 3),  # printed as 0 and no n: nobody knows
        (",0,1000", 0.796, 0.9641, 3),  # n gives one
        (",0.0001", 0.796, 0.9947, 0),
        (",0.0001", 0.78, 0.9747, 1),
    ],
)
def test_a_standard_error_of_exactly_0_is_a_missing_one(
    tmp_path: Path, extra: str, value: float, low: float | None, code: int
) -> None:
    columns = "stderr,items" if extra.count(",") == 2 else "stderr"
    text = f"benchmark,arm,score,{columns}\nmmlu,bf16,0.8{extra}\nmmlu,qad,{value}{extra}\n"
    found = compare(read(tmp_path / "t.csv", text))
    recovery = found.benchmarks[0].recovery["qad"]
    assert recovery is not None
    assert recovery.low == (None if low is None else pytest.approx(low, abs=5e-4))
    assert judge(found, load_policy("drop-1pct")).exit_code == code
    said = [note for note in found.not_compared if "printed as 0" in note]
    assert len(said) == (2 if extra.startswith(",0,") or extra == ",0" else 0)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_none_or_all_right_of_n_has_an_error_too(value: float) -> None:
    found = standard_error(PublishedScore("t", "acc", value, 1.0, True, None, 1000, None, 0.0))
    assert found == pytest.approx((0.5 * 0.5 / 1001 / 1000) ** 0.5, rel=1e-3)
    assert standard_error(PublishedScore("t", "acc", value, 1.0, True, None, None, None, 0.0)) is None


def test_noise_of_a_rerun() -> None:
    """AIME25 at 89.1 % of 30 x 64 answers; half of an answer's variance changes between runs."""
    score = PublishedScore("AIME25", "score", 89.1, 100.0, True, None, 30, 64, None)
    assert standard_error(score) == pytest.approx(100 * (0.5 * 0.891 * 0.109 / 1920) ** 0.5)
