"""`trtllm-bench` is driven, and what it leaves becomes a record. The executable is simulated: see fake_trtllm_bench.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.engines.trtllm_bench import run_bench
from harness.records.record import read
from harness.records.serving import ServingData
from harness.serving.statistics import summarize
from qad.command.cli import main
from qad.errors import EngineError, UsageError

FAKE = Path(__file__).with_name("fake_trtllm_bench.py")


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Of an environment that has trtllm-bench beside it."""
    write_script(tmp_path / "trtllm-bench", f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    (tmp_path / "python").symlink_to(sys.executable)
    return tmp_path / "python"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    lines = [{"task_id": i, "prompt": "a b c", "output_tokens": 4} for i in range(4)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "d.jsonl"


def measure(folder: Path, python: Path, out: Path, *more: str) -> int:
    return main(
        [
            "measure",
            "trtllm-bench",
            str(folder),
            "--python",
            str(python),
            "--isl",
            "12",
            "--osl",
            "5",
            "--requests",
            "6",
            "--repeats",
            "2",
            "--out",
            str(out),
            *more,
        ]
    )


def data_of(path: Path) -> ServingData:
    data = read(path).data
    assert isinstance(data, ServingData)
    return data


def test_throughput_becomes_a_record_of_single_requests(
    python: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "r.json"
    more = ["--concurrency", "1,2", "--arm", "ptq", "--max-model-len", "64", "--engine-option=--tp", "--engine-option=2"]
    assert measure(tiny_llama_dir, python, out, *more) == 0
    record, data = read(out), data_of(out)
    assert (record.arm, record.engine.name, record.engine.version, record.engine.dtype) == ("ptq", "trtllm", "1.2.1", "bfloat16")
    assert record.settings["mode"] == "throughput"
    assert data.driver == "trtllm-bench throughput 1.2.1"
    assert [(cell.concurrency, cell.input_tokens, cell.output_tokens, len(cell.repeats)) for cell in data.cells] == [
        (1, 12, 5, 2),
        (2, 12, 5, 2),
    ]
    for cell in data.cells:
        summary = summarize(cell)
        assert (summary.requests, summary.failed, summary.invalid) == (12, 0, "")
        assert summary.ttft_ms == pytest.approx([50.0, 50.0])
        assert summary.tpot_ms == pytest.approx([10.0, 10.0])
        assert any("repeat a prompt the server had seen" in warning for warning in summary.warnings), "its own warm-up"
    first, second = data.cells[0].repeats[0], data.cells[1].repeats[0]
    assert (first.peak_active, second.peak_active) == (1, 2)
    assert any("no HTTP" in note for note in data.notes)
    assert "ptq, repeat 2 of 2, concurrency 2, 12 + 5 tokens: " in capsys.readouterr().out
    asked = [json.loads(line) for line in (out.parent / "r.trtllm-bench" / "1-1.jsonl").read_text().splitlines()]
    other = [json.loads(line) for line in (out.parent / "r.trtllm-bench" / "0-1.jsonl").read_text().splitlines()]
    assert len(asked) == 6
    assert not {line["prompt"] for line in asked} & {line["prompt"] for line in other}
    assert "'max_seq_len': 64" in (out.parent / "r.trtllm-bench" / "1-1.json.log").read_text()
    assert "'tp': 2" in (out.parent / "r.trtllm-bench" / "1-1.json.log").read_text()


def test_latency_becomes_a_record_of_its_statistics(python: Path, tiny_llama_dir: Path, tmp_path: Path) -> None:
    assert measure(tiny_llama_dir, python, tmp_path / "r.json", "--mode", "latency") == 0
    data = data_of(tmp_path / "r.json")
    (cell,) = data.cells
    assert (cell.concurrency, [repeat.requests for repeat in cell.repeats]) == (1, [[], []])
    summary = summarize(cell)
    assert summary.ttft_ms == [50.0, 50.0]
    assert summary.tokens_per_s == pytest.approx([5 / 0.09] * 2)
    assert any("no single requests" in note for note in data.notes)


def test_arms_take_turns(python: Path, tiny_llama_dir: Path, tmp_path: Path) -> None:
    options = ["--python", str(python), "--isl", "12", "--osl", "5", "--requests", "2", "--concurrency", "1", "--repeats", "2"]
    folders = [str(tiny_llama_dir)] * 2
    assert main(["measure", "trtllm-bench", *folders, *options, "--arm", "bf16,qad", "--out", str(tmp_path / "m")]) == 0
    for arm in ("bf16", "qad"):
        assert data_of(tmp_path / "m" / arm / "serving.json").order == ["bf16", "qad", "qad", "bf16"]
    prompts = [(tmp_path / "m" / arm / "serving.trtllm-bench" / "0-0.jsonl").read_text() for arm in ("bf16", "qad")]
    assert prompts[0] == prompts[1]


def test_a_failed_request_makes_the_cell_invalid(
    python: Path, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAILED", "3")
    assert measure(tiny_llama_dir, python, tmp_path / "r.json", "--concurrency", "2", "--arm", "ptq") == 1
    assert "invalid: ptq, concurrency 2, 12 + 5 tokens: 2 of 12 requests failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mode", "latency", "--concurrency", "1,4"], "one request at a time, not 4"),
        (["--concurrency", "8"], "never keep 8 under way"),
        (["--arm", "a,b"], "names 2 arms, 1 folders"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_anything_runs(
    more: list[str], message: str, python: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(tiny_llama_dir, python, tmp_path / "r.json", *more) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("r*"))


def test_an_environment_without_it_is_named(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QAD_TRTLLM_PYTHON", raising=False)
    (tmp_path / "python").symlink_to(sys.executable)
    assert measure(tiny_llama_dir, tmp_path / "python", tmp_path / "r.json", "--concurrency", "2") == 2
    assert "trtllm-bench is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo CUDA out of memory >&2\nexit 3", r"ended with code 3; its last lines:\nCUDA out of memory"),
        ("sleep 600", r"did not end within 0\.5 s"),
        ("true", "left no report of release 1.2"),
        ("echo '[]' > report.json", "left no report of release 1.2"),
    ],
)
def test_a_run_that_fails_shows_why(
    script: str, message: str, model_dir: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path / "trtllm-bench", f"#!/bin/sh\n{script}\n")
    with pytest.raises(EngineError, match=message):
        run_bench(tmp_path / "python", model_dir, dataset, tmp_path / "report.json", timeout_s=0.5 if "sleep" in script else 60)


def test_a_report_of_an_earlier_run_is_not_read(python: Path, model_dir: Path, dataset: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_bench(python, model_dir, dataset, report)
    write_script(tmp_path / "trtllm-bench", "#!/bin/sh\ntrue\n")
    with pytest.raises(EngineError, match="left no report"):
        run_bench(python, model_dir, dataset, report)


def test_a_report_that_lacks_requests_is_refused(
    python: Path, model_dir: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LOST", "2")
    with pytest.raises(EngineError, match="reports 3 of 4 requests"):
        run_bench(python, model_dir, dataset, tmp_path / "report.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_the_folder_is_not_run(name: str, python: Path, model_dir: Path, dataset: Path, tmp_path: Path) -> None:
    (model_dir / name).write_text('{"auto_map": {"AutoModelForCausalLM": "evil.py"}}')
    with pytest.raises(UsageError, match=f"auto_map in {name}"):
        run_bench(python, model_dir, dataset, tmp_path / "report.json")


def test_the_process_tree_is_gone_after_a_run_that_was_cut_off(
    model_dir: Path, dataset: Path, tmp_path: Path, marked: Callable[[], list[int]], wait_for: Callable[[Any], None]
) -> None:
    write_script(tmp_path / "trtllm-bench", "#!/bin/sh\nsleep 600 &\nsleep 600\n")
    with pytest.raises(EngineError, match="did not end"):
        run_bench(tmp_path / "python", model_dir, dataset, tmp_path / "report.json", timeout_s=1.0)
    wait_for(lambda: not marked())
