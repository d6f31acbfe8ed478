"""TensorRT-LLM: how `trtllm-serve` and `trtllm-bench` are started, and what their logs and reports say.

Nothing of TensorRT-LLM is imported here. It needs an NVIDIA GPU and its own container. The formats are those of release 1.2
as its documentation, sources and published logs show them; they were not seen in a run of this tool.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.engines.declared import config_of, quantized_algorithm
from harness.engines.process import ServerProcess
from harness.records import Engine, EngineMemory
from qad.errors import EngineError, UsageError

NAME = "trtllm"
GIB = 2**30


def command(
    python: Path, folder: Path, port: int, dtype: str, max_model_len: int | None, options: Sequence[str]
) -> list[str]:
    """The command line of `trtllm-serve`, which lies beside the environment's python.

    It takes the model's own dtype: raises UsageError for any other than auto and bfloat16.
    """
    if dtype not in ("auto", "bfloat16"):
        raise UsageError(f"trtllm-serve computes in the model's own dtype, not in {dtype}: give --dtype auto")
    limit = [] if max_model_len is None else ["--max_seq_len", str(max_model_len)]
    return [
        str(_beside(python, "trtllm-serve")), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), *limit, *options,
    ]  # fmt: skip


def environment(python: Path) -> dict[str, str]:
    """No network, a log with the sizes in it."""
    return {
        "HF_HUB_OFFLINE": "1", "TLLM_LOG_LEVEL": "INFO", "TRTLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip


def describe(log: str, version: str | None, folder: Path) -> Engine:
    """The log names no FP4 kernel, so `native_fp4` stays unknown."""
    algorithm = quantized_algorithm(folder)
    found = re.search(r"TensorRT[- ]LLM version: (\S+)", log)
    path = f"{algorithm}, kernel not named in the log" if algorithm else "TensorRT-LLM kernels, no FP4 weights"
    dtype = re.search(r"\bdtype=['\"]?(?:torch\.)?(bfloat16|float16|float32)", log)
    return Engine(
        name=NAME,
        version=version or (found[1] if found else "unknown"),
        dtype=dtype[1] if dtype else "auto",
        device="cuda",
        kernel_path=path,
        emulated=False,
    )


def memory(log: str, metrics: str) -> EngineMemory:
    """Sizes of one device. The cache is allocated twice: small for profiling, then as it stays; the last line counts."""
    allocated = re.findall(r"Allocated ([\d.]+) GiB for max tokens in paged KV cache \((\d+)\)", log)
    lengths = re.findall(r"max_seq_len=(\d+), max_num_requests", log)
    tokens = _cache_tokens(metrics) or (int(allocated[-1][1]) if allocated else None)
    length = int(lengths[-1]) if lengths else None
    return EngineMemory(
        weights_bytes=_gib(r"loading model weights \(inside torch\)[^:]*: ([\d.]+) GiB", log),
        kv_cache_bytes=round(float(allocated[-1][0]) * GIB) if allocated else None,
        kv_cache_tokens=tokens,
        max_concurrency=tokens / length if tokens and length else None,
        max_model_len=length,
        activation_bytes=_gib(r"dynamically allocated during inference \(inside torch\)[^:]*: ([\d.]+) GiB", log),
        other_bytes=_gib(r"Memory used outside torch[^:]*: ([\d.]+) GiB", log),
    )


def _cache_tokens(metrics: str) -> int | None:
    """maxNumBlocks * tokensPerBlock of the newest iteration that reports its cache. /metrics is empty before a request,
    and where the server was not told to keep iteration statistics."""
    try:
        iterations = json.loads(metrics)
    except ValueError:
        return None
    for iteration in reversed(iterations if isinstance(iterations, list) else []):
        stats = iteration.get("kvCacheStats") or {}
        blocks, size = stats.get("maxNumBlocks"), stats.get("tokensPerBlock")
        if blocks and size:
            return int(blocks) * int(size)
    return None


def bench(
    python: Path, folder: Path, dataset: Path, report: Path, *, options: Sequence[str] = (), timeout_s: float = 3600
) -> dict[str, Any]:
    """Run `trtllm-bench throughput` on a prepared data set of requests and return its report.

    dataset: JSON lines {"task_id", "input_ids" or "prompt", "output_tokens"}. report: the JSON file it writes; what it
    prints goes to REPORT.log.

    Raises UsageError for a folder with code of its own, which trtllm-bench would run unasked; EngineError with the last
    lines where it fails, does not end in time, or leaves no whole report.
    """
    if (config_of(folder) or {}).get("auto_map"):
        raise UsageError(
            f"{folder} brings its own code (auto_map in config.json), which trtllm-bench runs: measure it with serve"
        )
    arguments = [
        str(_beside(python, "trtllm-bench")), "--model", folder.name, "--model_path", str(folder), "throughput",
        "--dataset", str(dataset), "--backend", "pytorch", "--streaming", "--report_json", str(report), *options,
    ]  # fmt: skip
    log = report.with_name(report.name + ".log")
    process = ServerProcess(arguments, log=log, environment={**os.environ, **environment(python)})
    try:
        code = process.wait(timeout_s)
    finally:
        process.stop()
    if code != 0:
        how = f"did not end within {timeout_s:g} s" if code is None else f"ended with code {code}"
        raise EngineError(f"trtllm-bench {how}; its last lines:\n{process.tail()}")
    return read_report(report)


def read_report(path: Path) -> dict[str, Any]:
    """A report of trtllm-bench. Raises EngineError where it is not one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        report["performance"]["system_output_throughput_tok_s"], report["engine"]["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is no report of trtllm-bench ({error}): give what --report_json wrote") from error
    return dict(report)


def _beside(python: Path, name: str) -> Path:
    path = python.with_name(name)
    if not path.is_file():
        raise UsageError(
            f"{path} is not there: give the python of TensorRT-LLM's environment, which has {name} beside it"
        )
    return path


def _gib(pattern: str, log: str) -> int | None:
    found = re.findall(pattern, log)
    return round(float(found[-1]) * GIB) if found else None
