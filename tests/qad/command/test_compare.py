"""`qad compare` and `qad gate` as commands: what they read, refuse, write and return."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.compare.recovery import compare
from harness.records import record as record_files
from harness.records.comparison import from_json, to_json
from harness.records.record import AccuracyData, Data, Engine, Item, MemoryData, Record, TaskScore
from qad.command.cli import main

ENGINE = Engine("transformers", "5.24", "float32", "cpu", "torch", emulated=False)
LOSS = {"bf16": 0.0, "ptq": 0.35, "qad": 0.1}


def record(arm: str, data: Data, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "arm": arm,
        "model": "tiny",
        "checkpoint": f"hash-{arm}",
        "engine": ENGINE,
        "settings": {"seed": 0},
        "provenance": {},
        "created": "2026-01-01T00:00:00Z",
        "seconds": 1.0,
        "data": data,
    }
    return Record(**{**fields, **changes})


def task(name: str, arm: str, n: int = 400, **changes: Any) -> TaskScore:
    rng = np.random.default_rng(len(name))
    margin, noise = rng.standard_normal(n) + 0.8, rng.standard_normal(n)
    scores = (margin + LOSS[arm] * (noise - 0.4) > 0).astype(float)
    items = [Item(f"d{i}", f"p{i}", f"t{i}", f"c{i}", s) for i, s in enumerate(scores.tolist())]
    fields: dict[str, Any] = {
        "task": name,
        "version": "1",
        "metric": "acc",
        "filter": "none",
        "n_shot": 0,
        "higher_is_better": True,
        "chance": 0.25,
        "limit": None,
        "items": items,
    }
    return TaskScore(**{**fields, **changes})


def arms(**changes: Any) -> list[Record]:
    return [
        r
        for arm in LOSS
        for r in (
            record(arm, AccuracyData([task(name, arm, **changes) for name in ("facts", "agreement", "words")])),
            record(arm, MemoryData({"bf16": 100}, 100, 1000 if arm == "bf16" else 350, 50, 0)),
        )
    ]


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.figures.drawing._svg", lambda prefix, *_args, **_kwargs: f'<svg id="{prefix}"></svg>')


def write(folder: Path, records: list[Record]) -> list[str]:
    """Folders of records as a run leaves them, baseline first."""
    for r in records:
        record_files.write(r, folder / "measure" / r.arm / f"{r.kind}.json")
    return [str(folder / "measure" / arm) for arm in dict.fromkeys(r.arm for r in records)]


def test_compare_writes_a_folder_that_gate_and_report_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["compare", *write(tmp_path, arms()), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for part in ("Median recovery", "Worst benchmark", "QAD minus PTQ", "PAIRED", "QAD AGAINST PTQ", "exact McNemar"):
        assert part in text.replace("PTQ AGAINST BF16", "PAIRED PTQ AGAINST BF16")
    comparison = json.loads((out / "comparison.json").read_text())
    assert comparison == to_json(compare(arms())) | {"arms": ["bf16", "ptq", "qad"]} or from_json(comparison) == compare(arms())
    assert comparison["memory_ratio"]["qad"]["value"] == 0.35
    assert {p.name for p in (out / "report").iterdir()} == {"report.html", "report.md", "report.json", "tables"}
    assert not list(tmp_path.rglob("*.partial"))
    codes = set()
    for results in (out, out / "comparison.json", out / "report" / "report.json", tmp_path):
        codes.add(main(["gate", str(results), "--policy", "size-first", "--json"]))
        verdict = json.loads(capsys.readouterr().out)
        assert verdict["arm"] == "qad"
        assert verdict["checks"][-1]["threshold"] == "memory_ratio"
    assert len(codes) == 1
    assert main(["report", str(out), "--policy", "size-first"]) == 0
    assert json.loads((out / "report" / "report.json").read_text())["verdict"]["policy"] == "size-first"
    assert main(["show", str(out)]) == 0


def test_the_reports_verdict_is_the_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["compare", *write(tmp_path, arms()), "--out", str(out), "--policy", "mlperf-99"]) == 0
    raw = json.loads((out / "report" / "report.json").read_text())
    capsys.readouterr()
    code = main(["gate", str(out), "--policy", "mlperf-99", "--json"])
    verdict = json.loads(capsys.readouterr().out)
    assert raw["verdict"] == verdict
    assert code == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[verdict["outcome"]]
    html = (out / "report" / "report.html").read_text()
    assert f"{verdict['outcome']} for QAD by policy mlperf-99" in html
    assert html.index('class="verdict') < html.index('class="outcome"') < html.index("<h2")


@pytest.mark.parametrize(("ptq", "code", "word"), [(0, 0, "PASS"), (4000, 1, "FAIL"), (40, 3, "INCONCLUSIVE")])
def test_exit_codes_of_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str], ptq: int, code: int, word: str) -> None:
    """Of 20,000 items BF16 gets 16,000; PTQ loses `ptq` of them and wins nothing. 40 of 4,000 are decided by few."""
    n = 4000 if ptq == 40 else 20_000
    right = n * 4 // 5
    base = [1.0] * right + [0.0] * (n - right)
    other = [0.0] * ptq + base[ptq:]

    def scores(values: list[float]) -> TaskScore:
        items = [Item(f"d{i}", "", "", f"c{i}", s) for i, s in enumerate(values)]
        return TaskScore("facts", "1", "acc", "none", 0, True, None, None, items)

    records = [record("bf16", AccuracyData([scores(base)])), record("ptq", AccuracyData([scores(other)]))]
    write(tmp_path, records)
    assert main(["gate", str(tmp_path)]) == code
    assert capsys.readouterr().out.startswith(f"{word}: PTQ recovers ")


@pytest.mark.filterwarnings("default:taken by their place")
def test_arms_are_named_by_flag_record_or_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for place, arm in enumerate(LOSS):
        file = tmp_path / f"{place}.json"
        record_files.write(record("custom", AccuracyData([task("facts", arm)]), checkpoint=arm), file)
        files.append(str(file))
    assert main(["compare", *files, "--out", str(tmp_path / "placed")]) == 0
    assert f"taken by their place: bf16={files[0]} ptq={files[1]} qad=" in capsys.readouterr().err
    assert json.loads((tmp_path / "placed" / "comparison.json").read_text())["arms"] == ["bf16", "ptq", "qad"]
    named = [f"bf16={files[0]}", f"mine={files[1]}"]
    assert main(["compare", *named, "--out", str(tmp_path / "named")]) == 0
    assert json.loads((tmp_path / "named" / "comparison.json").read_text())["arms"] == ["bf16", "mine"]
    assert main(["compare", f"a={files[0]}", f"b={files[1]}", "--out", str(tmp_path / "none")]) == 2
    assert "none of the arms is bf16 (a, b)" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_runs_that_are_not_comparable_are_refused_and_every_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Task version, few-shot, limit, seed, template hash, generation settings, backend, filter."""
    base = record("bf16", AccuracyData([task("facts", "bf16", protocol={"chat_template_sha": "a", "gen": {"t": 0}})]))
    other = record(
        "ptq",
        AccuracyData(
            [task("facts", "ptq", version="2", n_shot=1, limit=400, protocol={"chat_template_sha": "b", "gen": {"t": 1}})]
        ),
        settings={"seed": 1},
        engine=dataclasses.replace(ENGINE, name="vllm"),
    )
    out = tmp_path / "out"
    assert main(["compare", *write(tmp_path, [base, other]), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    for part in (
        "version under filter none (bf16 1, ptq 2)",
        "n_shot under filter none (bf16 0, ptq 1)",
        "limit under filter none (bf16 None, ptq 400)",
        "seed (bf16 0, ptq 1)",
        "chat_template_sha under filter none (bf16 a, ptq b)",
        "gen.t under filter none (bf16 0, ptq 1)",
        "engine (bf16 transformers 5.24, ptq vllm 5.24)",
    ):
        assert part in error
    assert len(error.splitlines()) == 1
    assert not out.exists()
    filtered = record("ptq", AccuracyData([task("facts", "ptq", filter="strict", protocol={})]))
    assert main(["compare", *write(tmp_path / "f", [base, filtered]), "--out", str(out)]) == 2
    assert "facts: filters (bf16 ['none'], ptq ['strict'])" in capsys.readouterr().err


def test_an_exported_folder_measured_by_hand_compares_with_its_original(tmp_path: Path) -> None:
    """Each record has the name of the folder that it was measured in."""
    base, ptq = (record(arm, AccuracyData([task("facts", arm)])) for arm in ("bf16", "ptq"))
    renamed = dataclasses.replace(ptq, model="tiny, NVFP4 (PTQ)")
    out = tmp_path / "out"
    assert main(["compare", *write(tmp_path, [base, renamed]), "--out", str(out)]) == 0
    assert f"# {base.model}\n" in (out / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "nowhere", "--out", "x"], "does not exist"),
        (["gate", "nowhere"], "no run folder, comparison folder or report.json"),
        (["gate", "nowhere", "--policy", "lenient"], "shipped policies are"),
        (["gate", "list.json"], "list.json is no comparison of this version"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[1]")
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_damaged_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path, arms())
    (tmp_path / "measure" / "ptq" / "memory.json").write_text("{")
    assert main(["compare", *paths, "--out", str(tmp_path / "out")]) == 2
    assert "memory.json is not a measurement record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((), [1], "the file: it should be an object, got [1]"),
        ((), None, "the file: it should be an object, got None"),
        (("kind",), ["accuracy"], "unknown kind of record ['accuracy']; known: memory, "),
        (("arm",), None, "record.arm: Input should be a valid string, got None"),
        (("seconds",), "long", "record.seconds: Input should be a valid number, got 'long'"),
        (("settings",), [], "record.settings: Input should be an object, got []"),
        (("settings", "seed"), float("nan"), "NaN is no number of JSON"),
        (("training",), {"seed": 1}, "record.training.recipe: Field required"),
        (("training",), {"seed": "1", "recipe": {}}, "record.training.seed: Input should be a valid integer, got '1'"),
        (("engine",), "vllm", "record.engine: Input should be an object, got 'vllm'"),
        (("engine", "emulated"), 1, "record.engine.emulated: Input should be a valid boolean, got 1"),
        (("engine", "made\nup"), 1, "record.engine.made\ufffdup: Unexpected keyword argument, got 1"),
        (("seconds",), True, "record.seconds: Input should be a valid number, got True"),
        (("data", "tasks", 0, "items", 2, "score"), "\ud800", "data is no JSON: "),
        (("data", "tasks"), "facts", "data.tasks: Input should be a valid array, got 'facts'"),
        (("data", "tasks", 0, "items", 2, "score"), None, "data.tasks[0].items[2].score: Input should be a valid number"),
        (("data", "tasks", 0, "n_shot"), 0.5, "data.tasks[0].n_shot: Input should be a valid integer, got 0.5"),
    ],
)
def test_a_damaged_record_names_the_place(tmp_path: Path, place: tuple[Any, ...], value: Any, message: str) -> None:
    raw = node = {"file": record_files.to_json(record("bf16", AccuracyData([task("facts", "bf16", n=4)])))}
    *parents, leaf = ("file", *place)
    for parent in parents:
        node = node[parent]
    node[leaf] = value
    path = tmp_path / "accuracy.json"
    path.write_text(json.dumps(raw["file"]))
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a measurement record: {message}")):
        record_files.read(path)


