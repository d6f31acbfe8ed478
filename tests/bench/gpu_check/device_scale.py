"""Steps of large models on a device, held against the plan: time and peak memory by phase, tokens a second, share of peak FLOPs.

Random models and random text: a step costs the same. On a GPU a dense model of more than 1B parameters in packed windows of 8K
and 32K, with and without a dense attention mask and with checkpointing; layers of a mixture; ranks where there are several GPUs.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from tiny_teacher import domains, make_tokenizer

from qad.arms.arm import open_arm
from qad.command.planning.scale import GPUS, Shape, flops, need
from qad.errors import QadError
from qad.model.loader import load_model, load_skeleton
from qad.numerics.compiled import compilation
from qad.recipes.job import Job, prepare
from qad.recipes.load import parse_recipe
from qad.training.chunked import chunked_loss
from qad.training.objective import Inputs, Objective
from qad.training.optim import make_optimizer
from qad.training.stages import ptq_arm
from qad.training.student import Student

PHASES = ("teacher", "student", "loss", "backward", "clip", "update", "deploy")


@dataclasses.dataclass(frozen=True)
class Case:
    """model: which of `Models`. windows: of a step. train: recipe keys."""

    name: str
    model: str
    seq_len: int
    windows: int
    train: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Models:
    """dense, mixture: sizes of a LlamaConfig and a Qwen3MoeConfig. document: tokens of a packed one. repeats: steps measured."""

    dense: dict[str, int]
    mixture: dict[str, int]
    document: int
    repeats: int
    cases: tuple[Case, ...]


def _sizes(vocab: int, hidden: int, layers: int, heads: int, intermediate: int, **more: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        **more,
    }


def _experts(count: int, each: int, intermediate: int) -> dict[str, int]:
    return {"num_experts": count, "num_experts_per_tok": each, "moe_intermediate_size": intermediate}


_AGAIN = {"activation_checkpointing": True}
GPU = Models(
    _sizes(65536, 2048, 20, 16, 7168),  # 1.2B
    _sizes(65536, 2048, 4, 16, 2048, **_experts(64, 8, 1024)),
    1024,
    5,
    (
        Case("8K", "dense", 8192, 2),
        Case("8K, dense mask", "dense", 8192, 2, {"attention": "sdpa"}),
        Case("8K, checkpointing", "dense", 8192, 2, _AGAIN),
        Case("8K, moments in host memory", "dense", 8192, 2, {"optimizer": "adamw_offloaded"}),
        Case("32K, checkpointing", "dense", 32768, 1, _AGAIN),
        Case("mixture 8K", "mixture", 8192, 2),
        Case("mixture 8K, checkpointing", "mixture", 8192, 2, _AGAIN),
    ),
)
CPU = Models(
    _sizes(512, 64, 2, 4, 128),
    _sizes(512, 64, 2, 4, 128, **_experts(8, 2, 64)),
    48,
    2,
    (
        Case("128", "dense", 128, 2),
        Case("128, checkpointing", "dense", 128, 2, _AGAIN),
        Case("512, checkpointing", "dense", 512, 1, _AGAIN),
        Case("mixture 128", "mixture", 128, 2),
    ),
)


def measure_scale(plan: Models, folder: Path, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Facts by case. A case that fails, as for want of memory, is named with its error, and the others go on."""
    for kind in ("dense", "mixture"):
        _save(plan, kind, folder / kind)
        ptq_arm(_job(plan, Case(kind, kind, 64, 1), folder), folder / f"{kind}-ptq")
    cases = []
    for case in plan.cases:
        try:
            found = _measure(plan, case, folder, device)
        except (QadError, RuntimeError) as error:  # torch's OutOfMemoryError is one
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        cases.append({**dataclasses.asdict(case), **found})
        say(f"{case.name}: " + (found["error"] if "error" in found else f"{found['seconds']:.3g} s a step"))
        _forget(device)
    return {"cases": cases, "ranks": _ranks(plan, folder, device)}


