"""TensorRT-LLM: how `trtllm-serve` is started, and what its log and /metrics say. `trtllm-bench` is in trtllm_bench.py.

Nothing of TensorRT-LLM is imported here. It needs an NVIDIA GPU and its own container. The formats are those of release 1.2
as its documentation, sources and published logs show them; they were not seen in a run of this tool.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from harness.engines import process
from harness.engines.folder_config import quantized_algorithm
from harness.records.record import Engine, EngineMemory
from qad.errors import UsageError
from qad.untrusted import count, mapping, strict_json

NAME = "trtllm"
GIB = 2**30


def command(python: Path, folder: Path, port: int, dtype: str, max_model_len: int | None, options: Sequence[str]) -> list[str]:
    """The command line of `trtllm-serve`, which lies beside the environment's python.

    It takes the model's own dtype: raises UsageError for any other than auto and bfloat16.
    """
    if dtype not in ("auto", "bfloat16"):
        raise UsageError(f"trtllm-serve computes in the model's own dtype, not in {dtype}: give --dtype auto")
    given = process.options({"--host": "127.0.0.1", "--port": port, "--max_seq_len": max_model_len})
    return [str(beside(python, "trtllm-serve")), "serve", str(folder), *given, *options]


def environment(python: Path) -> dict[str, str]:
    """No network, a log with the sizes in it."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TLLM_LOG_LEVEL": "INFO",
        "TRTLLM_NO_USAGE_STATS": "1",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


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
        iterations = strict_json(metrics, nan_is_null=True)
    except ValueError:
        return None
    for iteration in reversed(iterations if isinstance(iterations, list) else []):
        stats = mapping(mapping(iteration).get("kvCacheStats"))
        blocks, size = count(stats.get("maxNumBlocks")), count(stats.get("tokensPerBlock"))
        if blocks and size:
            return blocks * size
    return None


def beside(python: Path, name: str) -> Path:
    """A command of the environment that `python` is in. Raises UsageError where it has none of that name."""
    path = python.with_name(name)
    if not path.is_file():
        raise UsageError(f"{path} is not there: give the python of TensorRT-LLM's environment, which has {name} beside it")
    return path


def _gib(pattern: str, log: str) -> int | None:
    found = re.findall(pattern, log)
    return round(float(found[-1]) * GIB) if found else None