def test_one_arm_alone_is_compared_with_its_controls_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path, *_), control = write(tmp_path, arms()), tmp_path / "again.json"
    again = record("bf16", AccuracyData([task(name, "bf16") for name in ("facts", "agreement", "words")]))
    record_files.write(dataclasses.replace(again, control={"batch_size": 3}), control)
    out = ["--out", str(tmp_path / "out")]
    assert main(["compare", path, *out]) == 2
    assert "bf16 is the only arm: give another one to compare with it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["compare", path, *out, "--noise-floor", str(control)]) == 0
    assert "noise floor, bf16 against itself (batch_size 3)" in capsys.readouterr().out


def test_a_hostile_arm_name_stays_inside_the_folder(tmp_path: Path) -> None:
    name = "../../<b>\u202e"
    paths = []
    for arm, source in (("bf16", "bf16"), (name, "ptq")):
        path = tmp_path / f"{source}.json"
        record_files.write(record(arm, AccuracyData([task("facts", source)])), path)
        paths.append(str(path))
    out = tmp_path / "out"
    assert main(["compare", *paths, "--out", str(out)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bf16.json", "out", "ptq.json"]
    assert len(list((out / "measure").iterdir())) == 2
    html = (out / "report" / "report.html").read_text()
    assert "<b>" not in html
    assert "\u202e" not in html


def test_a_comparison_survives_json() -> None:
    found = compare(arms())
    assert from_json(json.loads(json.dumps(to_json(found)))) == found
    raw = to_json(found)
    raw["median_recovery"]["ptq"]["value"] = None  # was not finite
    assert math.isnan(from_json(raw).median_recovery["ptq"].value)
    with pytest.raises(ValueError, match="Field required"):
        from_json({"arms": []})


def test_show_tells_what_a_comparison_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *write(tmp_path, arms()), "--out", str(tmp_path / "out"), "--policy", "size-first"]) == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "out")]) == 0
    first, *rest, last = capsys.readouterr().out.splitlines()
    assert first.startswith("comparison of 3 arms, made 20")
    assert rest[0] == "  bf16 measured: accuracy, memory"
    assert last == f"next: qad gate {tmp_path / 'out'} --policy size-first"


def test_what_was_left_out_is_said_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Path(__file__).parents[2] / "harness" / "imported" / "recorded"
    for arm, file in (("bf16", "vllm.json"), ("ptq", "guidellm.json")):
        assert main(["measure", "import", str(recorded / file), "--arm", arm, "--out", str(tmp_path / f"{arm}.json")]) == 0
    assert main(["compare", str(tmp_path / "bf16.json"), str(tmp_path / "ptq.json"), "--out", str(tmp_path / "out")]) == 2
    assert re.search(r"nothing could be compared: .*they differ in .*load tool", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
