"""`qad plan --emit megatron-bridge`: what a recipe is there, as the commands of ModelOpt's Megatron-Bridge example, and every key
that has no word in them.

Option names and defaults were read in NVIDIA/Model-Optimizer, examples/megatron_bridge: quantize.py at 058492f, distill.py and
README.md at 0ba8471 (June 2026); names of quantization configs in ModelOpt 0.47 (modelopt.recipe.presets). Nothing was run there.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from qad.errors import UsageError
from qad.recipes.recipe import Recipe, Train

# (format, scales) -> --quant_cfg
QUANT_CFG = {
    ("NVFP4", "dynamic"): "nvfp4",
    ("NVFP4", "mse"): "nvfp4_w4a4_weight_mse_fp8_sweep",
    ("NVFP4", "four_over_six"): "nvfp4_four_over_six",
    ("W4A16_NVFP4", "dynamic"): "w4a16_nvfp4",
    ("FP8", "dynamic"): "fp8",
}
# (policy, format) -> --kv_cache_quant
KV_CACHE_QUANT = {
    ("calibrated", "FP8"): "fp8",
    ("cast", "FP8"): "fp8_cast",
    ("calibrated", "NVFP4"): "nvfp4",
    ("cast", "NVFP4"): "nvfp4_cast",
}
WITH_GPTQ = "general/ptq/nvfp4_default-kv_none-gptq"  # --recipe
# Keys that become an option.
SAID = {
    "quantize": {"format", "scales", "rounding", "kv_cache", "kv_format"},
    "calibrate": {"data", "samples", "seq_len"},
    "train": {
        "method",
        "teacher",
        "data",
        "tokens",
        "seq_len",
        "batch_size",
        "micro_batch_size",
        "lr",
        "schedule",
        "warmup_steps",
        "activation_checkpointing",
        "validate_every",
        "validation_tokens",
        "seed",
    },
}
# The others: what these scripts do, and what to do where the recipe asks for something else. A key is named where it is not so.
UNSAID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "quantize.formats": (lambda v: not v, "write a ModelOpt recipe (--recipe FILE.yaml) with a quant_cfg entry a pattern"),
    "quantize.include": (lambda v: v == ["*"], "write a ModelOpt recipe that enables the quantizers of these modules alone"),
    "quantize.exclude": (
        lambda v: not set(v) - {"lm_head"},
        "write a ModelOpt recipe with {quantizer_name: ..., enable: false} for each",
    ),
    "quantize.search": (lambda v: v is None, "no option; ModelOpt's own search is mtq.auto_quantize, a TODO in quantize.py"),
    "quantize.balance": (lambda v: not v, "give the folder RUN/balanced as the model: it has the original's bits"),
    "quantize.plain": (lambda v: not v, "quantize.py without a recipe of its own makes that one"),
    "quantize.recipe": (lambda v: v is None, "give that file to quantize.py (--recipe)"),
    "quantize.by": (lambda v: v in ("qad", "modelopt"), "ModelOpt quantizes there in any case"),
    "calibrate.headroom": (lambda v: v == 1, "no option; --recipe general/ptq/nvfp4_act_headroom-kv_fp8_cast is the nearest"),
    "train.loss": (lambda v: v == "forward_kl", "distill.py has forward KL alone (LogitsKLLoss)"),
    "train.temperature": (lambda v: v == 1, "no option: set logit_kl_temperature of ModelOptDistillConfig in distill.py"),
    "train.teacher_cache": (lambda v: v is None, "the teacher runs beside the student; there is no cache"),
    "train.validation_data": (lambda v: v is None, "distill.py splits the data paths 99 to 1"),
    "train.epochs": (lambda v: v == 1, "its data sets repeat by themselves; train_iters counts all epochs"),
    "train.loss_on": (lambda v: v == "all", "every token counts there: mask the rest when the data are tokenized"),
    "train.trainable": (lambda v: v == "all", "all parameters train there"),
    "train.lr_scale": (lambda v: not v, "one learning rate for all parameters there"),
    "train.optimizer": (lambda v: v == "adamw", "distributed fused Adam alone"),
    "train.betas": (lambda v: tuple(v) == (0.9, 0.95), "fixed to (0.9, 0.95) in distill.py"),
    "train.clip": (lambda v: v == 1, "fixed to clip_grad 1.0 in distributed_fused_adam_with_cosine_annealing"),
    "train.weight_only_steps": (lambda v: v == 0, "inputs are quantized from the first step on"),
    "train.attention": (lambda v: True, ""),
    "train.chunk": (lambda v: True, ""),
    "train.patience": (lambda v: v is None, "runs all train_iters"),
    "train.save_every": (lambda v: True, ""),
    "train.save_minutes": (lambda v: v is None, "saves every --eval_interval steps"),
}
# What differs whatever the recipe says.
ALWAYS = (
    "weight decay: its scheduler applies 0.033 (start_weight_decay, end_weight_decay), here there is none",
    "global scales: those of calibration stay as they are while weights train; with quantize.scales dynamic they follow here",
    "packed documents: reset_attention_mask is False, so documents of a window see each other",
    "best checkpoint: its last five are kept, none is chosen by validation",
    "data: tokenize it for Megatron first (examples/dataset/README.md); documents are split by it, not by content hash",
)


def megatron_bridge(recipe: Recipe) -> Iterator[str]:
    """Lines of a shell script, for the processes of one machine that share a step evenly. Raises UsageError for a recipe without
    `train`, or that trains with cross-entropy alone."""
    train = recipe.training
    if "qad" not in train.methods:
        raise UsageError("distill.py learns from a teacher, train.method qat has none: use Megatron-Bridge's finetune, or qad")
    processes = math.gcd(8, train.batch_size)
    name = PurePath(recipe.model).name
    quantized, trained = f"/output/{name}-quantized", f"/output/{name}-qad"
    yield f"# {name} by ModelOpt's example for Megatron-Bridge, in a NeMo container."
    yield "# Options of NVIDIA/Model-Optimizer, examples/megatron_bridge, as read there in June 2026; not run here."
    yield _command("quantize.py", processes, _quantize(recipe, quantized))
    yield _command("distill.py", processes, _distill(recipe, train, quantized, trained, processes))
    export = {"hf_model_name_or_path": recipe.model, "megatron_path": f"{trained}/checkpoints"}
    export["export_unified_hf_path"] = f"{trained}-hf"
    yield _command("export_quantized_megatron_to_hf.py", 1, export)  # named export.py in some versions
    yield f"qad import {shlex.quote(f'{trained}-hf')} --as qad --source {shlex.quote(recipe.model)} --out RUN/arms/qad"
    yield ""
    for line in _unsaid(recipe):
        yield f"# not there: {line}"
    for line in ALWAYS:
        yield f"# differs: {line}"


def _command(script: str, processes: int, options: dict[str, Any]) -> str:
    given = [f"--{name}" if value is True else f"--{name} {_words(value)}" for name, value in options.items()]
    return " \\\n    ".join([f"torchrun --nproc_per_node {processes} {script}", *given])


def _words(value: Any) -> str:
    return " ".join(
        shlex.quote(f"{part:g}" if isinstance(part, float) else str(part))
        for part in (value if isinstance(value, list) else [value])
    )


def _quantize(recipe: Recipe, out: str) -> dict[str, Any]:
    section, calibrate = recipe.quantize, recipe.calibrate
    options: dict[str, Any] = {"hf_model_name_or_path": recipe.model}
    if section.rounding == "gptq":
        options["recipe"] = WITH_GPTQ
    else:
        options["quant_cfg"] = QUANT_CFG.get((section.format, section.scales), QUANT_CFG[section.format, "dynamic"])
        kv_cache = KV_CACHE_QUANT.get((section.kv_cache, section.kv_format))
        options |= {"kv_cache_quant": kv_cache} if kv_cache else {}
    if calibrate:
        options |= {"calib_num_samples": calibrate.samples, "seq_length": calibrate.seq_len}
    return {**options, "tp_size": 1, "export_megatron_path": out}


def _distill(recipe: Recipe, train: Train, quantized: str, out: str, processes: int) -> dict[str, Any]:
    micro = max(1, min(train.micro_batch_size or train.batch_size, train.batch_size // processes))
    options: dict[str, Any] = {
        "student_hf_path": recipe.model,
        "teacher_hf_path": train.teacher or recipe.model,
        "student_megatron_path": quantized,
        "tp_size": 1,
        "pp_size": 1,
        "cp_size": 1,
        "ep_size": 1,
        "data_paths": [part for number, source in enumerate(train.data.root) for part in (source.weight, f"TOKENIZED_{number}")],
        "seed": recipe.seed if train.seed is None else train.seed,
        "seq_length": train.seq_len,
        "mbs": micro,
        "gbs": train.batch_size,
        "train_iters": train.steps,
        "lr": train.lr,
        "min_lr": train.lr if train.schedule == "constant" else 0.0,
        "lr_warmup_iters": train.warmup_steps,
        "eval_interval": train.validate_every,
        "eval_iters": max(1, train.validation_windows // train.batch_size),
    }
    if train.activation_checkpointing:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {**options, "output_dir": out}


def _unsaid(recipe: Recipe) -> Iterator[str]:
    """Keys whose value these scripts cannot be told, each with what there is instead."""
    section, train = recipe.quantize, recipe.training
    for key, (same, instead) in UNSAID.items():
        part, _, leaf = key.partition(".")
        held = getattr(recipe, part)
        if held is not None and not same(getattr(held, leaf)):
            yield f"{key} {getattr(held, leaf)}: {instead}"
    if (section.format, section.scales) not in QUANT_CFG:
        taken = QUANT_CFG[section.format, "dynamic"]
        yield f"quantize.scales {section.scales} of {section.format}: there is no preset of it, {taken} is taken"
    if section.rounding == "blockwise":
        yield "quantize.rounding blockwise: there is none, weights are rounded to nearest"
    if section.kv_cache != "off" and (section.kv_cache, section.kv_format) not in KV_CACHE_QUANT:
        yield f"quantize.kv_cache {section.kv_cache}: no option bounds scales from below"
    if section.rounding == "gptq" and section.kv_cache != "off":
        yield f"quantize.kv_cache {section.kv_cache}: the recipe with GPTQ has no KV quantizers"
    if recipe.calibrate:
        yield "calibrate.data: --calib_dataset_name takes registered data sets alone; without it a mix of its own is used"
    if len(train.methods) > 1:
        yield f"train.method {train.methods}: distill.py makes the qad arm alone"
    if train.schedule == "linear":
        yield "train.schedule linear: its schedule is a cosine from --lr to --min_lr, which is taken"
