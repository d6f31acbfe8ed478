"""The stages that make arms. Everything that can be wrong is found in `prepare`, before hours are spent."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from qad.arms.arm import BLOCKWISE, DYNAMIC, KIND, NEAREST, Arm, open_arm, write_arm
from qad.arms.kv_cache import CALIBRATES, OFF
from qad.artifact import MANIFEST, Artifact, differences, open_artifact, run_stage
from qad.errors import ArtifactError, SourceError, UsageError
from qad.model.loader import default_device, load_model
from qad.model.names import names_of
from qad.model.source import Checkpoint
from qad.model.streamed import streamed_model
from qad.numerics.compiled import compilation
from qad.numerics.finite import first_not_finite
from qad.numerics.formats import FORMATS, FP8
from qad.numerics.nvfp4 import FrozenScales
from qad.numerics.scale_search import search_scales, shared_global_scale
from qad.progress import Progress
from qad.recipes.job import Job, _needs
from qad.recipes.recipe import Method, Recipe
from qad.recipes.trainable import trainable_names
from qad.text.data import Generations, RandomTokens
from qad.text.documents import digest_documents
from qad.text.windows import WindowSet
from qad.training.blockwise import trained_codes
from qad.training.calibrate import Calibration, calibrate
from qad.training.chunked import default_chunk
from qad.training.gptq_pass import decided_codes
from qad.training.objective import Objective
from qad.training.ranks.group import ALONE, Ranks, here
from qad.training.ranks.shards import sharded_teacher, skeleton
from qad.training.ranks.tasks import together
from qad.training.state import discard_state
from qad.training.student import Student
from qad.training.teacher_cache import TeacherCache, write_teacher_cache
from qad.training.trainer import Progress as TrainerProgress
from qad.training.trainer import Trainer

METRICS = "metrics.jsonl"
_OTHER_PTQ = "the ptq is another one"
_COMPILE_FROM = 1 << 24  # weights searched; a compiler that starts cold costs more than it saves below


def arm_settings(recipe: Recipe, arm: str) -> dict[str, Any]:
    """What a recipe alone decides of the config of its arm `ptq`, `qad` or `qat`."""
    if arm == "ptq":
        calibrate = recipe.section("calibrate") if recipe.calibrate else None
        return {"arm": arm, "quantize": _quantize(recipe), "calibrate": calibrate, "seed": recipe.seed}
    train = {**recipe.section("train"), "method": arm}
    del train["save_minutes"]  # decides nothing of the result
    _keep_keys(train)
    return {"arm": arm, "train": train, "seed": recipe.seed}


def _keep_keys(train: dict[str, Any]) -> None:
    """Finished arms keep their key: what was not there is left out at its default, what a default stood for is said."""
    for key, default in {"seed": None, "attention": "auto"}.items():
        if train[key] == default:
            del train[key]
    train["activation_checkpointing"] = bool(train["activation_checkpointing"])
    if train["chunk"] is None and default_device() == "cpu":
        train["chunk"] = default_chunk("cpu", 0)


def _quantize(recipe: Recipe) -> dict[str, Any]:
    section = recipe.section("quantize")
    del section["plain"]  # another arm
    if section["rounding"] != NEAREST:  # whether the arm holds where training begins
        section["start"] = recipe.train is not None
    usual = {"rounding": NEAREST, "kv_format": FP8, "search": None, "recipe": None, "by": "qad", "balance": False}
    for key, only in usual.items():
        if section[key] == only:  # as before there was another: finished arms keep their key
            del section[key]
    return section


def _kv_facts(policy: str, format: str) -> dict[str, Any]:
    if policy == OFF:
        return {}
    return {"kv_cache": policy} | ({} if format == FP8 else {"kv_format": format})


def changed_arms(job: Job, arms: Path) -> dict[str, list[str]]:
    """Trained arms under `arms`, finished or begun, that this job would make otherwise: what differs, a line each."""
    ptq = differences(arms / "ptq", *_ptq_key(job))
    kept = "" if ptq or not (arms / "ptq" / MANIFEST).is_file() else open_artifact(arms / "ptq", KIND).digest
    found = {}
    for method in job.recipe.methods:
        lines = differences(arms / method, *_trained_key(job, method, kept))
        if lines:
            own = [line for line in lines if line != _OTHER_PTQ or (kept and not ptq)]
            found[method] = list(dict.fromkeys([*ptq, *own]))
    return {method: lines for method, lines in found.items() if lines}


def _ptq_key(job: Job) -> tuple[dict[str, Any], dict[str, str]]:
    """Config and inputs of the PTQ arm."""
    windows = job.calibration_windows()
    inputs = {"source": job.source.digest} | ({"text": windows.digest} if windows else {})
    return {**arm_settings(job.recipe, "ptq"), **job.compute}, inputs


def _trained_key(job: Job, method: Method, ptq: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Config and inputs of a trained arm. ptq: digest of the arm it starts from."""
    inputs = {
        "source": job.source.digest,
        "teacher": job.teacher.digest,
        "ptq": ptq,
        "train": job.train_windows().digest,
        "validation": job.validation_windows().digest,
    }
    return {**arm_settings(job.recipe, method), **job.compute}, inputs


