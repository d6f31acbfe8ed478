"""Result files of load tools. What was recorded is in `recorded/`, with its origin in README.md there."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from harness.imported.load_tools import import_results, recognize
from harness.imported.scores import read_imported
from harness.records.serving import Repeat, ServingData
from harness.serving.statistics import summarize
from qad.command.cli import main
from qad.errors import DataError, UsageError

RECORDED = Path(__file__).parent / "recorded"
TTFT_MS, TPOT_MS, TOKENS = 2000.0, 500.0, 8  # of the server that the recorded runs were made against
FILES = {"vllm": "vllm.json", "aiperf": "aiperf.jsonl", "guidellm": "guidellm.json"}


def run_of(path: Path, tool: str | None = None) -> Repeat:
    data, _ = import_results(path, tool)
    (cell,) = data.cells
    (repeat,) = cell.repeats
    return repeat


@pytest.mark.parametrize("tool", FILES)
def test_one_server_measured_by_three_tools_agrees(tool: str) -> None:
    """The server waits 2000 ms and then 500 ms a token; the machine that recorded was busy, hence 10 %."""
    path = RECORDED / FILES[tool]
    assert import_results(path)[1] == tool
    repeat = run_of(path)
    good = [r for r in repeat.requests if not r.failed]
    assert len(good) == len(repeat.requests) == 8
    assert {r.output_tokens for r in good} == {TOKENS}
    ttft = statistics.median(r.ttft_ms for r in good if r.ttft_ms is not None)
    tpot = statistics.median(r.tpot_ms for r in good if r.tpot_ms is not None)
    assert ttft == pytest.approx(TTFT_MS, rel=0.1)
    assert tpot == pytest.approx(TPOT_MS, rel=0.1)
    wire = json.loads((RECORDED / "wire.json").read_text())[tool]
    assert tpot == pytest.approx(wire["tpot_ms"], rel=0.01), "what the tap saw of the same run"
    assert 0 < ttft - wire["ttft_ms"] < 150, "the client's clock starts before the connection is made"
    for r in good:
        assert r.e2e_ms is not None
        assert r.ttft_ms is not None
        assert r.tpot_ms == pytest.approx((r.e2e_ms - r.ttft_ms) / (TOKENS - 1))
    assert repeat.peak_active == 4
    assert repeat.window is not None
    assert repeat.window.tokens / repeat.window.seconds == pytest.approx(4 * TOKENS / 5.5, rel=0.2)


def test_guidellms_time_per_output_token_is_another_quantity() -> None:
    raw = json.loads((RECORDED / FILES["guidellm"]).read_text())
    theirs = raw["benchmarks"][0]["requests"]["successful"][0]["time_per_output_token_ms"]
    assert theirs > 1.2 * TPOT_MS, "it holds the time to the first token"


# --- formats that were written by hand after the tools' sources: no such tool runs on this machine --------------------


def sglang() -> dict[str, Any]:
    return {
        "backend": "sglang",
        "max_concurrency": 2,
        "random_input_len": 4,
        "random_output_len": 3,
        "duration": 2.0,
        "completed": 2,
        "total_output_tokens": 6,
        "total_output_tokens_retokenized": 7,
        "request_throughput": 1.0,
        "output_throughput": 3.0,
        "mean_ttft_ms": 150.0,
        "median_ttft_ms": 150.0,
        "p99_ttft_ms": 199.0,
        "mean_tpot_ms": 50.0,
        "median_tpot_ms": 50.0,
        "p99_tpot_ms": 50.0,
        "input_lens": [4, 4, 4],
        "output_lens": [3, 3, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.04, 0.06], [0.05, 0.05], []],
        "errors": ["", "", "Timeout"],
    }


def trtllm_requests() -> list[dict[str, Any]]:
    ms = 1_000_000
    return [
        {
            "id": i,
            "num_input_tokens": 4,
            "num_output_tokens": 5,
            "error_tokens": 0,
            "start_timestamp": (10 + i) * ms,
            "first_token_timestamp": (110 + i) * ms,
            "end_timestamp": (190 + i) * ms,
        }
        for i in range(3)
    ] + [
        {
            "id": 3,
            "num_input_tokens": 4,
            "num_output_tokens": 0,
            "error_tokens": 1,
            "start_timestamp": ms,
            "first_token_timestamp": -1,
            "end_timestamp": 2 * ms,
        }
    ]


def trtllm_report() -> dict[str, Any]:
    percentiles = {"p50": 20.0, "p90": 21.0, "p99": 22.0, "minimum": 18.0, "maximum": 23.0, "average": 20.1}
    return {
        "engine": {"version": "1.2.1"},
        "request_info": {
            "num_requests": 64,
            "avg_num_concurrent_requests": 7.5,
            "avg_input_length": 128.0,
            "avg_output_length": 64.0,
        },
        "performance": {
            "total_latency_ms": 4000.0,
            "system_output_throughput_tok_s": 1024.0,
            "request_latency_percentiles_ms": percentiles,
        },
        "streaming_metrics": {"ttft_percentiles": percentiles, "tpot_percentiles": percentiles},
    }


def written(folder: Path, value: Any) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(value))
    return path


def test_sglang(tmp_path: Path) -> None:
    data, tool = import_results(written(tmp_path, sglang()))
    (cell,) = data.cells
    summary = summarize(cell)
    assert (tool, cell.concurrency, cell.input_tokens, cell.output_tokens) == ("sglang", 2, 4, 3)
    assert (summary.requests, summary.failed) == (3, 1)
    assert "Timeout" in summary.invalid
    assert [r.tpot_ms for r in cell.repeats[0].requests if not r.failed] == pytest.approx([50.0, 50.0])
    assert [r.e2e_ms for r in cell.repeats[0].requests if not r.failed] == pytest.approx([200.0, 300.0])


def test_a_file_without_single_requests_gives_its_printed_statistics(tmp_path: Path) -> None:
    details = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    repeat = run_of(written(tmp_path, {k: v for k, v in sglang().items() if k not in details}))
    assert repeat.requests == []
    assert repeat.printed["ttft_ms"] == {"mean": 150.0, "p50": 150.0, "p99": 199.0}
    assert summarize_one(repeat).tokens_per_s == [3.0]
    assert summarize_one(repeat).invalid == ""
    found = summarize_one(repeat).quantiles
    assert (found["ttft_ms"][0.5].value, found["ttft_ms"][0.99].value) == (150.0, 199.0)
    assert found["ttft_ms"][0.5].n == sglang()["completed"]
    assert (found["ttft_ms"][0.9].value, found["ttft_ms"][0.9].note) == (None, "p90 not printed")
    twice = dataclasses.replace(import_results(written(tmp_path, sglang()))[0].cells[0], repeats=[repeat, repeat])
    assert summarize(twice).quantiles["ttft_ms"][0.5].note == "no single requests of 2 runs"


@pytest.mark.parametrize("name", ["output_throughput", "mean_ttft_ms", "duration", "completed"])
def test_what_a_tool_says_is_not_below_0(name: str, tmp_path: Path) -> None:
    details = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    with pytest.raises(DataError, match="cannot be below 0"):
        import_results(written(tmp_path, {**{k: v for k, v in sglang().items() if k not in details}, name: -3}))


BENCH = {"max_concurrency": 2, "request_rate": "inf", "burstiness": 1.0}


@pytest.mark.parametrize(
    ("changes", "load"),
    [
        ({}, "concurrency 2"),
        ({"max_concurrency": None}, "all at once"),
        ({"request_rate": float("inf")}, "concurrency 2"),  # SGLang writes Infinity
        ({"request_rate": float("inf"), "max_concurrency": None}, "all at once"),
        ({"request_rate": 2.0}, "2 requests/s, Poisson, at most 2 under way"),
        ({"request_rate": 2.5, "max_concurrency": None}, "2.5 requests/s, Poisson"),
        ({"request_rate": 2, "burstiness": 0.5}, "2 requests/s, gamma, burstiness 0.5, at most 2 under way"),
        ({"request_rate": 2, "burstiness": float("inf")}, "2 requests/s, constant, at most 2 under way"),
        ({"request_rate": "trace", "max_concurrency": None}, "trace"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 8, "max_concurrency": None},
            "linear ramp from 1 to 8 requests/s",
        ),
    ],
)
@pytest.mark.parametrize("tool", ["vllm", "sglang"])
def test_the_load_that_a_bench_was_told(tool: str, changes: dict[str, Any], load: str, tmp_path: Path) -> None:
    given = {**sglang(), **BENCH, **changes}
    if tool == "vllm":
        del given["total_output_tokens_retokenized"]
    data, found = import_results(written(tmp_path, given))
    assert (found, [cell.load for cell in data.cells]) == (tool, [load])


@pytest.mark.parametrize(
    "changes",
    [
        {"max_concurrency": 0},
        {"max_concurrency": -1},
        {"request_rate": -2},
        {"request_rate": True},
        {"request_rate": 2, "burstiness": 0},
        {"max_concurrency": "4"},
    ],
)
def test_a_load_that_cannot_be_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no result file of SGLang"):
        import_results(written(tmp_path, {**sglang(), **BENCH, **changes}))


def guidellm(*strategies: dict[str, Any]) -> dict[str, Any]:
    """A benchmark a strategy: ten requests, one a second, whose first tokens take 50 ms, of the next strategy 100, ..."""

    def request(start: float, ttft: float) -> dict[str, Any]:
        timings = {"request_start": start, "first_token_iteration": start + ttft, "last_token_iteration": start + 1}
        return {"prompt_tokens": 4, "output_tokens": 5, "info": {"timings": timings}}

    return {
        "benchmarks": [
            {
                "config": {"strategy": strategy},
                "requests": {"errored": [], "successful": [request(float(second), 0.05 * number) for second in range(10)]},
            }
            for number, strategy in enumerate(strategies, 1)
        ]
    }


STRATEGIES: list[tuple[dict[str, Any], str]] = [
    ({"type_": "synchronous"}, "concurrency 1"),
    ({"type_": "concurrent", "streams": 4, "worker_count": 4, "max_concurrency": 4, "rampup_duration": 0.0}, "concurrency 4"),
    (
        {"type_": "concurrent", "streams": 4, "rampup_duration": 5.0},
        "each after the last, rampup_duration 5.0, at most 4 under way",
    ),
    ({"type_": "throughput", "max_concurrency": None}, "all at once"),
    ({"type_": "throughput", "max_concurrency": 64}, "concurrency 64"),
    ({"type_": "constant", "rate": 1.0, "max_concurrency": None}, "1 requests/s, constant"),
    ({"type_": "constant", "rate": 2.0}, "2 requests/s, constant"),
    ({"type_": "constant", "rate": 2.0, "max_concurrency": 8}, "2 requests/s, constant, at most 8 under way"),
    ({"type_": "poisson", "rate": 2.0, "random_seed": 42}, "2 requests/s, Poisson"),
    ({"type_": "trace", "time_scale": 2.0, "schedule_turn": "idle_gap"}, "trace, schedule_turn idle_gap, time_scale 2.0"),
    ({"type_": "of a later version", "heat": 3}, "of a later version, heat 3"),
    ({}, "load unknown"),
]


def test_every_strategy_of_guidellm_is_a_cell_of_its_own(tmp_path: Path) -> None:
    data, _ = import_results(written(tmp_path, guidellm(*(strategy for strategy, _ in STRATEGIES))))
    assert [cell.load for cell in data.cells] == [load for _, load in STRATEGIES]
    ttft = [summarize(cell).quantiles["ttft_ms"][0.5].value for cell in data.cells]
    assert ttft == pytest.approx([50.0 * n for n in range(1, len(STRATEGIES) + 1)])
    again, _ = import_results(written(tmp_path, guidellm(STRATEGIES[5][0], STRATEGIES[6][0], STRATEGIES[5][0])))
    assert [(cell.load, len(cell.repeats)) for cell in again.cells] == [
        ("1 requests/s, constant", 2),
        ("2 requests/s, constant", 1),
    ]


def test_at_a_rate_the_steady_state_is_from_the_first_start_to_the_last(tmp_path: Path) -> None:
    repeat = run_of(written(tmp_path, guidellm({"type_": "constant", "rate": 1.0})))
    assert repeat.window is not None
    assert (repeat.window.start_s, repeat.window.end_s) == (0.0, 9.0)
    assert repeat.window.tokens == 9 * 5


@pytest.mark.parametrize(
    ("config", "load"),
    [
        ({"loadgen": {"concurrency": 8, "request_rate_mode": "concurrency_burst"}}, "concurrency 8"),
        ({"loadgen": {"request_rate": 2.0, "request_rate_mode": "constant"}}, "2 requests/s, constant"),
        (
            {"loadgen": {"request_rate": 2.0, "arrival_pattern": "poisson", "concurrency": 8}},
            "2 requests/s, Poisson, at most 8 under way",
        ),
        (
            {"loadgen": {"request_rate": 2.0, "arrival_pattern": "gamma", "arrival_smoothness": 0.5}},
            "2 requests/s, gamma, arrival_smoothness 0.5",
        ),
        ({"loadgen": {"user_centric_rate": 2.0, "num_users": 3}}, "2 requests/s, by user, num_users 3"),
        (
            {"loadgen": {"concurrency": 8, "concurrency_ramp_duration": 5}},
            "each after the last, concurrency_ramp_duration 5, at most 8 under way",
        ),
        ({"loadgen": {}, "input": {"fixed_schedule": True}}, "fixed schedule"),
        (None, "load unknown"),
    ],
)
def test_the_load_of_aiperf_is_told_by_the_summary_beside_it(config: Any, load: str, tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    path.write_bytes((RECORDED / FILES["aiperf"]).read_bytes())
    if config is not None:
        (tmp_path / "profile_export_aiperf.json").write_text(json.dumps({"input_config": config}))
    data, _ = import_results(path)
    assert [cell.load for cell in data.cells] == [load]


def test_a_load_that_no_file_tells_may_be_given(tmp_path: Path) -> None:
    path = written(tmp_path, trtllm_requests())
    assert [cell.load for cell in import_results(path)[0].cells] == ["load unknown"]
    assert [cell.load for cell in import_results(path, concurrency=4)[0].cells] == ["concurrency 4"]
    with pytest.raises(UsageError, match="says what its load is, concurrency 2"):
        import_results(written(tmp_path, sglang()), concurrency=4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_lens": [-7, 3, 0]}, "output tokens -7"),
        ({"input_lens": [-1, 4, 4]}, "prompt tokens -1"),
        ({"output_lens": [1.5, 3, 0]}, "output tokens 1.5"),
        ({"ttfts": [-0.1, 0.2, 0.0]}, "first token after -100"),
        ({"latencies": [0.05, 0.3, 0.0]}, "first token after 100 ms, end after 50 ms"),
    ],
)
def test_what_cannot_be_is_a_failed_request(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    repeat = run_of(written(tmp_path, {**sglang(), **changes}))
    assert [reason in r.reason for r in repeat.requests if r.failed].count(True) == 1
    assert sum(r.failed for r in repeat.requests) == 2


def test_runs_of_two_models_are_both_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    runs = [{**sglang(), "model_id": name} for name in ("org/a", "org/a", "org/b")]
    path.write_text("".join(json.dumps(run) + "\n" for run in runs[:2]))
    assert len(import_results(path)[0].cells[0].repeats) == 2
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    with pytest.raises(DataError, match=r"is of the model org/a, .* of org/b: give the runs of one model"):
        import_results(path)


@pytest.mark.parametrize("name", ["server_info", "tag"])
def test_runs_that_sglang_appended_for_two_servers_are_no_repeats(name: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    told = {"server_info": lambda model: {"model_path": model}, "tag": str}[name]
    for models in (("bf16", "bf16"), ("bf16", "nvfp4")):
        path.write_text("".join(json.dumps({**sglang(), name: told(model)}) + "\n" for model in models))
        if models == ("bf16", "bf16"):
            assert len(import_results(path)[0].cells[0].repeats) == 2
    with pytest.raises(DataError, match=r"is of the model bf16, .* of nvfp4"):
        import_results(path)


@pytest.mark.parametrize("zero", ["mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"])
def test_a_first_token_after_0_ms_was_not_seen(zero: str, tmp_path: Path) -> None:
    details = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    printed = {**{k: v for k, v in sglang().items() if k not in details}, "mean_tpot_ms": 3.0, "mean_e2e_latency_ms": 9.0}
    assert {"ttft_ms", "tpot_ms"} <= run_of(written(tmp_path, printed)).printed.keys()
    data, _ = import_results(written(tmp_path, {**printed, zero: 0.0}))
    assert not {"ttft_ms", "tpot_ms"} & data.cells[0].repeats[0].printed.keys()
    assert data.cells[0].repeats[0].printed["tokens_per_s"] == {"mean": 3.0}
    assert any("printed as 0" in note for note in data.notes)


def test_a_single_request_without_a_first_token_failed(tmp_path: Path) -> None:
    run = run_of(written(tmp_path, {**sglang(), "ttfts": [0.0, 0.1, 0.0]}))
    assert sum(r.failed for r in run.requests) == 2
    for first, reason in ((None, "saw no token"), (100.0, "first token after 0")):
        times = {"request_start": 100.0, "first_token_iteration": first, "last_token_iteration": first, "request_end": 109.0}
        request = {"prompt_tokens": 9, "output_tokens": 128, "info": {"timings": times}}
        benchmark = {"config": {"strategy": {"type_": "synchronous"}}, "requests": {"successful": [request], "errored": []}}
        (failed,) = run_of(written(tmp_path, {"benchmarks": [benchmark]})).requests
        assert failed.failed
        assert reason in failed.reason


@pytest.mark.parametrize("key", ["benchmark_phase", "credit_phase"])
def test_what_aiperf_warmed_up_with_or_cancelled_is_not_measured(key: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (RECORDED / FILES["aiperf"]).read_text().splitlines()]
    for row in rows:
        row["metadata"][key] = row["metadata"].pop("benchmark_phase")
    rows[0]["metadata"][key] = "warmup"
    rows[1] = {**rows[1], "metrics": {}, "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"}}
    rows[2]["metadata"]["was_cancelled"] = True
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, _ = import_results(path)
    found = data.cells[0].repeats[0].requests
    assert (len(found), sum(r.failed for r in found)) == (len(rows) - 3, 0)
    assert any(note.startswith("2 requests were cancelled by the load tool") for note in data.notes)


def test_printed_failures_count(tmp_path: Path) -> None:
    details = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    printed = {k: v for k, v in sglang().items() if k not in details}
    for failed, invalid in ((0, ""), (1, "1 of 3 requests failed, more than 1%")):
        summary = summarize_one(run_of(written(tmp_path, {**printed, "failed": failed})))
        assert (summary.requests, summary.failed) == (2 + failed, failed)
        assert summary.invalid.startswith(invalid)
        assert bool(summary.invalid) == bool(failed)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_newline_alone_ends_a_line_of_aiperf(separator: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (RECORDED / FILES["aiperf"]).read_text().splitlines()]
    rows[3]["metadata"]["conversation_id"] = f"x{separator}y"
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert run_of(path) == run_of(RECORDED / FILES["aiperf"])


def summarize_one(repeat: Repeat) -> Any:
    from harness.records.serving import Cell

    return summarize(Cell(None, None, None, [repeat]))


def test_trtllm_requests_are_nanoseconds(tmp_path: Path) -> None:
    repeat = run_of(written(tmp_path, trtllm_requests()))
    good = [r for r in repeat.requests if not r.failed]
    assert [(r.ttft_ms, r.tpot_ms, r.e2e_ms) for r in good] == [pytest.approx((100.0, 20.0, 180.0))] * 3
    assert [r.reason for r in repeat.requests if r.failed] == ["error in the engine"]


def test_trtllm_report(tmp_path: Path) -> None:
    repeat = run_of(written(tmp_path, trtllm_report()))
    assert repeat.printed["tpot_ms"] == {"mean": 20.1, "p50": 20.0, "p90": 21.0, "p99": 22.0}
    assert summarize_one(repeat).tokens_per_s == [1024.0]
    unstreamed = {key: held for key, held in trtllm_report().items() if key != "streaming_metrics"}
    repeat = run_of(written(tmp_path, unstreamed))
    assert not {"ttft_ms", "tpot_ms"} & repeat.printed.keys()
    assert summarize_one(repeat).tokens_per_s == [1024.0]


@pytest.mark.parametrize("value", [{}, [], [1], "x", {"benchmarks": [{}]}, {"kind": "memory"}])
def test_what_is_no_result_file_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no result file|no requests"):
        import_results(written(tmp_path, value))


def test_another_tools_file_is_refused(tmp_path: Path) -> None:
    for tool in ("aiperf", "guidellm"):
        with pytest.raises(DataError, match="no result file of"):
            import_results(written(tmp_path, sglang()), tool)
    assert recognize([{"metadata": {}, "metrics": {}}]) is None


def test_import_writes_a_record_and_says_where_it_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.records.record import read

    source = written(tmp_path, sglang())
    code = main(["measure", "import", str(source), "--from", "sglang", "--arm", "bf16", "--out", str(tmp_path / "r.json")])
    assert code == 1, "a third of its requests failed"
    assert "invalid: bf16" in capsys.readouterr().out
    record = read(tmp_path / "r.json")
    assert isinstance(record.data, ServingData)
    assert record.arm == "bf16"
    assert list(record.provenance["imported"]["files"]) == ["result.json"]
    (found,) = read_imported(source, "ptq") or []
    assert (found.arm, found.data) == ("ptq", record.data)
