"""`qad measure accuracy` through folders: the record, its samples, its control, and what compare makes of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from scored import read_samples

from harness.records import record as records
from harness.records.record import AccuracyData
from qad.command.cli import main

SUITE = """
name: two
tasks:
  - {task: qad_agreement, limit: 30}
  - {task: sums}
"""


@pytest.fixture
def suite(tmp_path: Path, sums_task: str) -> Path:
    (tmp_path / "s" / "tasks").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "s" / "two.yaml").write_text(SUITE)
    (tmp_path / "s" / "tasks" / "sums.yaml").write_text(sums_task)
    rows = [{"query": query, "answer": "seven"} for query in ("The river", "A heron", "The miller", "In spring")]
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "s" / "two.yaml"


def test_a_suite_by_hand_its_control_and_the_comparison(
    tiny_llama_dir: Path, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = ["measure", "accuracy", str(tiny_llama_dir), "--suite", str(suite), "--dtype", "float32"]
    assert main([*measure, "--out", str(tmp_path / "x.json")]) == 2
    assert "there is no rows.jsonl" in capsys.readouterr().err
    measure += ["--suite-data", str(tmp_path / "data")]
    for arm, more in (("bf16", []), ("again", ["--noise-floor"]), ("ptq", [])):
        out = tmp_path / arm / "accuracy.json"
        assert main([*measure, "--arm", "bf16" if arm == "again" else arm, "--out", str(out), *more]) == 0
        assert sorted(path.name for path in out.parent.iterdir()) == ["accuracy.json", "accuracy.samples.parquet"]
    first, again = (records.read(tmp_path / arm / "accuracy.json") for arm in ("bf16", "again"))
    assert isinstance(first.data, AccuracyData)
    assert first.settings["suite"]["name"] == "two"
    assert again.control == {"batch_size": 8, "attention": "eager", "seed": "+10000"}
    assert (again.settings, again.checkpoint) == (first.settings, first.checkpoint)
    assert "eager attention" in again.engine.kernel_path
    assert first.control is None
    samples = read_samples(tmp_path / "bf16" / str(first.data.samples))
    items = [item for task in first.data.tasks for item in task.items]
    assert [(s.doc_hash, s.prompt_hash, s.target_hash, s.score) for s in samples] == [
        (i.doc_hash, i.prompt_hash, i.target_hash, i.score) for i in items
    ]
    outputs = first.data.tasks[1].outputs
    assert outputs is not None
    assert [s.tokens for s in samples[30:]] == outputs.tokens
    arms = [str(tmp_path / "bf16"), str(tmp_path / "ptq")]
    out = tmp_path / "cmp"
    capsys.readouterr()
    code = main(["compare", *arms, "--noise-floor", str(tmp_path / "again"), "--out", str(out)])
    assert code == 0
    assert "noise floor, bf16 against itself (batch_size 8, attention eager, seed +10000)" in capsys.readouterr().out
    comparison = json.loads((out / "comparison.json").read_text())
    assert comparison["arms"] == ["bf16", "ptq"]
    assert comparison["noise_floor"]["bf16"]["median"]["low"] <= 1 <= comparison["noise_floor"]["bf16"]["median"]["high"]
    assert comparison["outputs"][0]["benchmark"] == "sums"
    assert (out / "measure" / "bf16-again" / "accuracy.json").is_file()
    assert main(["compare", *arms, "--noise-floor", str(tmp_path / "ptq"), "--out", str(out)]) == 2
    assert "is no control" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["accuracy", "--tasks", "qad_facts", "--suite", "smoke"], "--tasks and --suite"),
        (["accuracy", "--noise-floor", "--server", "http://127.0.0.1:9"], "--server and --noise-floor"),
        (["accuracy", "--suite", "smok"], "neither a file nor shipped"),
    ],
)
def test_what_cannot_be_measured(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    kind, *more = options
    assert main(["measure", kind, str(tiny_llama_dir), "--out", str(tmp_path / "r.json"), *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif("QAD_EVAL_DATA" not in os.environ, reason="QAD_EVAL_DATA: folder of arc_easy.jsonl and others")
def test_local_suites_run_on_real_files(tiny_llama_dir: Path, tmp_path: Path) -> None:
    data = os.environ["QAD_EVAL_DATA"]
    out = tmp_path / "accuracy.json"
    assert (
        main(
            [
                "measure",
                "accuracy",
                str(tiny_llama_dir),
                "--suite",
                "arc-easy",
                "--suite-data",
                data,
                "--limit",
                "3",
                "--dtype",
                "float32",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    found = records.read(out).data
    assert isinstance(found, AccuracyData)
    assert [(t.task, t.metric, t.chance, len(t.items)) for t in found.tasks] == [("qad_arc_easy", "acc", 0.25, 3)]
