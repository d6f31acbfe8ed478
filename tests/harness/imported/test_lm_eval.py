"""Scores made elsewhere, item by item: lm-eval folders and NeMo Evaluator runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.compare.recovery import compare
from harness.imported.scores import read_imported
from harness.records.record import AccuracyData, Record, ScoresData
from qad.errors import DataError

# --- lm-eval -------------------------------------------------------------------------------------


def lm_eval_folder(folder: Path, right: int, *, samples: bool = True, seed: int = 0, shots: int = 5) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "doc_id": i,
            "doc": {"q": i},
            "target": "0",
            "arguments": {f"gen_args_{k}": {} for k in range(4)},
            "filter": "none",
            "metrics": ["acc"],
            "doc_hash": f"d{i}",
            "prompt_hash": f"p{i}",
            "target_hash": f"t{i}",
            "acc": float(i < right),
        }
        for i in range(100)
    ]
    raw = {
        "results": {"arc": {"alias": "arc", "acc,none": right / 100, "acc_stderr,none": 0.04}},
        "versions": {"arc": 1.0},
        "n-shot": {"arc": shots},
        "higher_is_better": {"arc": {"acc": True}},
        "configs": {"arc": {"output_type": "multiple_choice"}},
        "n-samples": {"arc": {"original": 100, "effective": 100}},
        "config": {"model": "hf", "limit": None, "gen_kwargs": None, "random_seed": seed},
        "model_name": "org/model",
        "chat_template_sha": None,
        "lm_eval_version": "0.4.13",
    }
    (folder / "results_2026-01-01T00-00-00.json").write_text(json.dumps(raw))
    if samples:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "samples_arc_2026-01-01T00-00-00.jsonl").write_text(lines)
    return folder


def imported(folder: Path, arm: str) -> list[Record]:
    found = read_imported(folder, arm)
    assert found is not None
    return found


def test_lm_eval_samples_are_paired(tmp_path: Path) -> None:
    records = [
        *imported(lm_eval_folder(tmp_path / "a" / "org__model", 80).parent, "bf16"),
        *imported(lm_eval_folder(tmp_path / "b" / "org__model", 76).parent, "ptq"),
    ]
    assert isinstance(records[0].data, AccuracyData)
    assert records[0].provenance["imported"]["source"].startswith("lm-eval 0.4.13, ")
    row = compare(records).benchmarks[0]
    assert (row.n, row.chance, row.n_shot, row.flips) == (100, 0.25, 5, {"ptq": (4, 0)})


@pytest.mark.parametrize("cut", [0, 50, 99], ids=["one item", "half", "all but one"])
def test_samples_that_are_not_all_questions_are_no_score(cut: int, tmp_path: Path) -> None:
    folder = lm_eval_folder(tmp_path / "org__model", 80)
    file = folder / "samples_arc_2026-01-01T00-00-00.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[: cut or 1]))
    with pytest.raises(DataError, match=f"holds {cut or 1} of the 100 questions asked .* remove it for the printed"):
        imported(folder, "ptq")


def test_samples_of_several_filters_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    folder = lm_eval_folder(tmp_path / "org__model", 80)
    file = folder / "samples_arc_2026-01-01T00-00-00.jsonl"
    rows = [
        {k: v for k, v in json.loads(line).items() if k not in ("filter", "metrics")} for line in file.read_text().splitlines()
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"is of an lm-eval that wrote no filter: .* remove it for the printed scores"):
        imported(folder, "ptq")


def test_lm_eval_without_samples_is_printed_means(tmp_path: Path) -> None:
    records = [
        record
        for arm, right in (("bf16", 80), ("ptq", 76))
        for record in imported(lm_eval_folder(tmp_path / arm, right, samples=False), arm)
    ]
    assert isinstance(records[0].data, ScoresData)
    recovery = compare(records).benchmarks[0].recovery["ptq"]
    assert recovery is not None
    assert recovery.value == pytest.approx(0.95)
    assert recovery.method == "unpaired, printed standard error"


def test_lm_eval_runs_under_other_settings_are_refused(tmp_path: Path) -> None:
    records = [
        *imported(lm_eval_folder(tmp_path / "a", 80), "bf16"),
        *imported(lm_eval_folder(tmp_path / "b", 76, seed=1, shots=0), "ptq"),
    ]
    with pytest.raises(DataError, match=r"random_seed \(bf16 0, ptq 1\).*n_shot under filter none \(bf16 5, ptq 0\)"):
        compare(records)


def changed(folder: Path, **changes: Any) -> Path:
    """The result file of an lm-eval folder, with other values at its top."""
    (file,) = folder.rglob("results_*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


def test_two_models_in_one_folder_are_both_named(tmp_path: Path) -> None:
    lm_eval_folder(tmp_path / "out" / "a", 80)
    other = lm_eval_folder(tmp_path / "out" / "b", 76)
    (samples,) = other.glob("samples_*")
    samples.unlink()
    row = {"results": {"piqa": {"acc,none": 0.4}}}
    changed(other, **row)
    assert len(imported(tmp_path / "out", "qad")) == 2, "another task of the same model"
    for names in (
        {"model_name": "org/other"},
        {"model_name": None, "config": {"model_args": {"pretrained": "org/other"}}},
        {"model_name": "", "config": {"model_args": "pretrained=org/other"}},
    ):
        changed(other, **row, **names)
        with pytest.raises(DataError, match=r"is of the model org/model, .* of .*org/other: give the folder of one model"):
            read_imported(tmp_path / "out", "qad")


def test_rows_without_a_score_and_groups_without_their_tasks_are_named(tmp_path: Path) -> None:
    for arm in ("bf16", "qad"):
        folder = lm_eval_folder(tmp_path / arm, 80, samples=False)
        changed(
            folder,
            results={
                "arc": {"alias": "arc", "acc,none": 0.8, "acc_stderr,none": 0.04},
                "whole": {"acc,none": 0.7, "acc_stderr,none": 0.01},
                "parted": {"acc,none": 0.6, "acc_stderr,none": 0.01},
                "empty": {"alias": "empty"},
                "nan": {"acc,none": float("nan")},
                "text": {"acc,none": "N/A"},
            },
            group_subtasks={"whole": ["arc"], "parted": ["arc", "gone", "away"]},
        )
    found = compare([*imported(tmp_path / "bf16", "bf16"), *imported(tmp_path / "qad", "qad")])
    assert [row.task for row in found.benchmarks] == ["arc", "parted"]
    for arm in ("bf16", "qad"):
        for note in (
            f"{arm}, parted: of its 3 tasks gone, away are not in results_2026-01-01T00-00-00.json",
            *(
                f"{arm}, {task}: its row in results_2026-01-01T00-00-00.json has no score that is a number"
                for task in ("empty", "nan", "text")
            ),
        ):
            assert note in found.not_compared


def test_scores_of_a_hundred_are_not_shares_of_one(tmp_path: Path) -> None:
    folder = lm_eval_folder(tmp_path / "a", 80, samples=False)
    changed(
        folder,
        results={"wmt": {"bleu,none": 34.2}, "ppl": {"perplexity,none": 12.5}},
        higher_is_better={"ppl": {"perplexity": False}},
    )
    (record,) = imported(folder, "bf16")
    assert isinstance(record.data, ScoresData)
    assert [(s.task, s.value, s.maximum) for s in record.data.scores] == [("wmt", 34.2, 100.0), ("ppl", 12.5, 1.0)]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_newline_alone_ends_a_line_of_samples(tmp_path: Path, separator: str) -> None:
    plain = imported(lm_eval_folder(tmp_path / "plain", 80), "bf16")[0].data
    folder = lm_eval_folder(tmp_path / "a", 80)
    (samples,) = folder.glob("samples_*")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows[7]["doc"]["q"] = f"a{separator}b"
    samples.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert imported(folder, "bf16")[0].data == plain
    nemo_folder = nemo(tmp_path / "aime25", 20)
    expected = imported(nemo_folder, "bf16")[0].data
    lines = (nemo_folder / "results.jsonl").read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), "response": f"a{separator}b"}, ensure_ascii=False)
    (nemo_folder / "results.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert imported(nemo_folder, "bf16")[0].data == expected


@pytest.mark.parametrize("task", ["a" * 5000, "../up", "a/b", "a\x00b", "\ud800"])
def test_a_task_may_have_any_name(tmp_path: Path, task: str) -> None:
    folder = lm_eval_folder(tmp_path / "a", 80, samples=False)
    changed(folder, results={task: {"acc,none": 0.8}})
    (record,) = imported(folder, "bf16")
    assert isinstance(record.data, ScoresData)
    assert [score.task for score in record.data.scores] == [task.replace("\ud800", "?")]


def test_an_answer_may_be_any_text(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"problem_idx": "\\ud800", "reward": 1, "expected_answer": "\\ud800"}\n')
    assert read_imported(path, "bf16")


def test_a_damaged_lm_eval_folder(tmp_path: Path) -> None:
    folder = lm_eval_folder(tmp_path / "a", 80)
    (folder / "results_2026-01-01T00-00-00.json").write_text("{")
    with pytest.raises(DataError, match="is no result file of lm-eval"):
        read_imported(folder, "bf16")
    folder = lm_eval_folder(tmp_path / "b", 80)
    (folder / "samples_arc_2026-01-01T00-00-00.jsonl").write_text('{"metrics": ["acc"], "filter": "none"}\n')
    (record,) = read_imported(folder, "bf16") or []
    assert isinstance(record.data, ScoresData), "a metric of the whole corpus is read as printed"


# --- NeMo Evaluator ------------------------------------------------------------------------------


def nemo(folder: Path, wrong: int) -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"problem_idx": i, "reward": float(8 * i + r >= wrong), "repeat": r, "expected_answer": str(i)}
        for r in range(8)
        for i in range(30)
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_nemo_evaluator_repeats_are_clusters(tmp_path: Path) -> None:
    nemo(tmp_path / "a" / "aime25", 20)
    nemo(tmp_path / "b" / "aime25", 36)
    found = compare([*imported(tmp_path / "a", "bf16"), *imported(tmp_path / "b", "ptq")])
    row = found.benchmarks[0]
    assert (row.task, row.n, row.clusters, row.flips["ptq"]) == ("aime25", 240, 30, (16, 0))
    assert found.contrasts[0].test == "exact sign-flip over clusters"
    (single,) = imported(tmp_path / "a" / "aime25" / "results.jsonl", "bf16")
    assert isinstance(single.data, AccuracyData)
    assert single.data.tasks[0].task == "aime25"


def test_a_problem_that_is_there_twice_is_named(tmp_path: Path) -> None:
    folder = nemo(tmp_path / "aime25", 20)
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"problem_idx": 3, "reward": 1.0, "repeat": 2}\n')
    with pytest.raises(DataError, match="holds problem 3, repeat 2, twice"):
        read_imported(folder, "bf16")


@pytest.mark.parametrize(
    "line",
    [
        '{"problem_idx": 3}',
        '{"problem_idx": 3, "reward": NaN}',
        '{"problem_idx": 3, "reward": "1"}',
        '{"problem_idx": 3, "reward": 1, "reward": 0}',
        '{"problem_idx": 3, "reward": 1e999}',
        "7",
        '{"problem_idx": 3, "reward": 1, "repeat": -1}',
        "[" * 100_000,
    ],
)
def test_a_damaged_nemo_file_names_its_line(tmp_path: Path, line: str) -> None:
    folder = nemo(tmp_path / "aime25", 20)
    with (folder / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"results\.jsonl, line 241"):
        read_imported(folder, "bf16")


def test_another_folder_is_none_of_them(tmp_path: Path) -> None:
    assert read_imported(tmp_path, "bf16") is None
