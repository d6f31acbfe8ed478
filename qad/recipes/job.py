"""A recipe with everything it names found and checked: what can be wrong is found in `prepare`, before hours are spent."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from qad.arms.kv_cache import CALIBRATES, CAST, attentions
from qad.arms.selection import Selection, describe, select
from qad.artifact import canonical, run_stage
from qad.errors import DataError, SourceError, UsageError
from qad.model.attention import training_attention
from qad.model.limits import require_ids, require_layers, require_positions
from qad.model.loader import default_device, load_model, load_skeleton, load_tokenizer, resolve_dtype
from qad.model.names import names_of
from qad.model.source import Checkpoint, open_checkpoint
from qad.model.template_clock import instant, reads_clock
from qad.recipes.apart import one_document_a_row
from qad.recipes.modelopt import resolved
from qad.recipes.recipe import Recipe
from qad.recipes.trainable import check_patterns
from qad.text.data import Data, Generations
from qad.text.documents import Part, digest_contents, require_disjoint
from qad.text.generate import TeacherText
from qad.text.packing import MINIMUM, pack, sequences
from qad.text.processor import processor_digest
from qad.text.sight import Sight, sight_for
from qad.text.sources import Need, Reader, require_readable
from qad.text.windows import StoredWindows, WindowSet


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
    rows: bool = False  # one document a window, as the model does not keep packed ones apart

    def __getstate__(self) -> dict[str, object]:
        """Without the text, which another process has no use for."""
        kept = {field.name for field in dataclasses.fields(self)}
        return {name: value for name, value in self.__dict__.items() if name in kept}

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

    @functools.cached_property
    def sight(self) -> Sight | None:
        """What reads the images, where any text shows some."""
        return sight_for([part for parts in self.text.values() for part in parts], self.source.folder, self.tokenizer)

    @property
    def compute(self) -> dict[str, object]:
        """What every computed stage depends on beside its own section."""
        return {"seed": self.recipe.seed, "dtype": self.dtype, "device": self.device}

    @property
    def train_seed(self) -> int:
        """Of the order of the training text."""
        seed = self.recipe.training.seed
        return self.recipe.seed if seed is None else seed

    def calibration_windows(self) -> WindowSet | None:
        """None where the recipe calibrates nothing."""
        section = self.recipe.calibrate
        if section is None:
            return None
        return self._windows("calibration", "calibration", section.samples, section.seq_len, self.recipe.seed)

    def train_windows(self) -> WindowSet:
        section = self.recipe.training
        shape = section.windows, section.seq_len
        return self._windows("train", "training", *shape, self.train_seed, section.loss_on)

    def validation_windows(self) -> WindowSet:
        section = self.recipe.training
        shape = section.validation_windows, section.seq_len
        return self._windows("validation", "validation", *shape, self.recipe.seed, section.loss_on)

    def _windows(
        self, role: str, what: str, windows: int, seq_len: int, seed: int, loss_on: Literal["all", "assistant"] = "all"
    ) -> StoredWindows:
        """Packed once and kept in text_folder/windows/ROLE, for as long as text, tokenizer and settings are the same.
        Where images are shown, a window is one document and the loss is on text alone."""
        time = instant() if reads_clock(self.tokenizer) else None
        sight, rows = self.sight, self.rows or self.sight is not None
        text_alone = sight and loss_on == "all" and role != "calibration"
        counts: Literal["all", "text", "assistant"] = "text" if text_alone else loss_on
        config = {
            "packing": 1,
            "windows": windows,
            "seq_len": seq_len,
            "seed": seed,
            "loss_on": counts,
            "template_time": time and time.isoformat(),
            **({"rows": True} if rows else {}),
            **({"processor": sight.digest} if sight else {}),
        }
        inputs = {"text": self._contents(role), "tokenizer": self.source.digest}
        key = canonical([role, config])
        if key not in self._packed:
            parts = self.text[role]

            def work(folder: Path) -> None:
                pack(folder, parts, self.tokenizer, windows, seq_len, seed, what, counts, rows, sight)

            out = (self.text_folder or self._scratch) / "windows" / role
            stored = run_stage("windows", out, config, inputs, work, replace=True).path
            self._packed[key] = StoredWindows(stored, sight.inputs if sight else None)
        return self._packed[key]

    def _contents(self, role: str) -> str:
        if role not in self._digests:
            self._digests[role] = digest_contents(self.text[role])
        return self._digests[role]

    @functools.cached_property
    def _packed(self) -> dict[str, StoredWindows]:
        return {}

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        return {}

    @functools.cached_property
    def _scratch(self) -> Path:
        """For windows that nobody keeps; removed with the job."""
        folder = tempfile.mkdtemp(prefix="qad-windows-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


def prepare(recipe: Recipe, say: Callable[[str], None] = lambda line: None, text_folder: Path | None = None) -> Job:
    """Find and check everything a recipe names, and say what will be quantized. text_folder: where a teacher's generations are
    kept; what they cost is spent when `Job.text` is first asked for. Raises QadError."""
    source = open_checkpoint(recipe.model)
    tokenizer = load_tokenizer(source.folder)
    skeleton = load_skeleton(source)
    recipe = resolved(recipe, skeleton)
    section = recipe.quantize
    selection = select(skeleton, section.format, section.include, section.exclude, section.formats)
    _require_tensors(source, selection)
    require_layers(source.config, source.tensors, source.folder)
    require_ids(skeleton, tokenizer, source.folder)
    require_positions(skeleton, source.folder, _sequences(recipe))
    _check_kv_cache(section.kv_cache, skeleton)
    if recipe.train:
        names = names_of(skeleton)
        check_patterns(recipe.train, [names.tensor(name) for name, _ in skeleton.named_parameters()], selection.modules)
        training_attention(recipe.train.attention, default_device(), skeleton)
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
    other = load_skeleton(teacher) if teacher is not source else None
    computes = recipe.calibrate or recipe.train
    rows = one_document_a_row(skeleton, selection, other, say) if computes else False
    job = Job(recipe, source, selection, tokenizer, device, dtype, teacher, shared, text_folder, rows)
    if any(isinstance(part, Generations) for data, _ in _needs(recipe) for part in data.root):
        for data, need in _needs(recipe):
            require_readable(data, need.role)
    elif job.sight:
        _require_images_that_serve(job)
        say("       sees images by its processor: one document a row, and the loss is on text alone")
    return job


def _require_images_that_serve(job: Job) -> None:
    """Raises UsageError for what is not done with images, and for a teacher that sees them otherwise; DataError for an image of
    the test split that is broken or too large, which nobody looks at before the end."""
    fidelity = job.recipe.measure.fidelity
    if fidelity and fidelity.new_tokens:
        raise UsageError("measure.fidelity.new_tokens: nothing is written after images here: leave it out, or give text alone")
    if job.teacher is not job.source and processor_digest(job.teacher.folder) != processor_digest(job.source.folder):
        raise UsageError(
            f"train.teacher: the processor of {job.teacher.folder} makes other inputs of an image than the student's: give a "
            "teacher with the same preprocessor_config.json, or text alone"
        )
    if fidelity:
        sequences(job.text["test"], job.tokenizer, fidelity.tokens, fidelity.seq_len, job.recipe.seed, sight=job.sight)


def _teacher(recipe: Recipe, source: Checkpoint, tokenizer: Any, skeleton: Any) -> tuple[Checkpoint, int]:
    """The teacher's checkpoint and the number of ids that it shares with the student."""
    size = skeleton.get_output_embeddings().weight.shape[0]
    if recipe.train is None or recipe.train.teacher is None:
        return source, size
    teacher = open_checkpoint(recipe.train.teacher)
    built = load_skeleton(teacher)
    require_ids(built, tokenizer, teacher.folder)
    require_positions(built, teacher.folder, {"train.seq_len": recipe.train.seq_len})
    other = built.get_output_embeddings().weight.shape[0]
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


