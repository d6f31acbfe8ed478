"""Result files of load tools -> serving records, with their names converted to ours.

vLLM bench, SGLang  ttfts, itls and latencies in s; SGLang saves no latencies: the first token and all gaps
AIPerf              time_to_first_token, request_latency, inter_chunk_latency with their units
GuideLLM            timings in s: request_start, first_token_iteration, last_token_iteration
trtllm-bench        timestamps in ns: start, first_token, end

tpot_ms is worked out from e2e, ttft and output tokens by our definition, never taken from a field called ITL or "time per
output token", whose meaning changes from tool to tool. What a tool cannot see is said in the notes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.imported.loads import UNKNOWN, aiperf_load, bench_load, guidellm_load, whole
from harness.imported.one_run import failed, request, run_of
from harness.imported.stamp import require_one_model
from harness.records.serving import Arrival, Cell, Repeat, Request, ServingData
from qad.errors import DataError, UsageError
from qad.untrusted import clean, is_number, json_lines, mapping, strict_json


def import_results(path: Path, tool: str | None = None, concurrency: int | None = None) -> tuple[ServingData, str]:
    """The file's data and the tool's key. tool: vllm, sglang, aiperf, guidellm, trtllm; None: told from the contents.
    concurrency: the load of a file that does not say what it is.

    Raises UsageError for an unknown tool, or a concurrency where the file names the load; DataError where the file is none of
    that tool's, or holds nothing to import.
    """
    if tool is not None and tool not in _TOOLS:
        raise UsageError(f"--from {tool} is unknown: use one of {', '.join(_TOOLS)}")
    documents = _documents(path)
    key = tool or recognize(documents)
    if key is None:
        names = ", ".join(one.name for one in _TOOLS.values())
        raise DataError(f"{path} is no result file of {names}: check the path or give --from")
    found = _TOOLS[key]
    require_one_model(((path, _model(mapping(document))) for document in documents), "give the runs of one model")
    try:
        cells = found.read(documents, path, f"as counted by {found.name}")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path} is no result file of {found.name}, or of another version ({clean(repr(error), 200)}): check --from"
        ) from error
    if not cells:
        raise DataError(f"{path} holds no requests of {found.name}")
    for repeat in (repeat for cell in cells for repeat in cell.repeats):
        numbers = {"duration": {"": repeat.seconds}, **repeat.printed} if is_number(repeat.seconds) else repeat.printed
        below = next((f"{name} {value:g}" for name, of in numbers.items() for value in of.values() if value < 0), None)
        if below is not None:
            raise DataError(f"{path} says {below}, which cannot be below 0: check the file")
    if concurrency is not None:
        told = next((cell.load for cell in cells if (cell.concurrency, cell.arrival) != UNKNOWN), None)
        if told:
            raise UsageError(f"--concurrency {concurrency}: {path} says what its load is, {told}")
        cells = [dataclasses.replace(cell, concurrency=concurrency) for cell in cells]
    return ServingData(driver=found.name, endpoint="", cells=cells, notes=[found.note, *_unseen(documents)]), key


def _model(run: Mapping[str, Any]) -> str:
    """What a run was of: vLLM's model_id, SGLang's server, and the tag that its user gave it ("" where none is told). SGLang
    appends every run of a day to one file."""
    server = mapping(run.get("server_info"))
    named = run.get("model_id") or server.get("model_path") or server.get("served_model_name")
    return " ".join(str(part) for part in (named, run.get("tag")) if part)


def _unseen(documents: Sequence[Any]) -> list[str]:
    """What of the documents is in no cell, in words."""
    notes = []
    if any(_no_first_token(mapping(d)) for d in documents):
        notes.append(
            "the time to the first token is printed as 0, so some requests showed no token: it is left out, and the "
            "time per output token that is made from it"
        )
    if cancelled := sum(_cancelled(mapping(d)) for d in documents):
        notes.append(f"{cancelled} requests were cancelled by the load tool: neither a success nor a failure")
    return notes


def is_load_result(path: Path) -> bool:
    """Whether a JSON or JSON lines file is a result of one of the tools."""
    if path.suffix.lower() not in (".json", ".jsonl"):
        return False
    try:
        return recognize(_documents(path)) is not None
    except DataError:
        return False


def recognize(documents: Sequence[Any]) -> str | None:
    """Which tool wrote them, by keys only it has; None for none of them."""
    first = documents[0] if documents else None
    if isinstance(first, list):
        first = first[0] if first else None
        return "trtllm" if isinstance(first, dict) and "first_token_timestamp" in first else None
    if not isinstance(first, dict):
        return None
    if "benchmarks" in first:
        return "guidellm"
    if "performance" in first and "request_info" in first:  # streaming_metrics are there only where it streamed
        return "trtllm"
    if {"metadata", "metrics"} <= first.keys() and "request_start_ns" in mapping(first["metadata"]):
        return "aiperf"
    if "total_output_tokens_retokenized" in first:
        return "sglang"
    return "vllm" if {"total_output_tokens", "request_throughput", "duration"} <= first.keys() else None


def _documents(path: Path) -> list[Any]:
    """One JSON value, or one a line."""
    try:
        try:
            return [strict_json(path.read_bytes(), nan_is_null=True)]
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":
                raise
            return [value for _, value in json_lines(path, nan_is_null=True)]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is neither JSON nor JSON lines ({clean(error, 200)}): give a result file") from error


def _openai_bench(documents: Sequence[Any], path: Path, counted_by: str) -> list[Cell]:
    """vLLM's and SGLang's results: one object a run, parallel lists where details were saved."""
    return _cells([_bench_run(d, counted_by) for d in documents])


def _cells(runs: Sequence[Cell]) -> list[Cell]:
    """Runs under one load and of one shape are repeats of a cell."""
    found: dict[object, Cell] = {}
    for run in runs:
        asked = run.concurrency, run.arrival, run.input_tokens, run.output_tokens, run.drawn
        before = found[asked].repeats if asked in found else []
        found[asked] = dataclasses.replace(run, repeats=[*before, *run.repeats])
    return [*found.values()]


def _bench_run(d: dict[str, Any], counted_by: str) -> Cell:
    concurrency, arrival = bench_load(d)
    sized = str(d.get("dataset_name", "random")).startswith("random")  # the lengths of other data sets are the defaults
    prompt, answer = (whole(d.get(f"random_{side}_len")) if sized else None for side in ("input", "output"))
    repeat = _bench_requests(d, counted_by, arrival) if d.get("ttfts") else _printed(d)
    drawn = True if sized and prompt is not None and d.get("random_range_ratio", 1.0) != 1 else None
    return Cell(concurrency, prompt, answer, [repeat], arrival, drawn)


def _bench_requests(d: dict[str, Any], counted_by: str, arrival: Arrival | None) -> Repeat:
    errors = d.get("errors") or [""] * len(d["ttfts"])
    itls, starts = d["itls"], d.get("start_times") or [0.0] * len(d["ttfts"])
    if len({len(part) for part in (d["ttfts"], errors, itls, starts, d["input_lens"], d["output_lens"])}) > 1:
        raise ValueError("its lists of requests are of different lengths")
    requests = []
    for i, ttft in enumerate(d["ttfts"]):
        succeeded = not errors[i] and d["output_lens"][i] and (ttft > 0 or itls[i])
        if not succeeded:
            requests.append(failed(starts[i], errors[i]))
            continue
        latency, gaps_ms = d["latencies"][i] if d.get("latencies") else ttft + sum(itls[i]), [1000 * gap for gap in itls[i]]
        lengths = d["input_lens"][i], d["output_lens"][i]
        requests.append(request(starts[i], 1000 * ttft, 1000 * latency, *lengths, counted_by, gaps_ms))
    return run_of(requests, d["duration"], arrival)


def _printed(d: dict[str, Any]) -> Repeat:
    """A run of which only statistics were saved."""
    ours = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "e2e_ms": "e2el_ms"}
    printed = {
        metric: {
            name: float(d[f"{prefix}_{theirs}"])
            for name, prefix in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p99", "p99"))
            if d.get(f"{prefix}_{theirs}") is not None
        }
        for metric, theirs in ours.items()
    }
    if _no_first_token(d):
        printed["ttft_ms"] = printed["tpot_ms"] = {}
    printed["tokens_per_s"] = {"mean": float(d["output_throughput"])}
    if d["completed"]:
        for side in ("input", "output"):
            if d.get(f"total_{side}_tokens") is not None:
                printed[f"{side}_tokens"] = {"mean": d[f"total_{side}_tokens"] / d["completed"]}
    printed["requests"] = {"succeeded": float(d["completed"])} | ({"failed": float(d["failed"])} if "failed" in d else {})
    return Repeat(d["duration"], [], printed={k: v for k, v in printed.items() if v})


def _no_first_token(d: Mapping[str, Any]) -> bool:
    """A statistic of 0 ms: vLLM bench and SGLang start a request at 0 and leave it where no chunk held text."""
    return not d.get("ttfts") and any(d.get(f"{name}_ttft_ms") == 0 for name in ("mean", "median", "p90", "p99"))


def _aiperf(documents: Sequence[Any], path: Path, counted_by: str) -> list[Cell]:
    """profile_export.jsonl: one request a line, with values and units; warm-up requests are left out. The load is told by
    profile_export_aiperf.json beside it."""
    concurrency, arrival = aiperf_load(path.with_name(f"{path.stem}_aiperf.json"))
    requests = []
    for d in documents:
        facts, metrics = d["metadata"], d["metrics"]
        if (facts.get("benchmark_phase") or facts.get("credit_phase") or "profiling") != "profiling" or _cancelled(d):
            continue
        start = facts["request_start_ns"] / 1e9
        if d.get("error") or "time_to_first_token" not in metrics:
            requests.append(failed(start, (d.get("error") or {}).get("message") or "no token"))
            continue
        gaps = metrics.get("inter_chunk_latency")
        gaps_ms = [_ms({"value": v, "unit": gaps["unit"]}) for v in gaps["value"]] if gaps else ()
        first_ms, all_ms = (_ms(metrics[name]) for name in ("time_to_first_token", "request_latency"))
        prompt, answer = (_count(metrics, f"{side}_sequence_length") for side in ("input", "output"))
        requests.append(request(start, first_ms, all_ms, prompt, answer, counted_by, gaps_ms))
    return [Cell(concurrency, None, None, [run_of(requests, None, arrival)], arrival)] if requests else []


def _cancelled(d: Mapping[str, Any]) -> bool:
    """By AIPerf itself, as it was told to or at the end of a run."""
    kind = mapping(d.get("error")).get("type")
    return bool(mapping(d.get("metadata")).get("was_cancelled")) or kind == "RequestCancellationError"


def _ms(metric: dict[str, Any]) -> float:
    scale = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3, "seconds": 1e3}[metric["unit"]]
    return float(metric["value"]) * scale


def _count(metrics: dict[str, Any], name: str) -> int | None:
    return int(metrics[name]["value"]) if name in metrics else None


def _guidellm(documents: Sequence[Any], path: Path, counted_by: str) -> list[Cell]:
    """One run a benchmark. Requests that were cut off at the end of a run are neither a success nor a failure."""
    runs = []
    for benchmark in documents[0]["benchmarks"]:
        requests = benchmark["requests"]
        good = [_guidellm_request(r, counted_by) for r in requests["successful"] or ()]
        bad = [
            failed(_timings(r).get("request_start") or 0.0, (r.get("info") or {}).get("error") or "errored")
            for r in requests["errored"] or ()
        ]
        concurrency, arrival = guidellm_load(benchmark)
        runs.append(Cell(concurrency, None, None, [run_of(good + bad, None, arrival)], arrival))
    return _cells(runs)


def _timings(r: dict[str, Any]) -> dict[str, Any]:
    return dict((r.get("info") or {}).get("timings") or {})


def _guidellm_request(r: dict[str, Any], counted_by: str) -> Request:
    t = _timings(r)
    first = t.get("first_token_iteration") or t.get("first_iteration")
    last = t.get("last_token_iteration") or t.get("last_iteration") or t["request_end"]
    start = t["request_start"]
    if first is None:
        return failed(start, "GuideLLM saw no token: it reads no field that thinking may come in")
    return request(
        start,
        1000 * (first - start),
        1000 * (last - start),
        r.get("prompt_tokens"),
        r.get("output_tokens"),
        counted_by,
        cached_tokens=(r.get("input_metrics") or {}).get("cached_tokens"),
    )


def _trtllm(documents: Sequence[Any], path: Path, counted_by: str) -> list[Cell]:
    """--request_json: one entry a request, ns; --report_json: statistics alone."""
    first = documents[0]
    if isinstance(first, dict):
        return [_trtllm_report(first)]
    requests = []
    for r in first:
        start, token, end = r["start_timestamp"], r["first_token_timestamp"], r["end_timestamp"]
        output = r.get("num_output_tokens", r.get("output_tokens"))
        if r.get("error_tokens") or token <= 0 or not output:
            requests.append(failed(start / 1e9, "error in the engine" if r.get("error_tokens") else "no token"))
        else:
            first_ms, all_ms = (token - start) / 1e6, (end - start) / 1e6
            requests.append(request(start / 1e9, first_ms, all_ms, r["num_input_tokens"], output, counted_by))
    return [Cell(None, None, None, [run_of(requests, None)])]


def _trtllm_report(d: dict[str, Any]) -> Cell:
    speed, stream, asked = d["performance"], d.get("streaming_metrics") or {}, d["request_info"]

    def of(percentiles: dict[str, Any] | None) -> dict[str, float]:
        names = {"average": "mean", "p50": "p50", "p90": "p90", "p99": "p99"}
        given = percentiles or {}
        return {ours: float(given[theirs]) for theirs, ours in names.items() if theirs in given}

    printed = {
        "ttft_ms": of(stream.get("ttft_percentiles")),
        "tpot_ms": of(stream.get("tpot_percentiles")),
        "e2e_ms": of(speed.get("request_latency_percentiles_ms")),
        "tokens_per_s": {"mean": float(speed["system_output_throughput_tok_s"])},
        "requests": {"succeeded": float(asked["num_requests"])},
        "output_tokens": {"mean": float(asked["avg_output_length"])},
        "input_tokens": {"mean": float(asked["avg_input_length"])},
    }
    concurrency = asked.get("avg_num_concurrent_requests")
    kept = {k: v for k, v in printed.items() if v}
    return Cell(None, None, None, [Repeat(speed["total_latency_ms"] / 1000, [], mean_active=concurrency, printed=kept)])


@dataclasses.dataclass(frozen=True)
class _Tool:
    """note: what a reader of its numbers has to know. read: (documents of the file, its path, who counted tokens) -> cells."""

    name: str
    read: Callable[[Sequence[Any], Path, str], list[Cell]]
    note: str


_TOOLS = {
    "vllm": _Tool(
        "vLLM bench serve",
        _openai_bench,
        "vLLM bench counts a 200 stream that carries an error event after the first token as a success, and in chat "
        "the chunk that only names the role as the first token",
    ),
    "sglang": _Tool(
        "SGLang bench_serving",
        _openai_bench,
        "SGLang bench_serving counts output tokens by usage where the server sends it, else as asked for",
    ),
    "aiperf": _Tool("AIPerf", _aiperf, "AIPerf's inter token latency is our tpot_ms"),
    "guidellm": _Tool(
        "GuideLLM", _guidellm, "GuideLLM's time_per_output_token_ms includes the time to the first token and is not used"
    ),
    "trtllm": _Tool("trtllm-bench", _trtllm, "trtllm-bench runs the engine in its own process: there is no HTTP in these times"),
}
