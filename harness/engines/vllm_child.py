"""Run by vLLM's own Python: greedy tokens, log-probabilities, inputs and outputs of layers, for the parent to compare.

    python -m harness.engines.vllm_child JOBS.json

JOBS.json is a list of `Job`s. Of each, OUT holds TOKENS and LOGPROBS of every prompt, INPUT of every module asked for as that
prompt went through it (FP32, not compiled), and LAYER of every such module alone, as safetensors, with the engine's facts as
metadata. One process may open several folders, one after the other.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS, LOGPROBS, INPUT, LAYER = "tokens.{}", "logprobs.{}", "input.{}.{}", "layer.{}"


@dataclasses.dataclass(frozen=True)
class Job:
    """What to ask of one checkpoint folder.

    prompts      token ids; new_tokens: how many are generated after each, greedily
    dtype        compute dtype; eager: without torch.compile
    layers       safetensors of inputs [t, K] by the checkpoint's name of a Linear, or None
    overrides    what is read differently from config.json, such as another quantization_config
    out          safetensors file to write
    """

    folder: str
    prompts: list[list[int]]
    new_tokens: int
    dtype: str
    eager: bool
    layers: str | None
    overrides: dict[str, object]
    out: str


def main(argv: list[str]) -> int:
    jobs = [Job(**raw) for raw in json.loads(Path(argv[0]).read_text())]
    for job in jobs:
        run(job)
    return 0


def run(job: Job) -> None:
    """Open the folder, answer, close it."""
    import vllm
    from safetensors.torch import load_file, save_file
    from vllm.platforms import current_platform

    longest = max(map(len, job.prompts)) + job.new_tokens
    llm = vllm.LLM(
        job.folder,
        dtype=job.dtype,
        enforce_eager=job.eager,
        skip_tokenizer_init=True,
        max_logprobs=-1,
        seed=0,
        max_model_len=longest + 1,
        max_num_seqs=max(2, len(job.prompts)),
        enable_prefix_caching=False,
        hf_overrides=job.overrides or None,
        disable_log_stats=True,
    )
    inputs = load_file(job.layers) if job.layers else {}
    seen: dict[str, list[Tensor]] = {}
    kept = inputs if job.eager and job.dtype == "float32" else {}  # a compiled model calls no module
    (hooks,) = llm.apply_model(lambda model: [keep(name, layer, seen) for name, layer, _ in linears(model, kept)])
    tensors: dict[str, Tensor] = {}
    for number, prompt in enumerate(job.prompts):
        seen.clear()
        tensors |= {name.format(number): value for name, value in answer(llm, prompt, job.new_tokens).items()}
        # Rows of the prompt, then one of each token but the last; the engine may have begun a step more.
        rows = len(prompt) + job.new_tokens - 1
        tensors |= {INPUT.format(number, name): torch.cat(steps)[:rows] for name, steps in seen.items()}
    for hook in hooks:
        hook.remove()
    for outputs in llm.apply_model(lambda model: layer_outputs(model, inputs)):
        tensors |= {LAYER.format(name): value for name, value in outputs.items()}
    facts = {"vllm": vllm.__version__, "torch": torch.__version__, "device": str(current_platform.device_type)}
    save_file(tensors, job.out, metadata=facts)
    del llm
    _close()


def answer(llm: Any, prompt: list[int], new_tokens: int) -> dict[str, Tensor]:
    """TOKENS int64 [new], LOGPROBS float32 [T - 1 + new, V]: of the token behind each position, prompt included."""
    import vllm

    asked = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        logprobs=-1,
        prompt_logprobs=-1,
    )
    (request,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    output = request.outputs[0]
    rows = torch.cat([_table(request.prompt_logprobs), _table(output.logprobs)])
    return {TOKENS: torch.tensor(list(output.token_ids), dtype=torch.int64), LOGPROBS: rows}


def _table(flat: Any) -> Tensor:
    """vLLM's flat log-probabilities over the whole vocabulary -> float32 [positions, V]. A first prompt token has none."""
    spans = [(a, b) for a, b in zip(flat.start_indices, flat.end_indices, strict=True) if b > a]
    ids, values = torch.tensor(flat.token_ids), torch.tensor(flat.logprobs, dtype=torch.float32)
    vocabulary = int(ids.max()) + 1
    table = torch.full((len(spans), vocabulary), float("nan"))
    for row, (a, b) in zip(table, spans, strict=True):
        row[ids[a:b]] = values[a:b]
    return table


def linears(model: Any, inputs: dict[str, Tensor]) -> Iterator[tuple[str, Any, list[str]]]:
    """Every quantized Linear whose input is given: the checkpoint's name of its first member, module, names of its members."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        members = [f"{parent}.{member}" for member in fused.get(leaf, [leaf])]
        quantized = hasattr(getattr(module, "quant_method", None), "apply") and hasattr(module, "logical_widths")
        if quantized and members[0] in inputs:
            yield members[0], module, members


def keep(name: str, module: Any, seen: dict[str, list[Tensor]]) -> Any:
    """Append the rows that the module is called with, [rows, K] (of transformers in vLLM [1, rows, K]), to `seen[name]`."""

    def hook(module: Any, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(name, []).append(args[0].detach().flatten(0, -2).float().cpu().clone())

    return module.register_forward_pre_hook(hook)


def layer_outputs(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output [t, N] of every Linear whose input is given, alone; fused ones are taken apart into the checkpoint's names."""
    found: dict[str, Tensor] = {}
    with torch.inference_mode():
        for name, module, members in linears(model, inputs):
            dtype, device = _place(module)
            x = inputs[name].to(device=device, dtype=dtype)
            y = module.quant_method.apply(module, x, getattr(module, "bias", None))
            parts = y.split(list(module.logical_widths), dim=-1) if len(members) > 1 else [y]
            found |= {m: part.float().cpu().contiguous() for m, part in zip(members, parts, strict=True)}
    return found


def _place(module: Any) -> tuple[torch.dtype, torch.device]:
    """The model's compute dtype, and where the layer is."""
    weight = module.weight
    own = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    return getattr(module, "params_dtype", own), weight.device


def _close() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
