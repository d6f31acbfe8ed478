"""What logs, /metrics and reports of engines are read as. Each log's first line says where it is from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines import trtllm, vllm
from harness.engines.answers import samples
from harness.records.record import EngineMemory
from qad.errors import UsageError

ReadLog = Callable[[str], str]
GIB = 2**30


def test_every_log_names_its_origin() -> None:
    logs = sorted((Path(__file__).parent / "logs").iterdir())
    assert len(logs) >= 5
    for log in logs:
        assert log.read_text().startswith(("# Recorded: ", "# Simulated: ")), log


def test_weights_cache_and_activations_are_separate_figures(read_log: ReadLog) -> None:
    """GiB of the log become bytes: 13.49 GiB are 14.48 GB."""
    facts = vllm.memory(read_log("vllm-0.32-blackwell.log"), "")
    assert facts == EngineMemory(
        weights_bytes=round(13.49 * GIB),
        kv_cache_bytes=round(100.25 * GIB),
        kv_cache_tokens=1_642_496,
        kv_cache_dtype="fp8",
        max_concurrency=50.12,
        max_model_len=32768,
        activation_bytes=round(2.5 * GIB),
        other_bytes=round(0.75 * GIB),
    )
    assert facts.weights_bytes is not None
    assert f"{facts.weights_bytes / 1e9:.2f}" == "14.48"


def test_a_recorded_log_of_a_cpu(read_log: ReadLog, tmp_path: Path) -> None:
    """On a CPU vLLM does not say how large the weights are: unknown, not 0."""
    log = read_log("vllm-0.32-cpu-bf16.log")
    facts = vllm.memory(log, "")
    assert (facts.kv_cache_bytes, facts.kv_cache_tokens, facts.max_concurrency) == (GIB, 46_592, 45.5)
    assert (facts.weights_bytes, facts.activation_bytes, facts.other_bytes) == (None, None, None)
    engine = vllm.describe(log, None, tmp_path)
    assert (engine.version, engine.dtype, engine.device) == ("0.32.0", "bfloat16", "cpu")
    assert (engine.emulated, engine.native_fp4) == (False, None)


def test_nothing_said_is_unknown(tmp_path: Path) -> None:
    assert vllm.memory("", "") == EngineMemory() == trtllm.memory("", "")
    assert vllm.memory("", 'vllm:cache_config_info{kv_cache_size_tokens="None"} 1.0') == EngineMemory()


@pytest.mark.parametrize(
    ("log", "emulated", "native", "path"),
    [
        ("vllm-0.32-blackwell.log", False, True, "FlashInferCutlassNvFp4LinearKernel + FLASHINFER_TRTLLM experts (native FP4)"),
        ("vllm-0.32-fallback.log", False, False, "MarlinNvFp4LinearKernel (weight-only, not native FP4)"),
        ("vllm-0.32-emulation.log", True, False, "EmulationNvFp4LinearKernel (FP4 emulated)"),
        ("vllm-0.32-cpu-nvfp4.log", True, False, "CpuNvFp4LinearKernel (FP4 emulated)"),
    ],
)
def test_the_kernel_comes_from_the_log(
    log: str, emulated: bool, native: bool, path: str, read_log: ReadLog, model_dir: Path
) -> None:
    engine = vllm.describe(read_log(log), "0.32.0", model_dir)
    assert (engine.emulated, engine.native_fp4, engine.kernel_path) == (emulated, native, path)


@pytest.mark.parametrize(
    ("lines", "emulated", "native"),
    [
        ("Using CpuNvFp4LinearKernel for NVFP4 GEMM\ndevice_config=cpu", True, False),
        ("NVFP4 is emulated on this CPU: its values, not its speed", True, False),
        ("Using TomorrowsNvFp4LinearKernel for NVFP4 GEMM", False, None),
        ("Your GPU does not have native support for FP4 computation but", False, False),
        ("Using FlashInferCuteDslNvFp4W4A16LinearKernel for NVFP4 GEMM", False, False),
        ("Using 'EMULATION' NvFp4 MoE backend out of potential backends: ['MARLIN'].", True, False),
        ("Using 'MARLIN' NvFp4 MoE backend\nUsing CutlassNvFp4LinearKernel for NVFP4 GEMM", False, False),
        ("served on an NVIDIA B200", False, None),
    ],
)
def test_only_what_is_known_is_called_native(lines: str, emulated: bool, native: bool | None, model_dir: Path) -> None:
    config = "LLM engine (v0.32.0) with config: device_config=" + ("cpu" if "config=cpu" in lines else "cuda")
    engine = vllm.describe(f"{config}\n{lines}", None, model_dir)
    assert (engine.emulated, engine.native_fp4) == (emulated, native)


def test_samples_with_odd_labels() -> None:
    text = '# TYPE a gauge\na{x="1,2",y="say \\"}\\" \\\\ \\n"} 2.5\nab 3\na 4 1700000000\na{x="1"} nope\n'
    assert samples(text, "a") == [({"x": "1,2", "y": 'say "}" \\ \n'}, 2.5), ({}, 4.0)]


# /metrics as the documentation of trtllm-serve prints it: a list of iterations. Simulated numbers.
ITERATIONS = [
    {"iter": 153, "kvCacheStats": {"maxNumBlocks": 7, "tokensPerBlock": 32}},
    {"iter": 154, "gpuMemUsage": 76_665_782_272, "kvCacheStats": {"maxNumBlocks": 101_256, "tokensPerBlock": 32}},
    {"iter": 155},
]


def test_trtllm_allocates_twice_and_the_last_counts(read_log: ReadLog, model_dir: Path) -> None:
    log = read_log("trtllm-1.2.log")
    assert trtllm.memory(log, "") == EngineMemory(
        weights_bytes=round(13.49 * GIB),
        kv_cache_bytes=round(100.25 * GIB),
        kv_cache_tokens=1_642_496,
        max_concurrency=1_642_496 / 32_768,
        max_model_len=32_768,
        activation_bytes=round(0.85 * GIB),
        other_bytes=round(1.75 * GIB),
    )
    assert trtllm.memory(log, json.dumps(ITERATIONS)).kv_cache_tokens == 101_256 * 32
    engine = trtllm.describe(log, None, model_dir)
    assert (engine.version, engine.native_fp4, engine.emulated) == ("1.2.1", None, False)
    assert engine.kernel_path == "NVFP4, kernel not named in the log"


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_trtllm_serve_is_started_as_its_documentation_says(tmp_path: Path, model_dir: Path) -> None:
    write_script(tmp_path / "trtllm-serve", "")
    command = trtllm.command(tmp_path / "python", model_dir, 8123, "auto", 4096, ["--tp_size", "2"])
    assert command == [
        str(tmp_path / "trtllm-serve"),
        "serve",
        str(model_dir),
        "--host",
        "127.0.0.1",
        "--port",
        "8123",
        "--max_seq_len",
        "4096",
        "--tp_size",
        "2",
    ]
    with pytest.raises(UsageError, match="not in float32"):
        trtllm.command(tmp_path / "python", model_dir, 8123, "float32", None, [])
