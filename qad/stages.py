"""The stages that make arms. Everything that can be wrong is found in `prepare`, before hours are spent."""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qad.arm import DYNAMIC, KIND, open_arm, write_arm
from qad.artifact import Artifact, open_artifact, run_stage
from qad.calibrate import Calibration, calibrate
from qad.compiled import compilation
from qad.config import Method, Recipe
from qad.data_config import Data, Generations, RandomTokens
from qad.errors import SourceError, UsageError
from qad.finite import first_not_finite
from qad.formats import FP8
from qad.fusion import experts_of
from qad.generate import TeacherText
from qad.kv_cache import CALIBRATES, CAST, OFF, attentions
from qad.loader import default_device, load_model, load_skeleton, load_tokenizer, resolve_dtype
from qad.nvfp4 import FrozenScales
from qad.objective import Objective, shared_vocabulary
from qad.optim import check_patterns, trainable_names
from qad.packing import MINIMUM, Windows, pack
from qad.scale_search import search_scales
from qad.selection import Selection, describe, select
from qad.source import Checkpoint, open_checkpoint
from qad.sources import Need, Reader, require_readable
from qad.state import discard_state
from qad.streamed import streamed_model
from qad.student import Student
from qad.teacher_cache import TeacherCache, write_teacher_cache
from qad.text import Part, digest_documents, require_disjoint
from qad.train import Trainer

METRICS = "metrics.jsonl"
_COMPILE_FROM = 1 << 24  # weights searched; a compiler that starts cold costs more than it saves below


@dataclasses.dataclass(frozen=True)
class Job:
    """A recipe with everything it names found and checked; nothing has been computed yet."""

    recipe: Recipe
    source: Checkpoint
    selection: Selection
    tokenizer: Any
    device: str
    dtype: str
    teacher: Checkpoint  # the source, unless the recipe names a larger one
    shared_ids: int  # how many ids of the vocabulary student and teacher compare
    text_folder: Path | None = None

    @functools.cached_property
    def text(self) -> dict[str, list[Part]]:
        """The documents of every role. What the BF16 original is to write is written here, into text_folder."""
        recipe, written = self.recipe, None
        if self.text_folder is not None:
            load = functools.partial(load_model, self.source, self.dtype, self.device)
            written = TeacherText(self.source, self.tokenizer, recipe.seed, self.text_folder, load, self.dtype)
        reader = Reader(self.tokenizer, recipe.seed, written)
        text = {need.role: reader.parts(data, need) for data, need in _needs(recipe)}
        require_disjoint(text)
        return text

    @property
    def compute(self) -> dict[str, Any]:
        """What every computed stage depends on beside its own section."""
        return {"seed": self.recipe.seed, "dtype": self.dtype, "device": self.device}

    @property
    def train_seed(self) -> int:
        """Of the order of the training text."""
        seed = self.recipe.training.seed
        return self.recipe.seed if seed is None else seed

    def calibration_windows(self) -> Windows | None:
        """None where the recipe calibrates nothing."""
        section = self.recipe.calibrate
        if section is None:
            return None
        return pack(
            self.text["calibration"], self.tokenizer, section.samples, section.seq_len, self.recipe.seed, "calibration"
        )

    def train_windows(self) -> Windows:
        section = self.recipe.training
        return pack(
            self.text["train"], self.tokenizer, section.windows, section.seq_len, self.train_seed, "training",
            section.loss_on,
        )  # fmt: skip

    def validation_windows(self) -> Windows:
        section = self.recipe.training
        windows = section.validation_windows
        return pack(
            self.text["validation"], self.tokenizer, windows, section.seq_len, self.recipe.seed, "validation",
            section.loss_on,
        )  # fmt: skip


