"""TensorRT-LLM's `trtllm-bench`: one run of it on prepared requests, and the files it leaves.

Nothing of TensorRT-LLM is imported here. Commands and report are those of release 1.2 as its documentation and sources show
them; they were not seen in a run of this tool. It starts the engine in its own process, so there is no HTTP in its times.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.engines import process
from harness.engines.trtllm import beside, environment
from qad.errors import EngineError, UsageError
from qad.model.loader import brings_code
from qad.untrusted import text_lines

MODES = ("throughput", "latency")
WARM_UP = 2  # requests before the run, which trtllm-bench draws from those of the run


@dataclasses.dataclass(frozen=True)
class BenchRun:
    """results: the file to import, single requests where the command saves them (throughput), else the report."""

    report: dict[str, Any]
    results: Path
    log: str


def run_bench(
    python: Path,
    folder: Path,
    dataset: Path,
    report: Path,
    *,
    mode: str = "throughput",
    concurrency: int = 1,
    max_model_len: int | None = None,
    options: Sequence[str] = (),
    timeout_s: float = 3600,
) -> BenchRun:
    """Run `trtllm-bench throughput` or `latency`, which serves one request at a time, in the environment of `python`.

    dataset: JSON lines {"task_id", "prompt", "output_tokens"}. report: the JSON file it writes; single requests go to
    REPORT.requests, what it prints to REPORT.log.

    Raises UsageError for a folder with code of its own, which trtllm-bench would run unasked, and for another concurrency
    than a mode has; EngineError with the last lines where it fails, does not end in time, or leaves no whole report.
    """
    check_bench(folder, mode, concurrency)
    requests = report.with_name(report.name + ".requests") if mode == "throughput" else None
    model = {"--model": folder.name, "--model_path": folder}
    run = {
        "--dataset": dataset,
        "--backend": "pytorch",
        "--concurrency": concurrency,
        "--warmup": WARM_UP,
        "--report_json": report,
        "--request_json": requests,
        "--max_seq_len": max_model_len,
    }
    streaming = ["--streaming"] if requests else []
    bench = str(beside(python, "trtllm-bench"))
    arguments = [bench, *process.options(model), mode, *process.options(run), *streaming, *options]
    log = report.with_name(report.name + ".log")
    for old in (report, requests):
        if old is not None:
            old.unlink(missing_ok=True)
    running = process.ServerProcess(arguments, log=log, environment={**os.environ, **environment(python)})
    try:
        code = running.wait(timeout_s)
    finally:
        running.stop()
    if code != 0:
        how = f"did not end within {timeout_s:g} s" if code is None else f"ended with code {code}"
        raise EngineError(f"trtllm-bench {how}; its last lines:\n{running.tail()}")
    return BenchRun(_whole(report, sum(1 for _ in text_lines(dataset))), requests or report, running.text())


def check_bench(folder: Path, mode: str, concurrency: int) -> None:
    """Raises UsageError for what `run_bench` refuses."""
    if mode not in MODES:
        raise UsageError(f"trtllm-bench has no {mode!r}: use one of {', '.join(MODES)}")
    if mode == "latency" and concurrency != 1:
        raise UsageError(f"trtllm-bench latency serves one request at a time, not {concurrency}: use throughput")
    for name in ("config.json", "tokenizer_config.json"):
        if brings_code(folder / name):
            raise UsageError(
                f"{folder} brings its own code (auto_map in {name}), which trtllm-bench runs: measure it with --engine trtllm"
            )


def _whole(path: Path, requests: int) -> dict[str, Any]:
    """Its report. Raises EngineError where it is none, or not of all requests."""
    try:
        report = dict(json.loads(path.read_text(encoding="utf-8")))
        report["performance"]["system_output_throughput_tok_s"], report["engine"]["version"]
        count = int(report["request_info"]["num_requests"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"trtllm-bench left no report of release 1.2 at {path} ({error!r}): see {path}.log") from error
    if count != requests:
        raise EngineError(f"trtllm-bench reports {count} of {requests} requests: see {path}.log")
    return report