def _save(plan: Models, kind: str, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "dense":
        model: Any = LlamaForCausalLM(LlamaConfig(**plan.dense, **ids, tie_word_embeddings=False, dtype="bfloat16"))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**plan.mixture, **ids, tie_word_embeddings=False, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer(folder, [text for domain in domains(8) for text in domain], 512)


def _recipe(plan: Models, case: Case, folder: Path) -> dict[str, Any]:
    text = {"source": "random", "length": plan.document}
    length = case.seq_len
    train = {
        "data": text,
        "tokens": (plan.repeats + 2) * case.windows * length,
        "seq_len": length,
        "batch_size": case.windows,
        "validation_tokens": length,
        **case.train,
    }
    calibrate = {"data": text, "samples": 2, "seq_len": 64}
    return {"model": str(folder / case.model), "dtype": "bfloat16", "calibrate": calibrate, "train": train}


def _job(plan: Models, case: Case, folder: Path) -> Job:
    return prepare(parse_recipe(_recipe(plan, case, folder), "gpu-check"))


class Phases:
    """Seconds and peak bytes of named blocks, each from its own start."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, int] = {}
        self._device = device

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Times the block; on a GPU also the most memory that was held within it."""
        cuda = self._device == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize()
            self.peak[name] = torch.cuda.max_memory_allocated()
        self.seconds[name] = time.perf_counter() - started


def _measure(plan: Models, case: Case, folder: Path, device: str) -> dict[str, Any]:
    job = _job(plan, case, folder)
    config, windows = job.recipe.training, job.train_windows()
    teacher, model = (load_model(job.source, job.dtype, job.device) for _ in range(2))
    student = Student(open_arm(folder / f"{case.model}-ptq"), model)
    if config.activation_checkpointing:
        student.checkpoint_activations()
    objective = Objective(model, teacher, config, "qad", job.shared_ids)
    optimizer = make_optimizer(config, student.masters)

    def step(number: int) -> Phases:
        phases = Phases(device)
        index = windows.indices(number, config.batch_size, 0)
        inputs = Inputs(windows.at(index), index)
        with phases.of("teacher"):
            targets = objective._targets(inputs)
        with phases.of("student"):
            hidden = objective._student_hidden(inputs)
        with phases.of("loss"):
            asked = objective.student_head, targets, inputs.labels(), objective.token_loss, objective.chunk
            loss = chunked_loss(hidden, *asked) / config.tokens_per_step
        del targets, hidden, asked
        with phases.of("backward"):
            loss.backward()
        with phases.of("clip"):
            torch.nn.utils.clip_grad_norm_(list(student.masters.values()), config.clip)
        with phases.of("update"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with phases.of("deploy"):
            student.deploy()
        return phases

    with compilation(True):
        measured = [step(number) for number in range(1, plan.repeats + 3)][2:]  # the first two compile
    seconds = {name: statistics.median(p.seconds[name] for p in measured) for name in PHASES}
    shape, total = Shape.of(load_skeleton(job.source), job.selection, config), sum(seconds.values())
    once = config.model_copy(update={"tokens": config.tokens_per_step})
    peak = max((size for p in measured for size in p.peak.values()), default=None)
    planned = need(shape, config, job.dtype, 1)
    return {
        "parameters": shape.parameters,
        "tokens": config.tokens_per_step,
        "attention": getattr(model.config, "_attn_implementation", None),
        "chunk": objective.chunk,
        "seconds": total,
        "tokens_per_s": config.tokens_per_step / total,
        "seconds_by_phase": seconds,
        "peak_bytes": peak,
        "peak_bytes_by_phase": {name: max(p.peak[name] for p in measured) for name in PHASES} if peak else None,
        "planned_bytes": planned.total,
        "planned_parts": planned.parts,
        "mfu": _share_of_peak(flops(shape, once) / total, device),
    }


def _share_of_peak(flops_a_second: float, device: str) -> float | None:
    """None on a CPU and on a GPU whose peak is not known here."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    gpu = next((gpu for gpu in GPUS if gpu.name in name), None)
    return flops_a_second / gpu.flops if gpu else None


def _forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _ranks(plan: Models, folder: Path, device: str) -> list[dict[str, Any]]:
    """The first case by `torchrun -m qad train`, on one rank and on all: tokens a second of the last half of the steps."""
    count = torch.cuda.device_count() if device == "cuda" else 2
    if importlib.util.find_spec("qad.training.ranks") is None or count < 2:
        return []
    found = []
    for ranks in (1, count):
        case = dataclasses.replace(plan.cases[0], windows=count)
        recipe, out = folder / f"ranks-{ranks}.yaml", folder / f"ranks-{ranks}" / "qad"
        recipe.write_text(yaml.safe_dump(_recipe(plan, case, folder)), encoding="utf-8")
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "qad"]
        command = [sys.executable, *(launch if ranks > 1 else ["-m", "qad"]), "train", str(recipe), "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        facts: dict[str, Any] = {"ranks": ranks}
        if done.returncode:
            facts["error"] = (done.stderr.strip().splitlines() or ["?"])[-1]
        else:
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]
            facts["tokens_per_s"] = statistics.median(row["tokens_per_s"] for row in rows[len(rows) // 2 :])
        found.append(facts)
    return found


def scale_table(found: dict[str, Any]) -> list[str]:
    """Lines of the numbers, phases in milliseconds."""
    head = "".join(f"{name:>10}" for name in PHASES)
    lines = [f"{'step':<28}{'tokens':>8}{'tokens/s':>10}{'MFU':>7}{'peak GB':>9}{'planned':>9}{head}  (ms)"]
    for case in found["cases"]:
        if "error" in case:
            lines.append(f"{case['name']:<28}{case['error']}")
            continue
        mfu, peak = case["mfu"], case["peak_bytes"]
        phases = "".join(f"{1e3 * case['seconds_by_phase'][name]:>10.3g}" for name in PHASES)
        lines.append(
            f"{case['name']:<28}{case['tokens']:>8,}{case['tokens_per_s']:>10,.0f}{'-' if mfu is None else f'{mfu:.1%}':>7}"
            f"{'-' if peak is None else f'{peak / 1e9:.3g}':>9}{case['planned_bytes'] / 1e9:>9.3g}{phases}"
        )
    for row in found["ranks"]:
        lines.append(f"{row['ranks']} ranks: " + (row.get("error") or f"{row['tokens_per_s']:,.0f} tokens/s"))
    return lines
