"""An arm of a study: made by the product's own stages, judged on test text by KL from its original and by cross-entropy."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sorting_task
import torch
from originals import DOMAINS, SEQ_LEN, Say

from qad.arms.arm import KIND, Arm, open_arm, write_arm
from qad.artifact import run_stage
from qad.model import families
from qad.model.loader import load_model
from qad.model.source import open_checkpoint
from qad.recipes.job import Job, prepare
from qad.recipes.load import parse_recipe
from qad.text.data import Data
from qad.text.packing import pack
from qad.text.sources import Need, Reader
from qad.text.windows import WindowSet
from qad.training.balance.balanced import balanced
from qad.training.objective import Objective
from qad.training.stages import ptq_arm, trained_arm
from qad.training.student import Student

BATCH, STEPS, RATE = 8, 100, 2e-4
TOKENS = STEPS * BATCH * SEQ_LEN
TEST_TOKENS, PROBLEMS = 3072, 1000
PROMPTED, WRITTEN, RANDOM = "from prompts", "from BOS", "random tokens"
_GENERATED = {"source": "teacher", "length": 128, "prompt_tokens": 16, "batch_size": 64}
APART = "apart"  # family of a model of which engines fuse nothing
families._BY_TYPE[APART] = families.Family((APART,), fused=())


@dataclasses.dataclass(frozen=True)
class Spec:
    """quantize, train: what differs from the recipe that all share; train None: PTQ. original: base or sharpened.

    text: kinds of text to train on, or PROMPTED, WRITTEN or RANDOM.

    scales_apart: every Linear has a global scale of its own while it trains.
    deployed: settings of `quantize` under which the trained masters are deployed, where not those of training.
    """

    quantize: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    original: str = "base"
    text: tuple[str, ...] | str = DOMAINS
    scales_apart: bool = False
    deployed: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """Files of one seed."""

    folder: Path
    seed: int

    @property
    def originals(self) -> Path:
        return self.folder / "originals"

    def blend(self, *domains: str) -> list[dict[str, Any]]:
        return [{"source": "jsonl", "path": str(self.originals / f"{domain}.jsonl")} for domain in domains]

    def data(self, text: tuple[str, ...] | str) -> list[dict[str, Any]]:
        if text == RANDOM:
            return [{"source": "random", "length": 128}]
        if text == WRITTEN:
            return [_GENERATED]
        if text == PROMPTED:
            return [{**_GENERATED, "prompts": source} for source in self.blend(*DOMAINS)]
        return self.blend(*text)

    def job(self, spec: Spec, text: str) -> Job:
        """The job of a recipe. text: folder of its windows."""
        every, train = self.blend(*DOMAINS), dict(spec.train or {})
        recipe = {
            "model": str(self.originals / spec.original),
            "seed": self.seed,
            "dtype": "float32",
            "quantize": dict(spec.quantize),
            "calibrate": {"data": every, "samples": 64, "seq_len": SEQ_LEN},
            "train": {
                "data": self.data(spec.text),
                "validation_data": every,
                "tokens": TOKENS,
                "seq_len": SEQ_LEN,
                "batch_size": BATCH,
                "lr": RATE,
                "schedule": "linear",
                "warmup_steps": STEPS // 10,
                "validate_every": STEPS // 2,
                "save_every": STEPS,
                "validation_tokens": 2048,
                **train,
            },
        }
        return prepare(parse_recipe(recipe, "studies"), text_folder=self.folder / "text" / text)

    def ptq(self, spec: Spec) -> tuple[Job, Path]:
        """The job of an arm, on evened channels where it asks for them, and its PTQ arm."""
        said = "-".join(f"{key}-{value}" for key, value in sorted(spec.quantize.items())).lower() or "plain"
        kinds = spec.text if isinstance(spec.text, str) else " ".join(spec.text)
        job = self.job(spec, f"{spec.original} {kinds}".replace(" ", "-"))
        job = balanced(job, self.folder / "balanced" / spec.original)
        out = self.folder / "ptq" / f"{spec.original}-{said}"
        ptq_arm(job, out)
        return job, out

    def arm(self, name: str, spec: Spec) -> Arm:
        """Made, unless it was."""
        job, start = self.ptq(spec)
        if spec.train is None:
            return open_arm(start)
        (self.folder / "arms").mkdir(exist_ok=True)
        out = self.folder / "arms" / name.replace(" ", "-").replace("/", "by")
        if spec.scales_apart:
            start = _redeclared(open_arm(start), open_arm(start), out.with_name(f"{out.name}-start"), APART)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what fails to learn says so in the table
            trained_arm(job, spec.train.get("method", "qad"), start, out)
        if spec.deployed is None:
            return open_arm(out)
        like = open_arm(self.ptq(dataclasses.replace(spec, quantize=spec.deployed, train=None))[1])
        return open_arm(_redeclared(open_arm(out), like, out.with_name(f"{out.name}-deployed"), None))


def _redeclared(masters: Arm, like: Arm, out: Path, family: str | None) -> Path:
    """Masters of one arm under the selection and input scales of another (of its dynamic scales), maybe as another family."""
    assert like.selection is not None
    selection = like.selection if family is None else dataclasses.replace(like.selection, family=family)
    names = [name for name in masters.source.tensors] if family is None else []
    weights = {name: masters.weight(name) for name in names} or None

    def work(folder: Path) -> None:
        write_arm(folder, "qad" if weights else "ptq", like.source, selection, like.input_scales, weights)

    shutil.rmtree(out, ignore_errors=True)
    return run_stage(KIND, out, {"masters": str(masters.folder.name)}, {"source": like.source.digest}, work).path


def tests_of(place: Place, job: Job) -> dict[str, WindowSet]:
    """Windows of the test split of each kind of text."""
    tests: dict[str, WindowSet] = {}
    for name in DOMAINS:
        parts = Reader(job.tokenizer, place.seed).parts(Data.model_validate(place.blend(name)), Need("test", TEST_TOKENS))
        (text := place.folder / "text" / f"test-{name}").mkdir(exist_ok=True, parents=True)
        tests[name] = pack(text, parts, job.tokenizer, TEST_TOKENS // SEQ_LEN, SEQ_LEN, place.seed, "test")
    return {**tests, "validation": job.validation_windows()}


def judge(place: Place, job: Job, original: str, arm: Arm | None, tests: dict[str, WindowSet]) -> dict[str, float]:
    """KL from the original and cross-entropy on each test text, nats per token, and the task's accuracy. None: the original.
    end: validation KL at the end of training, which the best checkpoint's hides."""
    source = open_checkpoint(place.originals / original)
    teacher, model = load_model(source, job.dtype, job.device), load_model(arm.source if arm else source, job.dtype, job.device)
    if arm is not None:
        model = Student(arm, model).model
    objective = Objective(model, teacher, job.recipe.training, "qat", job.shared_ids)
    found = {}
    for name, windows in tests.items():
        objective._kept.clear()  # kept by index, for one text
        validation = objective.validate(windows, batch=32)
        found |= {f"kl {name}": validation.kl, f"ce {name}": validation.loss}
    training = arm.facts.get("training") if arm else None
    found["end"] = training["val_kl_last"] if training else found["kl validation"]
    sorting = sorting_task.Task(job.tokenizer)
    found["accuracy"] = sorting.accuracy(model, PROBLEMS, 10**6)
    found["sampled"] = sorting.accuracy(model, PROBLEMS, 10**6, torch.Generator().manual_seed(place.seed))
    return found


def run_seed(place: Place, specs: Mapping[str, Spec], say: Say) -> dict[str, dict[str, float]]:
    """Arm -> its measures; what folder/results.json holds is not made again."""
    file = place.folder / "results.json"
    results: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.is_file() else {}
    missing = {name: spec for name, spec in specs.items() if name not in results}
    if not missing:
        return results
    job = place.job(Spec(), "base")
    tests = tests_of(place, job)
    for original in ("base", "sharpened"):
        if original not in results:
            results[original] = judge(place, job, original, None, tests)
    for name, spec in missing.items():
        started = time.process_time()
        results[name] = judge(place, job, spec.original, place.arm(name, spec), tests)
        results[name]["cpu seconds"] = round(time.process_time() - started, 1)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1))
        partial.replace(file)
        say(f"seed {place.seed}: {name:<28}" + "  ".join(f"{key} {value:.4f}" for key, value in results[name].items()))
    return results
