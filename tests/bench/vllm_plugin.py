"""Tokens per second of the real vLLM on this CPU: the plugin's NVFP4 kernel beside vLLM's own emulation of NVFP4.

    python tests/bench/vllm_plugin.py MODEL_DIR VLLM_PYTHON

Both serve the same W4A4 export of the model, eager, on the same prompts, each in a process of its own, one after the other.
vLLM's emulation is not registered for CPUs; the process that measures it does so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEQUENCES, PROMPT, NEW = 8, 16, 16
TARGETS = {"bfloat16": 10.0, "float32": 3.0}


def main(model: str, python: str) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engines")]
    from ptq_export import export_ptq

    from harness.engines.vllm import environment

    with tempfile.TemporaryDirectory() as scratch:
        folder = export_ptq(Path(model), Path(scratch) / "ptq", "NVFP4")
        for dtype, target in TARGETS.items():
            speed = {}
            for kernel in ("plugin", "emulation"):
                plugins = {"VLLM_PLUGINS": ""} if kernel == "emulation" else {}
                env = {**os.environ, **environment(Path(python)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **plugins}
                done = subprocess.run([python, __file__, "--child", kernel, dtype, str(folder)],
                                      env=env, capture_output=True, text=True)  # fmt: skip
                if done.returncode:
                    sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
                speed[kernel] = float(done.stdout.splitlines()[-1])
            ratio = speed["plugin"] / speed["emulation"]
            print(f"{dtype}: plugin {speed['plugin']:.2f} tokens/s, vLLM's emulation {speed['emulation']:.2f}, ratio {ratio:.1f} "
                  f"(target {target:g})", flush=True)  # fmt: skip


def child(kernel: str, dtype: str, folder: str) -> None:
    """Prints generated tokens per second, prompt included, after one round that warms up."""
    import vllm

    if kernel == "emulation":
        from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, register_linear_kernel
        from vllm.platforms import PlatformEnum

        from harness.engines.vllm_cpu import plugin

        register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
        plugin._allow_float32()
    llm = vllm.LLM(folder, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=PROMPT + NEW + 1,
                   max_num_seqs=SEQUENCES, enable_prefix_caching=False)  # fmt: skip
    prompts = [{"prompt_token_ids": [(s * 37 + i * 101) % 1000 + 3 for i in range(PROMPT)]} for s in range(SEQUENCES)]

    def run(new: int) -> float:
        asked = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, asked, use_tqdm=False)
        return SEQUENCES * new / (time.perf_counter() - started)

    run(2)
    print(json.dumps(run(NEW)))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1] == "--child" else main(*sys.argv[1:])