def prepare(recipe: Recipe, say: Callable[[str], None] = lambda line: None, text_folder: Path | None = None) -> Job:
    """Find and check everything a recipe names, and say what will be quantized. text_folder: where a teacher's generations are
    kept; what they cost is spent when `Job.text` is first asked for. Raises QadError."""
    source = open_checkpoint(recipe.model)
    tokenizer = load_tokenizer(source.folder)
    section = recipe.quantize
    skeleton = load_skeleton(source)
    selection = select(skeleton, section.format, section.include, section.exclude, section.formats)
    _require_tensors(source, selection)
    _check_kv_cache(section.kv_cache, skeleton)
    if recipe.train:
        check_patterns(recipe.train, [name for name, _ in skeleton.named_parameters()], selection.modules)
        if recipe.train.activation_checkpointing and not skeleton.supports_gradient_checkpointing:
            raise UsageError(f"train.activation_checkpointing: transformers has none for {type(skeleton).__name__}")
    device = default_device()
    dtype = resolve_dtype(recipe.dtype, device)
    say(f"model  {source.display_name}")
    for line in describe(selection):
        say(f"       {line}")
    say(f"       computed in {dtype} on {device}")
    teacher, shared = _teacher(recipe, source, tokenizer, skeleton)
    if teacher is not source:
        say(f"       learns from {teacher.display_name}, {shared:,} shared ids")
    job = Job(recipe, source, selection, tokenizer, device, dtype, teacher, shared, text_folder)
    if any(isinstance(part, Generations) for data, _ in _needs(recipe) for part in data.root):
        for data, need in _needs(recipe):
            require_readable(data, need.role)
    else:
        _ = job.text
    return job


def _teacher(recipe: Recipe, source: Checkpoint, tokenizer: Any, skeleton: Any) -> tuple[Checkpoint, int]:
    """The teacher's checkpoint and the number of ids that it shares with the student."""
    size = skeleton.get_output_embeddings().weight.shape[0]
    if recipe.train is None or recipe.train.teacher is None:
        return source, size
    teacher = open_checkpoint(recipe.train.teacher)
    other = load_skeleton(teacher).get_output_embeddings().weight.shape[0]
    return teacher, shared_vocabulary(tokenizer, load_tokenizer(teacher.folder), size, other)


def _needs(recipe: Recipe) -> list[tuple[Data, Need]]:
    """The text of each role, and how much of it."""
    calibrate, train, fidelity = recipe.calibrate, recipe.train, recipe.measure.fidelity
    needs = []
    if calibrate:
        needs.append((calibrate.data, Need("calibration", calibrate.samples * calibrate.seq_len)))
    if train:
        needs.append((train.data, Need("train", train.windows * train.seq_len)))
        validation = train.validation_data or train.data
        needs.append((validation, Need("validation", train.validation_windows * train.seq_len)))
    if fidelity:
        needs.append((fidelity.data, Need("test", fidelity.tokens, fidelity.seq_len, min(MINIMUM, fidelity.seq_len))))
    return needs


def _require_tensors(source: Checkpoint, selection: Selection) -> None:
    for name, (n, k) in selection.modules.items():
        info = source.tensors.get(f"{name}.weight")
        if info is None:
            raise SourceError(f"{source.folder} has no tensor {name}.weight, which its architecture asks for")
        if info.shape != (n, k):
            raise SourceError(
                f"{name}.weight has shape {info.shape}, config.json asks for {(n, k)}: files do not belong together"
            )


def _check_kv_cache(policy: str, skeleton: Any) -> None:
    if policy == CAST:
        warnings.warn(
            "quantize.kv_cache is cast: no scales are written, the engine uses 1.0 and cuts K and V off at 448; `calibrated` "
            "measures them",
            stacklevel=2,
        )
    if policy in CALIBRATES:
        attentions(skeleton)


def require_dense(job: Job) -> None:
    """Raises UsageError for a mixture of experts, which can be quantized and exported, but not trained yet."""
    experts = next((name for name in job.source.tensors if experts_of(name)), None)
    if experts:
        raise UsageError(
            f"{job.source.display_name} is a mixture of experts ({experts}): it cannot be trained yet; leave train out "
            "of the recipe (--set train=null) to quantize it without"
        )