def _sequences(recipe: Recipe) -> dict[str, int]:
    """By recipe key, how many tokens of one sequence the model is given."""
    asked = {"calibrate.seq_len": recipe.calibrate.seq_len} if recipe.calibrate else {}
    asked |= {"train.seq_len": recipe.train.seq_len} if recipe.train else {}
    fidelity, throughput = recipe.measure.fidelity, recipe.measure.throughput
    if fidelity:
        asked["measure.fidelity.seq_len"] = fidelity.seq_len
        if fidelity.new_tokens:
            asked["measure.fidelity.prompt_tokens + new_tokens"] = fidelity.prompt_tokens + fidelity.new_tokens
    if throughput:
        asked["measure.throughput.input_tokens + output_tokens"] = throughput.input_tokens + throughput.output_tokens
    return asked


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


def require_frozen_time(job: Job) -> None:
    """Raises UsageError where conversations are rendered by a template that asks for the time, and nothing keeps what it is told:
    the arm would have other text tomorrow. A run keeps it."""
    chats = any(document.messages for parts in job.text.values() for part in parts for document in part.documents)
    if chats and reads_clock(job.tokenizer) and instant() is None:
        raise UsageError(
            "the chat template asks for the time (strftime_now), so the text would be another one tomorrow: set template_time, "
            "such as --set template_time=2026-12-01, or use `qad run`, which keeps the time it was started at"
        )


def require_enough_text(job: Job, say: Callable[[str], None] = lambda line: None) -> dict[str, int]:
    """Pack every role once, so that a text too short is found before the first stage, and say what it holds. Returns tokens
    by role."""
    calibration = job.calibration_windows()
    windows: dict[str, WindowSet] = {"calibration": calibration} if calibration else {}
    if job.recipe.train:
        windows |= {"train": job.train_windows(), "validation": job.validation_windows()}
    for role, packed in windows.items():
        sources = ", ".join(f"{tokens:,} of {name}" for name, tokens in packed.sources.items())
        counted = f", {packed.counted / packed.tokens:.1%} of them in the loss" if packed.counted < packed.tokens else ""
        padding = f", {packed.padding / packed.tokens:.0%} of it padding" if packed.padding else ""
        say(f"text   {role}: {packed.tokens:,} tokens ({sources}){counted}{padding}")
    return {role: packed.tokens for role, packed in windows.items()}


def shared_vocabulary(student: Any, teacher: Any, student_size: int, teacher_size: int) -> int:
    """How many ids, from 0 on, student and teacher compare: all where their heads are of one size; where padding made
    them differ, those that the tokenizers know. student, teacher: tokenizers.

    Raises DataError where one id means two different tokens.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    ids: dict[int, str] = {index: token for token, index in theirs.items()}
    for token, index in sorted(ours.items(), key=lambda found: found[1]):
        other = ids.get(index, token)
        if other != token or theirs.get(token, index) != index:
            raise DataError(
                f"id {index} is {token!r} for the student and {other!r} for the teacher: a teacher needs the student's tokenizer"
            )
    if student_size == teacher_size:
        return student_size
    return min(max(ours.values()) + 1, max(theirs.values()) + 1, student_size, teacher_size)
