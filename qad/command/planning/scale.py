"""What a training takes of a machine, from a config.json alone: memory, FLOPs, hours, disk. No weights, no text, no GPU.

docs/reference/scale.md explains every formula. P parameters, A those that a token meets, T tokens, N ranks, w bytes of the
compute dtype. GB = 1e9 bytes.

What is said of N ranks is what it takes when torchrun starts them: they share masters, moments, gradients, student and teacher by
rows and gather one layer at a time.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from qad.arms.selection import Selection, select
from qad.errors import QadError, SourceError
from qad.model.bounds import OversizedError, built_for, require_bounded
from qad.model.experts import Expert, experts_a_layer, routed_share, split_experts
from qad.model.loader import load_skeleton
from qad.recipes.job import Job
from qad.recipes.modelopt import resolved
from qad.recipes.recipe import Recipe, Train
from qad.recipes.trainable import trainable_names
from qad.training.chunked import default_chunk, loss_bytes

WIDTH = {"float32": 4, "bfloat16": 2, "auto": 2}
MOMENTS = {"adamw": 8, "adamw8bit": 2, "adamw_offloaded": 0}  # bytes a parameter on the device
USABLE = 0.92  # share of a GPU's memory; the rest is the allocator's, the driver's and the communication's
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """memory: bytes. flops: dense BF16 a second, by the vendor's data sheet."""

    name: str
    memory: float
    flops: float