def arm_settings(recipe: Recipe, arm: str) -> dict[str, Any]:
    """What a recipe alone decides of the config of its arm `ptq`, `qad` or `qat`."""
    if arm == "ptq":
        calibrate = recipe.section("calibrate") if recipe.calibrate else None
        return {"arm": arm, "quantize": recipe.section("quantize"), "calibrate": calibrate, "seed": recipe.seed}
    train = {**recipe.section("train"), "method": arm}
    if train["seed"] is None:  # as before there was one: finished arms keep their key
        del train["seed"]
    return {"arm": arm, "train": train, "seed": recipe.seed}


def bf16_arm(job: Job, out: Path, replace: bool = False) -> Artifact:
    """The source itself, as an arm."""
    inputs = {"source": job.source.digest}
    return run_stage(
        KIND, out, {"arm": "bf16"}, inputs, lambda f: write_arm(f, "bf16", job.source, None, {}), replace=replace
    )


def ptq_arm(job: Job, out: Path, replace: bool = False) -> Artifact:
    """Calibrate the unquantized model and find the weight scales that are to be frozen; its weights stay the source's."""
    windows = job.calibration_windows()
    policy = job.recipe.quantize.kv_cache
    config = {**arm_settings(job.recipe, "ptq"), **job.compute}
    inputs = {"source": job.source.digest} | ({"text": windows.digest} if windows else {})

    def work(folder: Path) -> None:
        require_finite(job.source)
        found, section = Calibration({}, {}, ()), job.recipe.calibrate
        if section and windows and (job.selection.quantizes_activations or policy in CALIBRATES):
            model, headroom = _calibrated_model(job), section.headroom
            with tqdm(total=windows.tokens, unit="tok", unit_scale=True, desc="calibrate", mininterval=2.0) as bar:
                found = calibrate(model, job.selection, windows, headroom, bar.update, kv_cache=policy)
        facts: dict[str, Any] = {} if policy == OFF else {"kv_cache": policy}
        if found.without_tokens:
            facts["experts_without_tokens"] = list(found.without_tokens)
        frozen = _frozen_scales(job)
        write_arm(folder, "ptq", job.source, job.selection, found.input_scales, frozen=frozen,
                  scales=job.recipe.quantize.scales if frozen else DYNAMIC, kv_scales=found.kv_scales,
                  tokens={"calibration": windows.tokens} if windows else {},
                  text={"calibration": windows.facts()} if windows else {}, **facts)  # fmt: skip

    return run_stage(KIND, out, config, inputs, work, replace=replace)


def _calibrated_model(job: Job) -> Any:
    """On a CPU one module's weights at a time, where that can be; elsewhere every pass would copy them to the device again."""
    streamed = streamed_model(job.source, job.dtype) if job.device == "cpu" else None
    return streamed or load_model(job.source, job.dtype, job.device)


