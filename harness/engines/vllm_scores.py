"""What vLLM computes of a checkpoint folder: greedy tokens, log-probabilities, outputs of single layers.

vLLM runs in a process of its own Python (see environment.py), which is told what to do by a file and answers by one. The
process holds the engine itself, so that nothing is left when it ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.engines import vllm
from harness.engines.process import ServerProcess
from harness.engines.vllm_child import INPUT, LAYER, LOGPROBS, TOKENS, Job
from qad.errors import EngineError

_KERNEL_WORDS = ("NVFP4", "NvFp4", "FP4 computation", "Selected ")
_PREFIX = re.compile(r"^.*?\[[\w.]+:\d+\] ")  # (Worker pid=7) INFO 01-01 00:00:00 [file.py:1]
_LINE = 400  # the configuration is a line as well, of thousands of characters


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of one folder. Shapes: T prompt tokens, n new ones, V vocabulary, t tokens of a layer's input.

    tokens     per prompt, int64 [n]: what was generated, greedily
    log_probs  per prompt, float32 [T - 1 + n, V]: of the token that follows each position
    inputs     per prompt, what went into the Linears asked for, float32 [T - 1 + n, K], by name of the first that shares it;
               empty where they cannot be had (compiled, or another dtype than FP32)
    layers     output of each Linear asked for, float32 [t, N]
    kernels    lines of the engine's log about kernels
    log        the engine's whole log
    """

    tokens: list[Tensor]
    log_probs: list[Tensor]
    inputs: list[dict[str, Tensor]]
    layers: dict[str, Tensor]
    version: str
    torch: str
    device: str
    kernels: list[str]
    log: str


def job(
    folder: Path,
    out: Path,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    dtype: str = "float32",
    eager: bool = True,
    layers: dict[str, Tensor] | None = None,
    overrides: dict[str, object] | None = None,
) -> Job:
    """A question about `folder`. `layers`: inputs [t, K] by the checkpoint's name of a Linear. Files go beside `out`."""
    inputs = None
    if layers:
        inputs = out.with_suffix(".inputs.safetensors")
        save_file({name: x.contiguous() for name, x in layers.items()}, inputs)
    return Job(
        folder=str(folder.absolute()),
        prompts=prompts,
        new_tokens=new_tokens,
        dtype=dtype,
        eager=eager,
        layers=None if inputs is None else str(inputs),
        overrides=overrides or {},
        out=str(out),
    )


def ask(python: Path, jobs: list[Job], folder: Path) -> list[Scores]:
    """Run the jobs one after the other in one process of `python`; `folder` takes its files.

    Raises EngineError with the end of the engine's log where it fails.
    """
    questions, log = folder / "jobs.json", folder / "engine.log"
    questions.write_text(json.dumps([dataclasses.asdict(one) for one in jobs]), encoding="utf-8")
    command = [str(python), "-m", "harness.engines.vllm_child", str(questions)]
    process = ServerProcess(command, log=log, environment=_environment(python, all(one.eager for one in jobs)))
    try:
        process.wait(None)
    finally:
        process.stop()
    if process.exit_code or not all(Path(one.out).is_file() for one in jobs):
        raise EngineError(f"vLLM ({python}) ended with code {process.exit_code}; the end of its log:\n{process.tail()}")
    return [_read(one, process.text()) for one in jobs]


def _environment(python: Path, eager: bool) -> dict[str, str]:
    """One process: layers can be reached, and the log is of one piece. Eager, vLLM would still compile its sampler's parts,
    for minutes on a small machine."""
    compiler = {"TORCH_COMPILE_DISABLE": "1"} if eager else {}
    return {**os.environ, **vllm.environment(python), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **compiler}


def kernel_lines(log: str) -> list[str]:
    """What the log says about FP4 and FP8 kernels, without time and place, each line once."""
    lines = (line for line in log.splitlines() if any(word in line for word in _KERNEL_WORDS))
    return list(dict.fromkeys(_PREFIX.sub("", line) for line in lines if len(line) < _LINE))


def _read(one: Job, log: str) -> Scores:
    with safe_open(one.out, framework="pt") as file:
        facts, count = file.metadata(), range(len(one.prompts))

        def named(prefix: str) -> dict[str, Tensor]:
            keys = (key for key in file.keys() if key.startswith(prefix))  # noqa: SIM118 (not a dict)
            return {key.removeprefix(prefix): file.get_tensor(key) for key in sorted(keys)}

        return Scores(
            tokens=[file.get_tensor(TOKENS.format(i)) for i in count],
            log_probs=[file.get_tensor(LOGPROBS.format(i)) for i in count],
            inputs=[named(INPUT.format(i, "")) for i in count],
            layers=named(LAYER.format("")),
            version=facts["vllm"],
            torch=facts["torch"],
            device=facts["device"],
            kernels=kernel_lines(log),
            log=log,
        )