def bf16_arm(job: Job, out: Path, replace: bool = False) -> Artifact:
    """The source itself, as an arm."""
    inputs = {"source": job.source.digest}
    return run_stage(KIND, out, {"arm": "bf16"}, inputs, lambda f: write_arm(f, "bf16", job.source, None, {}), replace=replace)


def ptq_arm(job: Job, out: Path, replace: bool = False) -> Artifact:
    """Calibrate the unquantized model and find the weight scales that are to be frozen; its weights stay the source's."""
    windows = job.calibration_windows()
    policy = job.recipe.quantize.kv_cache
    config, inputs = _ptq_key(job)

    def work(folder: Path) -> None:
        require_finite(job.source)
        found, section = Calibration({}, {}, ()), job.recipe.calibrate
        if section and windows and (job.selection.quantizes_activations or policy in CALIBRATES):
            with Progress("calibrate", windows.tokens, "tok") as bar:
                found = together(_calibration, job, windows, progress=bar.update)
        facts = _kv_facts(policy, job.recipe.quantize.kv_format)
        if found.without_tokens:
            facts["experts_without_tokens"] = list(found.without_tokens)
        if job.recipe.quantize.rounding != NEAREST and windows:
            frozen = _decided_codes(job, windows, found.input_scales)
            facts |= {"rounding": job.recipe.quantize.rounding} if frozen else {}
        else:
            frozen = _frozen_scales(job)
        write_arm(
            folder,
            "ptq",
            job.source,
            job.selection,
            found.input_scales,
            frozen=frozen,
            scales=job.recipe.quantize.scales if frozen else DYNAMIC,
            kv_scales=found.kv_scales,
            tokens={"calibration": windows.tokens} if windows else {},
            text={"calibration": windows.facts()} if windows else {},
            **facts,
        )

    return run_stage(KIND, out, config, inputs, work, replace=replace)


def _calibration(job: Job, windows: WindowSet, progress: Callable[[int], object] = lambda tokens: None) -> Calibration:
    """On every rank."""
    recipe = job.recipe
    assert recipe.calibrate is not None
    model = _calibrated_model(job, here())
    return calibrate(model, job.selection, windows, recipe.calibrate.headroom, progress, kv_cache=recipe.quantize.kv_cache)


def _calibrated_model(job: Job, ranks: Ranks) -> Any:
    """On a CPU one module's weights at a time, where that can be; elsewhere every pass would copy them to the device again."""
    streamed = streamed_model(job.source, job.dtype) if job.device == "cpu" else None
    if streamed is not None:
        return streamed
    if ranks.alone:
        return load_model(job.source, job.dtype, job.device)
    return sharded_teacher(job.source, job.dtype, ranks, split=True)


def _frozen_groups(job: Job) -> list[tuple[str, ...]]:
    """Scale groups whose format freezes them; none for dynamic scales."""
    if job.recipe.quantize.scales == DYNAMIC:
        return []
    return [group for group in job.selection.groups if FORMATS[job.selection.format_of(group[0])].nvfp4_weights]


def _weights(job: Job, groups: Sequence[tuple[str, ...]]) -> int:
    return sum(math.prod(job.selection.modules[module]) for group in groups for module in group)


