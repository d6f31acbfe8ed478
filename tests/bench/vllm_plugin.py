"""Tokens per second of the real vLLM on this CPU: the plugin's NVFP4 kernel beside vLLM's own emulation of NVFP4.

    python tests/bench/vllm_plugin.py MODEL_DIR VLLM_PYTHON [DTYPE...]

Both serve the same W4A4 export of the model, eager, on the same prompts, each in a process of its own. They are asked in turns,
so that what else the machine does hits both, and a ratio is one of two neighbouring turns. vLLM's emulation is not registered
for CPUs; the process that measures it does so.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SEQUENCES, PROMPT, NEW, REPEATS = 8, 16, 16, 5
TARGETS = {"bfloat16": 10.0, "float32": 3.0}
KERNELS = ("plugin", "emulation")
MARK = "tokens/s:"


def main(model: str, python: str, *dtypes: str) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engines")]
    from ptq_export import export_ptq

    with tempfile.TemporaryDirectory() as scratch:
        folder = export_ptq(Path(model), Path(scratch) / "ptq", "NVFP4")
        for dtype in dtypes or TARGETS:
            speeds = measured(python, dtype, folder)
            ratios = [ours / theirs for ours, theirs in zip(speeds["plugin"], speeds["emulation"], strict=True)]
            middle = {kernel: statistics.median(found) for kernel, found in speeds.items()}
            print(
                f"{dtype}: plugin {middle['plugin']:.2f} tokens/s, vLLM's emulation {middle['emulation']:.2f}, ratio "
                f"{statistics.median(ratios):.1f} (target {TARGETS[dtype]:g}; turns {', '.join(f'{r:.1f}' for r in ratios)})",
                flush=True,
            )


def measured(python: str, dtype: str, folder: Path) -> dict[str, list[float]]:
    """Tokens per second of every turn."""
    children = {kernel: start(python, kernel, dtype, folder) for kernel in KERNELS}
    speeds: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    try:
        for turn in range(REPEATS):
            for kernel in KERNELS if turn % 2 == 0 else reversed(KERNELS):
                speeds[kernel].append(asked(children[kernel]))
    finally:
        for child in children.values():
            child.stdin.close()
            child.wait(60)
    return speeds


def start(python: str, kernel: str, dtype: str, folder: Path) -> Any:
    """A process that has its model loaded and warm."""
    from harness.engines.vllm import environment

    plugins = {"VLLM_PLUGINS": ""} if kernel == "emulation" else {}
    env = {**os.environ, **environment(Path(python)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **plugins}
    command = [python, __file__, "--child", kernel, dtype, str(folder)]
    child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    answer(child)
    return child


def asked(child: Any) -> float:
    child.stdin.write("again\n")
    child.stdin.flush()
    return answer(child)


def answer(child: Any) -> float:
    said = []
    for line in child.stdout:
        if line.startswith(MARK):
            return float(line.removeprefix(MARK))
        said.append(line)
    sys.exit("".join(said[-60:]))


def serve(kernel: str, dtype: str, folder: str) -> None:
    """Prints generated tokens per second, prompt included, of a round that warms up and of one for each line it is given."""
    import vllm

    if kernel == "emulation":
        from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, register_linear_kernel
        from vllm.platforms import PlatformEnum

        from harness.engines.vllm_cpu import plugin

        register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
        plugin._allow_float32()
    llm = vllm.LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=PROMPT + NEW + 1,
        max_num_seqs=SEQUENCES,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": [(s * 37 + i * 101) % 1000 + 3 for i in range(PROMPT)]} for s in range(SEQUENCES)]

    def run(new: int) -> None:
        asked = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, asked, use_tqdm=False)
        print(MARK, SEQUENCES * new / (time.perf_counter() - started), flush=True)

    run(2)
    for _ in sys.stdin:
        run(NEW)


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1] == "--child" else main(*sys.argv[1:])