GPUS = (Gpu("A100", 80e9, 312e12), Gpu("H100", 80e9, 989e12), Gpu("H200", 141e9, 989e12), Gpu("B200", 180e9, 2250e12))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model decides.

    parameters: all of them, a tied head once.
    active: multiplied for a token: without the embedding that is looked up, and of experts those that it is sent to.
    layer: parameters of the largest layer.
    root: parameters outside of layers: embedding, head, last norm.
    layers: their number.
    vocabulary, hidden: sizes of the head.
    kept: elements a token that the backward pass of all layers keeps, in the compute dtype.
    kept_layer: the same of the largest layer.
    experts: whether there are any.
    trained: parameters that get gradients and moments. mastered: those and what is quantized.
    """

    parameters: int
    active: int
    layer: int
    root: int
    layers: int
    vocabulary: int
    hidden: int
    kept: float
    kept_layer: float
    experts: bool
    trained: int
    mastered: int

    @classmethod
    def of(cls, model: Any, selection: Selection | None, train: Train | None = None) -> Shape:
        """Read a skeleton with split experts. selection: which Linears share an input; None: none do. train: what of it trains;
        None: everything."""
        config = model.config.get_text_config()
        share = routed_share(config)
        alone = {name: (name,) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        groups = {name: group for group in (selection.groups if selection else ()) for name in group}
        layers = {n: m for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
        if not layers:
            raise SourceError(f"{type(model).__name__} has no layers that transformers can checkpoint: no plan of its scale")
        kept = [_kept(name, layer, {**alone, **groups}, config) for name, layer in layers.items()]
        sizes = [_elements(layer) for layer in layers.values()]
        head = model.get_output_embeddings().weight
        total = _elements(model)
        root = total - sum(sizes)
        idle = (1 - share) * sum(parameter.numel() for parameter in _of_experts(model, config))
        looked_up = 0 if head is model.get_input_embeddings().weight else model.get_input_embeddings().weight.numel()
        parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
        names = trainable_names(train, list(parameters), selection.modules) if train and selection else set(parameters)
        mastered = names | {f"{module}.weight" for module in (selection.modules if selection else ())}
        return cls(
            parameters=total,
            active=int(total - idle - looked_up),
            layer=max(sizes),
            root=root,
            layers=len(layers),
            vocabulary=head.shape[0],
            hidden=head.shape[1],
            kept=sum(kept),
            kept_layer=max(kept),
            experts=share < 1,
            trained=sum(size for name, size in parameters.items() if name in names),
            mastered=sum(size for name, size in parameters.items() if name in mastered),
        )


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _of_experts(model: nn.Module, config: Any) -> Iterator[nn.Parameter]:
    """Those of split experts, and stacks of all experts of a layer, whose first size is their number."""
    for module in model.modules():
        if isinstance(module, Expert):
            yield from module.parameters()
        yield from (p for p in module.parameters(recurse=False) if p.dim() == 3 and len(p) == experts_a_layer(config))


def _kept(name: str, layer: nn.Module, groups: dict[str, tuple[str, ...]], config: Any) -> float:
    """Elements a token: every Linear's output, and twice every input, as it is and quantized, once for those that share it; twice
    what norms of queries and keys are given. Held against what autograd saves by tests/qad/command/test_scale.py."""
    share, seen = routed_share(config), set()
    norms = {path for path, _ in layer.named_modules() if path.endswith(("q_norm", "k_norm"))}
    experts = {path for path, module in layer.named_modules() if isinstance(module, Expert)}
    total = sum(share * len(p) * (p.shape[1] + 2 * p.shape[2]) for p in _of_experts(layer, config) if p.dim() == 3)
    for path, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            factor = share if path.rpartition(".")[0] in experts else 1.0
            total += factor * module.out_features
            beside = path.removesuffix("_proj") + "_norm"
            if beside in norms:
                total += 2 * module.out_features
            group = groups[f"{name}.{path}"]
            if group not in seen:
                seen.add(group)
                total += 2 * factor * module.in_features
    return total


INTERPRETER = 0.3e9  # anonymous bytes of a process that has imported torch and transformers, measured


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of one rank of `ranks`, by what takes them."""

    ranks: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def need(shape: Shape, train: Train, dtype: str, ranks: int, teacher: Shape | None = None) -> Need:
    """Peak of a rank: every part of docs/reference/scale.md."""
    width, taught = WIDTH[dtype], teacher or shape
    micro = train.micro_batch_size or max(1, train.batch_size // ranks)
    tokens = min(micro, max(1, train.batch_size // ranks)) * train.seq_len
    chunk = min(train.chunk or default_chunk("cuda", shape.vocabulary), tokens)
    kept = shape.kept + (2 * shape.hidden * shape.layers if width == 2 else 0)  # norms widen their input
    if train.activation_checkpointing:
        kept = shape.layers * shape.hidden + shape.kept_layer
    held = width if ranks == 1 else 4  # shards hold BF16 values in FP32, so that gradients are reduced in FP32
    parts = {
        "student": held * shape.parameters / ranks,
        "masters": 4 * shape.mastered / ranks,
        "gradients": 4 * shape.trained / ranks,
        "moments": MOMENTS[train.optimizer] * shape.trained / ranks,
        "teacher": width * taught.parameters / ranks if "qad" in train.methods else 0.0,
        "activations": width * kept * tokens,
        # bool [T, T] a window: documents of a packed one are kept apart by it
        "mask": 0.0 if train.attention in ("flash", "flex") else float(tokens * train.seq_len),
        "loss": loss_bytes(shape.vocabulary, shape.hidden, chunk, width),
    }
    if ranks > 1:
        parts["gathered"] = width * (2 * shape.layer + shape.root + taught.root)
    return Need(ranks, parts)


def as_it_fits(job: Job, say: Callable[[str], None]) -> Job:
    """The job with activation checkpointing where the recipe leaves that open and the GPU would be too small without."""
    train = job.recipe.train
    if train is None or train.activation_checkpointing is not None or not job.device.startswith("cuda"):
        return job
    skeleton = load_skeleton(job.source)
    teacher = None if job.teacher is job.source else Shape.of(load_skeleton(job.teacher), None)
    room = USABLE * torch.cuda.get_device_properties(0).total_memory
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    one = need(Shape.of(skeleton, job.selection, train), train, job.dtype, ranks, teacher).total
    if one <= room or not skeleton.supports_gradient_checkpointing:
        return job
    say(f"       {gigabytes(one)} a rank by plan, the GPU has {gigabytes(room)}: activations are computed again in backward")
    train = train.model_copy(update={"activation_checkpointing": True})
    return dataclasses.replace(job, recipe=job.recipe.model_copy(update={"train": train}))


def flops(shape: Shape, train: Train, teacher: Shape | None = None) -> float:
    """Of the whole training. A token costs 2 A forward, 4 A backward, 2 A of the teacher, and attention over half a window."""
    taught = teacher or shape
    student, attention = 2 * shape.active, 2 * shape.layers * shape.hidden * train.seq_len
    again = student + attention if train.activation_checkpointing else 0
    asked = 2 * taught.active + 2 * taught.layers * taught.hidden * train.seq_len if "qad" in train.methods else 0
    return float(3 * (student + attention) + again + asked) * train.tokens_used * len(train.methods)


def utilization(shape: Shape) -> float:
    """Share of a GPU's peak that is assumed: of dense models, of mixtures of experts. Not measured."""
    return 0.25 if shape.experts else 0.40


def scale_lines(shape: Shape, train: Train, dtype: str, teacher: Shape | None = None) -> Iterator[str]:
    """Memory, hours and disk, and what would fit where one process does not."""
    yield (
        f"scale  {shape.parameters / 1e9:.3g}B parameters, {shape.active / 1e9:.3g}B a token, {shape.layers} layers; "
        f"{flops(shape, train, teacher):.3g} FLOPs for {train.tokens_used:,} tokens"
    )
    one = need(shape, train, dtype, 1, teacher)
    listed = ", ".join(f"{name} {gigabytes(size)}" for name, size in one.parts.items())
    own = f"on a CPU {gigabytes(INTERPRETER)} more, the interpreter with torch"
    yield f"       one process takes {gigabytes(one.total)}: {listed}; {own}"
    for gpu in GPUS:
        yield f"       {gpu.name:<5}{_on(gpu, shape, train, dtype, teacher)}"
    state = 4 * shape.mastered + (2 if train.optimizer == "adamw8bit" else 8) * shape.trained
    yield f"       a state on disk is {gigabytes(state)}, twice that while one replaces another"


def _on(gpu: Gpu, shape: Shape, train: Train, dtype: str, teacher: Shape | None) -> str:
    room = gpu.memory * USABLE
    fitting = _fitting(shape, train, dtype, room, teacher)
    hours = flops(shape, train, teacher) / (gpu.flops * utilization(shape)) / 3600
    if fitting == 1:
        return f"fits on one, {_hours(hours)} at {utilization(shape):.0%} of its peak"
    told = f"does not fit on one ({gigabytes(gpu.memory)}); this would: "
    lighter = _lighter(shape, train, dtype, room, teacher)
    if lighter:
        return f"{told}{lighter} ({_hours(hours)})"
    shorter = ""
    while fitting is None and train.seq_len > 512:
        train = train.model_copy(update={"seq_len": train.seq_len // 2})
        fitting, shorter = _fitting(shape, train, dtype, room, teacher), f"train.seq_len: {train.seq_len}, "
    if fitting is None:
        return f"{told}nothing up to {RANKS[-1]} ranks"
    hours = flops(shape, train, teacher) / (gpu.flops * utilization(shape)) / 3600
    each = gigabytes(need(shape, train, dtype, fitting, teacher).total)
    return f"{told}{shorter}{fitting} ranks of {each} each ({_hours(hours / fitting)}), by torchrun"


def _fitting(shape: Shape, train: Train, dtype: str, room: float, teacher: Shape | None) -> int | None:
    """The smallest number of ranks."""
    return next((n for n in RANKS if need(shape, train, dtype, n, teacher).total <= room), None)


def _lighter(shape: Shape, train: Train, dtype: str, room: float, teacher: Shape | None) -> str:
    """The first settings under which one GPU suffices."""
    steps: list[tuple[str, str, Any]] = [
        ("activation_checkpointing", "true", True),
        ("micro_batch_size", "1", 1),
        ("optimizer", "adamw8bit", "adamw8bit"),
        ("optimizer", "adamw_offloaded", "adamw_offloaded"),
    ]
    said: dict[str, str] = {}
    for key, words, value in steps:
        if getattr(train, key) != value:
            said[key] = f"train.{key}: {words}"
            train = train.model_copy(update={key: value})
            if need(shape, train, dtype, 1, teacher).total <= room:
                return ", ".join(said.values())
    return ""


def config_alone(folder: Path) -> bool:
    """A folder with a config.json and no weights of any kind."""
    weights = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
    return (folder / "config.json").is_file() and not any(next(folder.glob(kind), None) for kind in weights)


def config_shape(folder: Path, recipe: Recipe) -> tuple[Shape, str]:
    """From config.json; also what is quantized, in words. Raises SourceError where transformers does not know it."""
    from transformers import AutoConfig

    from qad.model.loader import auto_class, code_is_trusted

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=code_is_trusted())
        require_bounded(config.to_dict())
        with torch.device("meta"), built_for(()):
            model = auto_class(config).from_config(config, trust_remote_code=code_is_trusted())
    except (OversizedError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SourceError(f"transformers does not know {folder}/config.json as a causal LM: {reason}") from error
    split_experts(model)
    section = resolved(recipe, model).quantize
    try:
        selection = select(model, section.format, section.include, section.exclude, section.formats)
    except QadError as error:
        return Shape.of(model, None, recipe.train), f"what is quantized is not known: {error}"
    return Shape.of(model, selection, recipe.train), f"{len(selection.modules):,} Linears are quantized"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _hours(hours: float) -> str:
    return "under a minute" if hours < 1 / 60 else f"{hours:.2g} h" if hours < 100 else f"{hours:,.0f} h"