def _frozen_scales(job: Job) -> dict[str, FrozenScales]:
    """Of every module whose format has them, found once per scale group; empty for dynamic scales."""
    strategy, groups = job.recipe.quantize.scales, _frozen_groups(job)
    if not groups:
        return {}
    total = _weights(job, groups)
    frozen: dict[str, FrozenScales] = {}
    with compilation(True if total >= _COMPILE_FROM else None), Progress(f"{strategy} scales", total, "weight") as bar:
        for group in groups:
            weights = {module: job.source.get(f"{module}.weight").to(job.device) for module in group}
            frozen |= {module: scales.to("cpu") for module, scales in search_scales(weights, strategy).items()}
            bar.update(_weights(job, [group]))
    return frozen


def _decided_codes(job: Job, windows: WindowSet, input_scales: dict[str, torch.Tensor]) -> dict[str, FrozenScales]:
    strategy, groups = job.recipe.quantize.scales, _frozen_groups(job)
    if not groups:
        return {}
    global_scales: dict[str, torch.Tensor] = {}
    for group in groups:
        weights = {module: job.source.get(f"{module}.weight") for module in group}
        global_scales |= dict.fromkeys(group, shared_global_scale(weights, strategy))
    total, rounding = _weights(job, groups), job.recipe.quantize.rounding
    decide = trained_codes if rounding == BLOCKWISE else decided_codes
    with compilation(True if total >= _COMPILE_FROM else None), Progress(rounding, total, "weight") as bar:
        return decide(
            _calibrated_model(job, ALONE),
            job.selection,
            windows,
            lambda m: job.source.get(f"{m}.weight"),
            input_scales,
            global_scales,
            strategy,
            keep_start=job.recipe.train is not None,
            progress=bar.update,
        )


def trained_arm(
    job: Job,
    method: Method,
    ptq: Path,
    out: Path,
    log: Path | None = None,
    cache: Path | None = None,
    replace: bool = False,
    watch: Callable[[dict[str, Any]], object] = lambda row: None,
) -> Artifact:
    """Train from a PTQ arm. `log`: where metrics.jsonl grows while training (default: inside the arm). `cache`: folder of
    the teacher cache, where the recipe wants one (default: beside the arm). `watch`: called with every line of the log."""
    section = job.recipe.training
    train, validation = job.train_windows(), job.validation_windows()
    start = open_arm(ptq)
    if start.decides_codes and not start.starts_in_cells:
        raise ArtifactError(f"{ptq} decided its codes without a start for training: make it again by a recipe with train")
    config, inputs = _trained_key(job, method, open_artifact(ptq, KIND).digest)

    def work(folder: Path) -> None:
        live = log or folder / METRICS
        windows = train, validation
        kept = cache or out.with_name("teacher_cache")
        masters, progress = together(_train, job, method, start, windows, folder, live, kept, watch=watch)
        discard_state(folder)
        tokens = {"train": section.tokens_used, "validation": validation.tokens}
        text = {"train": train.facts(), "validation": validation.facts()}
        kv_cache = _kv_facts(start.kv_cache, start.kv_format or FP8)
        frozen = _frozen_of(start)
        rounding = {"rounding": start.rounding} if masters is None and start.decides_codes else {}
        write_arm(
            folder,
            method,
            job.source,
            start.selection,
            start.input_scales,
            masters,
            kv_scales=start.kv_scales,
            scales=start.scales,
            frozen=frozen if masters is None else {module: scales.to_nearest for module, scales in frozen.items()},
            training=dataclasses.asdict(progress),
            tokens=tokens,
            text=text,
            **kv_cache,
            **rounding,
        )
        if live != folder / METRICS:
            shutil.copyfile(live, folder / METRICS)

    origin = {"source": job.source.digest, "training": _training(job, method)}
    return run_stage(KIND, out, config, inputs, work, resumable=True, replace=replace, origin=origin)