def _frozen_scales(job: Job) -> dict[str, FrozenScales]:
    """Of every 4-bit module, found once per scale group; empty for dynamic scales."""
    strategy = job.recipe.quantize.scales
    if strategy == DYNAMIC:
        return {}
    groups = [group for group in job.selection.groups if job.selection.format_of(group[0]) != FP8]
    size = {module: math.prod(job.selection.modules[module]) for group in groups for module in group}
    total = sum(size.values())
    frozen: dict[str, FrozenScales] = {}
    with (
        compilation(True if total >= _COMPILE_FROM else None),
        tqdm(total=total, unit="weight", unit_scale=True, desc=f"{strategy} scales", mininterval=2.0) as bar,
    ):
        for group in groups:
            weights = {module: job.source.get(f"{module}.weight").to(job.device) for module in group}
            frozen |= {module: scales.to("cpu") for module, scales in search_scales(weights, strategy).items()}
            bar.update(sum(size[module] for module in group))
    return frozen


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
    config = {**arm_settings(job.recipe, method), **job.compute}
    start = open_arm(ptq)
    inputs = {
        "source": job.source.digest,
        "teacher": job.teacher.digest,
        "ptq": open_artifact(ptq, KIND).digest,
        "train": train.digest,
        "validation": validation.digest,
    }

    def work(folder: Path) -> None:
        live = log or folder / METRICS
        teacher = load_model(job.teacher, job.dtype, job.device)
        model = load_model(job.source, job.dtype, job.device)
        names = [name for name, _ in model.named_parameters()]
        student = Student(
            start, model, trainable_names(section, names, start.selection.modules if start.selection else ())
        )
        kept = _teacher_cache(job, teacher, train, cache or out.with_name("teacher_cache")) if method == "qad" else None
        objective = Objective(student.model, teacher, section, method, job.shared_ids, kept)
        trainer = Trainer(student, objective, train, validation, section, job.train_seed, folder, live, watch)
        masters = trainer.run()
        discard_state(folder)
        progress = dataclasses.asdict(trainer.progress)
        tokens = {"train": section.tokens_used, "validation": validation.tokens}
        text = {"train": train.facts(), "validation": validation.facts()}
        kv_cache = {} if start.kv_cache == OFF else {"kv_cache": start.kv_cache}
        write_arm(folder, method, job.source, start.selection, start.input_scales, masters, kv_scales=start.kv_scales,
                  scales=start.scales, frozen=student.frozen, training=progress, tokens=tokens, text=text,
                  **kv_cache)  # fmt: skip
        if live != folder / METRICS:
            shutil.copyfile(live, folder / METRICS)

    origin = {"source": job.source.digest, "training": _training(job, method)}
    return run_stage(KIND, out, config, inputs, work, resumable=True, replace=replace, origin=origin)


def _training(job: Job, method: Method) -> dict[str, Any]:
    """The seed of a training, and everything else that decides its weights. Text that the seed draws is part of the seed."""
    train = {name: value for name, value in job.recipe.section("train").items() if name != "seed"}
    drawn = (RandomTokens, Generations)
    asked = {need.role: data for data, need in _needs(job.recipe) if need.role != "test"}
    text = {
        role: digest_documents(job.text[role])
        for role, data in asked.items()
        if not any(isinstance(part, drawn) for part in data.root)
    }
    recipe = {"train": {**train, "method": method}, "quantize": job.recipe.section("quantize"),
              "calibrate": arm_settings(job.recipe, "ptq")["calibrate"], "text": text, "source": job.source.digest,
              "teacher": job.teacher.digest, "dtype": job.dtype, "device": job.device}  # fmt: skip
    return {"seed": job.train_seed, "recipe": recipe}


def _teacher_cache(job: Job, teacher: Any, windows: Windows, out: Path) -> TeacherCache | None:
    k = job.recipe.training.teacher_cache
    if k is None:
        return None
    inputs = {"teacher": job.teacher.digest, "windows": windows.digest}
    with tqdm(total=windows.tokens, unit="tok", unit_scale=True, desc="teacher", mininterval=2.0) as bar:
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


def require_enough_text(job: Job, say: Callable[[str], None] = lambda line: None) -> dict[str, int]:
    """Pack every role once, so that a text too short is found before the first stage, and say what it holds. Returns tokens
    by role."""
    calibration = job.calibration_windows()
    windows = {"calibration": calibration} if calibration else {}
    if job.recipe.train:
        windows |= {"train": job.train_windows(), "validation": job.validation_windows()}
    for role, packed in windows.items():
        sources = ", ".join(f"{tokens:,} of {name}" for name, tokens in packed.sources.items())
        counted = (
            f", {packed.counted / packed.tokens:.1%} of them in the loss" if packed.counted < packed.tokens else ""
        )
        say(f"text   {role}: {packed.tokens:,} tokens ({sources}){counted}")
    return {role: packed.tokens for role, packed in windows.items()}