def _train(
    job: Job,
    method: Method,
    start: Arm,
    windows: tuple[WindowSet, WindowSet],
    folder: Path,
    log: Path,
    cache: Path,
    watch: Callable[[dict[str, Any]], object] = lambda row: None,
) -> tuple[dict[str, torch.Tensor] | None, TrainerProgress]:
    """On every rank. Masters by name in the checkpoint, to the first rank; None where the PTQ weights are kept."""
    section, ranks = job.recipe.training, here()
    if ranks.alone:
        teacher, model = (load_model(source, job.dtype, job.device) for source in (job.teacher, job.source))
    else:
        teacher, model = sharded_teacher(job.teacher, job.dtype, ranks), skeleton(job.source, job.dtype, ranks)
    names = names_of(model).all
    trainable = trainable_names(section, names, start.selection.modules if start.selection else ())
    student = Student(start, model, trainable, None if ranks.alone else job.dtype)
    kept = _teacher_cache(job, teacher, windows[0], cache) if method == "qad" else None
    objective = Objective(student.model, teacher, section, method, job.shared_ids, kept)
    trainer = Trainer(student, objective, *windows, section, job.train_seed, folder, log, watch)
    trained = trainer.run()
    return None if trained is None else student.stored.of(trained), trainer.progress


def require_shareable(job: Job) -> None:
    """Raises UsageError or SourceError where several ranks cannot do what the recipe asks for; nothing is read."""
    ranks, train = here(), job.recipe.train
    if ranks.alone:
        return
    alone = {"search": job.recipe.quantize.search is not None, "by: modelopt": job.recipe.quantize.by != "qad"}
    if asked := [key for key, given in alone.items() if given]:
        raise UsageError(
            f"quantize.{asked[0]} works in one process: run `qad ptq` without torchrun; formats stand in its arm's config"
        )
    if job.device != "cpu":
        skeleton(job.source, job.dtype, ranks)
    if train is None:
        return
    if train.batch_size % ranks.size:
        raise UsageError(
            f"train.batch_size {train.batch_size} cannot be shared among {ranks.size} ranks: take a multiple, or other ranks"
        )
    if "text" in job.__dict__ and job.sight:
        raise UsageError("text that shows images is trained in one process: start without torchrun, or leave the images out")
    if train.optimizer == "adamw8bit":
        raise UsageError(
            "train.optimizer adamw8bit works in one process: several ranks can share the moments of adamw or adamw_offloaded"
        )
    for source in {job.source.folder: job.source, job.teacher.folder: job.teacher}.values():
        skeleton(source, job.dtype, ranks)


def _frozen_of(arm: Arm) -> dict[str, FrozenScales]:
    groups = arm.selection.groups if arm.selection else ()
    return {module: found for group in groups for module, found in arm.frozen_scales(group).items()}


def _training(job: Job, method: Method) -> dict[str, Any]:
    """The seed of a training, and everything else that decides its weights. Text that the seed draws is part of the seed."""
    train = {name: value for name, value in arm_settings(job.recipe, method)["train"].items() if name != "seed"}
    drawn = (RandomTokens, Generations)
    asked = {need.role: data for data, need in _needs(job.recipe) if need.role != "test"}
    text = {
        role: digest_documents(job.text[role])
        for role, data in asked.items()
        if not any(isinstance(part, drawn) for part in data.root)
    }
    recipe = {
        "train": {**train, "method": method},
        "quantize": _quantize(job.recipe),
        "calibrate": arm_settings(job.recipe, "ptq")["calibrate"],
        "text": text,
        "source": job.source.digest,
        "teacher": job.teacher.digest,
        "dtype": job.dtype,
        "device": job.device,
    }
    rows = {"rows": True} if job.rows else {}  # one document a window
    return {"seed": job.train_seed, "recipe": {**recipe, **rows}}


def _teacher_cache(job: Job, teacher: Any, windows: WindowSet, out: Path) -> TeacherCache | None:
    k = job.recipe.training.teacher_cache
    if k is None:
        return None
    inputs = {"teacher": job.teacher.digest, "windows": windows.digest}
    with Progress("teacher", windows.tokens, "tok") as bar:
        write_teacher_cache(out, teacher, windows, k, job.shared_ids, inputs, {"dtype": job.dtype}, bar.update)
    return TeacherCache(out, windows)


def require_finite(source: Checkpoint) -> None:
    """Raises SourceError naming tensor and index for the first NaN or Inf among all floating-point weights. Reads each tensor
    once, one at a time."""
    for name, info in source.tensors.items():
        if info.dtype not in ("BF16", "F16", "F32"):
            continue
        weight = source.get(name)
        index = first_not_finite(weight)
        if index is not None:
            raise SourceError(
                f"{name} holds {weight[index].item()} at index {list(index)}: the source is damaged, fetch or train it again"
            )
