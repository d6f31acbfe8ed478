"""`qad run`: from a BF16 model to a recovery report, one folder, every step skipped that is finished and unchanged.

RUN/recipe.yaml                         the resolved recipe
RUN/text/ROLE                           what the teacher wrote, where the recipe asks for it
RUN/balanced                            the original with evened channels, where quantize.balance asks for it
RUN/search                              the KL of every choice alone, where quantize.search asks for it
RUN/arms/{bf16,ptq,qad}                 how each arm treats the source; also qat, where train.method asks for it
RUN/export/{ptq,qad}                    NVFP4 checkpoints, plain Hugging Face folders
RUN/measure/{bf16,ptq,qad}/KIND.json    records, measured on the exported folders
RUN/report/{report.html,report.md,report.json,tables/*}
RUN/metrics.jsonl                       grows while training
RUN/teacher_cache                       the teacher's distributions, where train.teacher_cache asks for it
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from export.card import name_of, with_recovery
from export.check import check
from export.modelopt_arm import modelopt_arm
from export.rules.findings import finding_lines
from export.writer import export_arm
from harness.compare.policy import load_policy
from harness.compare.recovery import compare
from harness.measure.accepted import require_own
from harness.measure.arms import KINDS, Measuring
from harness.measure.subject import Subject
from harness.records.comparison import Comparison
from harness.records.record import Record
from qad.arms.arm import DYNAMIC, NEAREST
from qad.artifact import MANIFEST, Artifact, open_artifact, replace_card
from qad.command.compare import COMPARISON, compare_again, noise_lines, verdict_on
from qad.command.planning.machine import require_room
from qad.command.planning.preflight import require_measurable
from qad.command.planning.scale import as_it_fits
from qad.command.tracking import Tracker, tracking
from qad.errors import ArtifactError
from qad.lock import only_one
from qad.model.template_clock import instant, reads_clock, template_clock
from qad.numerics.compiled import compilation
from qad.place import require_writable, write_whole, writing
from qad.provenance import now
from qad.recipes.job import Job, prepare, require_enough_text
from qad.recipes.quantize import PLAIN
from qad.recipes.recipe import Recipe
from qad.training.balance.balanced import balanced
from qad.training.search.choice import searched
from qad.training.stages import (
    METRICS,
    arm_settings,
    bf16_arm,
    changed_arms,
    ptq_arm,
    require_finite,
    require_shareable,
    trained_arm,
)
from qad.untrusted import clean
from qad.untrusted.yaml_text import read_yaml
from reports.card import recovery_table
from reports.hub import EVAL_RESULTS, eval_results, model_index
from reports.load import load_records
from reports.render import render
from reports.rows import numbers_by_name
from reports.sections.tables import summary_text

DEFAULT = "drop-1pct"  # the policy whose verdict a report shows


class Stopwatch:
    """Says which stage of how many runs and, at the end, how long each took."""

    def __init__(self, say: Callable[[str], None], stages: int) -> None:
        self._say, self.stages = say, stages
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> Stopwatch:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._say(f"== {len(self.seconds) + 1}/{self.stages} {self._name}")
        self._started = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self.seconds[self._name] = time.monotonic() - self._started

    def lines(self) -> list[str]:
        width = max(map(len, self.seconds))
        rows = [f"{name:<{width}}  {_minutes(seconds)}" for name, seconds in self.seconds.items()]
        return [*rows, f"{'total':<{width}}  {_minutes(sum(self.seconds.values()))}"]


def run(recipe: Recipe, out: Path, say: Callable[[str], None], redo: bool = False) -> Path:
    """Run everything a recipe asks for; returns the HTML report. redo: trained arms that the recipe would make otherwise are
    replaced. Raises QadError."""
    _require_run_folder(out)
    kinds = [kind for kind in KINDS if getattr(recipe.measure, kind)]
    before = recipe.quantize.balance + bool(recipe.quantize.search)
    clock = Stopwatch(say, 4 + before + 2 * len(recipe.quantized) + len(kinds))
    with only_one(out), tracking(recipe, out.name) as tracker:
        with clock("prepare"):
            job = prepare(recipe, say, out / "text")
            job = as_it_fits(job, say)
            require_shareable(job)
            require_measurable(job, out)
            clock.stages += bool(job.recipe.quantize.search) - bool(recipe.quantize.search)  # ModelOpt's recipe may ask for one
            require_room(job, out)
            _require_same_model(job, out)
        with template_clock(_template_time(job, out)):
            return _run(job, out, say, tracker, clock, kinds, redo)


def _run(
    job: Job, out: Path, say: Callable[[str], None], tracker: Tracker, clock: Stopwatch, kinds: Sequence[str], redo: bool
) -> Path:
    recipe, started = job.recipe, now()

    def made(artifact: Artifact) -> None:
        if str(artifact.manifest["created"]) < started:
            unread = "" if artifact.is_read_again else "; it is large, so its files are known by their sizes, not read again"
            say(f"   reused, made {artifact.manifest['created']}{unread}")

    with clock("text"):
        require_enough_text(job, say)
    original = job
    if recipe.quantize.balance:
        with clock("balance"):
            job = balanced(job, out / "balanced", say)
    if recipe.quantize.search:
        with clock("search"):
            job = searched(job, out / "search", say)
    _require_same_arms(job, out, say, redo)
    _claim(job, out)
    arms, exports = out / "arms", out / "export"
    with clock("arm bf16"):
        bf16_arm(original, arms / "bf16", replace=True)
    if recipe.quantize.plain:
        with clock(f"arm {PLAIN}"):
            made(ptq_arm(_plainly(original), arms / PLAIN, replace=True))
    with clock("arm ptq (calibrate)"):
        made(ptq_arm_by(job, arms / "ptq", replace=True))
    for method in recipe.methods:
        with clock(f"arm {method} (train)"):
            made(
                trained_arm(
                    job,
                    method,
                    arms / "ptq",
                    arms / method,
                    out / _log(method),
                    out / "teacher_cache",
                    replace=redo,
                    watch=functools.partial(tracker.log, method),
                )
            )
    for name in recipe.quantized:
        with clock(f"export {name}"):
            made(export(job, arms / name, exports / name, say))
    measuring = Measuring(_subjects(original, exports), recipe.measure, lambda: job.text["test"], out, say)
    with compilation(True):  # the same bits from the kernels that training compiled, in two thirds of the time
        for kind in kinds:
            with clock(f"measure {kind}"):
                getattr(measuring, kind)()
    with clock("report"):
        report = report_run(out, say, tracker=tracker)
    for line in clock.lines():
        say(line)
    last = exports / (recipe.methods[-1] if recipe.methods else "ptq")
    for line in (f"report: {report}", f"checkpoint: {last}", f"serve: vllm serve {last}"):
        say(line)
    return report


def _plainly(job: Job) -> Job:
    """The same job, quantized as other tools do it that calibrate alone."""
    usual = {"scales": DYNAMIC, "rounding": NEAREST, "balance": False, "plain": False}
    quantize = job.recipe.quantize.model_copy(update=usual)
    return dataclasses.replace(job, recipe=job.recipe.model_copy(update={"quantize": quantize}))


def ptq_arm_by(job: Job, out: Path, replace: bool = False) -> Artifact:
    """The PTQ arm by whom the recipe says. ModelOpt's export lies in a folder `modelopt` of the run, or beside the arm."""
    if job.recipe.quantize.by == "qad":
        return ptq_arm(job, out, replace)
    require_finite(job.source)
    run = out.parent.parent if out.parent.name == "arms" else out.parent
    return modelopt_arm(job, arm_settings(job.recipe, "ptq"), run / "modelopt", out, replace)


def _subjects(job: Job, exports: Path) -> list[Subject]:
    """BF16 is the source, the other arms are their exported folders."""
    folders = {"bf16": job.source.folder, **{arm: exports / arm for arm in job.recipe.quantized}}
    name, seed = job.source.display_name, job.recipe.seed
    return [Subject.open(arm, folder, job.dtype, seed, name) for arm, folder in folders.items()]


def export(job: Job, arm: Path, out: Path, say: Callable[[str], None]) -> Artifact:
    """Export an arm and say what the checker warns of. Raises BrokenCheckpointError where it refuses the folder."""
    made = export_arm(arm, out, layout=job.recipe.export.layout, shard_size=job.recipe.export.shard_size, replace=True)
    for line in finding_lines(check(out)):
        say(line)
    return made


def report_run(out: Path, say: Callable[[str], None], policy: str = DEFAULT, tracker: Tracker | None = None) -> Path:
    """Compare the records of a run folder, judge them and render its report; print table and verdict."""
    rules = load_policy(policy)
    if (out / COMPARISON).is_file():
        say(compare_again(out, policy)[1])
        return out / "report" / "report.html"
    every = load_records(out)
    if not every:
        raise ArtifactError(f"{out} holds no measurement records (measure/ARM/KIND.json): run `qad run` or `qad measure`")
    require_own(out)
    comparison = compare(every)
    records = [record for record in every if record.control is None]
    verdict = verdict_on(comparison, rules)
    with writing(out / "report"):
        paths = render(out, comparison, every, verdict)
        _complete_cards(out, comparison, records)
    for line in (summary_text(comparison, records), *noise_lines(comparison)):
        say(line)
    if tracker:
        tracker.log("report", numbers_by_name(comparison))
    if verdict:
        say(f"{verdict.outcome}: {clean(verdict.paragraph, 2000)}")
    return next(path for path in paths if path.suffix == ".html")


def _complete_cards(out: Path, comparison: Comparison, records: list[Record]) -> None:
    """The exported folders' model cards get what was measured of them: a table for readers, scores for the hub, which
    reads them in a file of their own too."""
    for arm in comparison.arms:
        table, folder = recovery_table(comparison, records, arm), out / "export" / arm
        card = folder / "README.md"
        if table is None or not card.is_file() or not (folder / MANIFEST).is_file():
            continue
        before = card.read_text(encoding="utf-8")
        after = with_recovery(before, table, model_index(comparison, arm, name_of(before)))
        if after != before:
            replace_card(folder, after)
        scores = folder / EVAL_RESULTS
        if results := eval_results(comparison, arm):
            scores.parent.mkdir(exist_ok=True)
            write_whole(scores, yaml.safe_dump(results, sort_keys=False, allow_unicode=True))
        else:
            scores.unlink(missing_ok=True)


def _log(method: str) -> str:
    """metrics.jsonl is QAD's; another method's stands beside it under its name."""
    return METRICS if method == "qad" else f"metrics-{method}.jsonl"


def _template_time(job: Job, out: Path) -> datetime.datetime | None:
    """The instant that a chat template sees which asks for the time: the recipe's, else that of the run's making, else now."""
    if not reads_clock(job.tokenizer) or job.recipe.template_time is not None:
        return job.recipe.template_time
    try:
        return datetime.datetime.fromisoformat(read_yaml(out / "recipe.yaml")["template_time"])
    except (OSError, ValueError, KeyError, TypeError):
        return datetime.datetime.now().replace(microsecond=0)


def _require_same_arms(job: Job, out: Path, say: Callable[[str], None], redo: bool) -> None:
    """Raises ArtifactError where a trained arm, or one that has begun to train, would be thrown away unasked."""
    for arm, lines in changed_arms(job, out / "arms").items():
        changed = f"{'; '.join(lines)}: {arm}, its export and its records would be made again"
        if not redo:
            raise ArtifactError(f"{changed}. Add --redo to do so, or choose another --out than {out}")
        say(f"redo   {changed}")


def _require_run_folder(out: Path) -> None:
    """Raises ArtifactError where `out` is neither free nor a run's, StorageError where nothing can be written there."""
    if out.exists() and not (out / "arms" / "bf16").is_dir():  # empty, or killed before its first stage was whole
        early = {"recipe.yaml", "recipe.yaml.tmp", "arms", "text", "teacher_cache", METRICS}
        early |= {f"{name}{state}" for name in ("balanced", "search", "modelopt") for state in ("", ".partial")}
        if not out.is_dir() or {path.name for path in out.iterdir()} - early:
            raise ArtifactError(f"{out} exists and is not a run folder: choose another --out")
    require_writable(out / "recipe.yaml" if out.is_dir() else out)


def _require_same_model(job: Job, out: Path) -> None:
    """One run folder, one model. Settings may change between runs; then the changed stages run again."""
    bf16 = out / "arms" / "bf16"
    if bf16.is_dir():
        found = open_artifact(bf16, "arm").manifest["inputs"].get("source")
        if found != job.source.digest:
            raise ArtifactError(f"{out} is a run of another model: choose another --out or remove it")


def _claim(job: Job, out: Path) -> None:
    """Write the resolved recipe into the run folder."""
    kept = instant()
    resolved = {**job.recipe.model_dump(mode="json"), "template_time": kept.isoformat() if kept else None}
    write_whole(out / "recipe.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:>3d} min {int(seconds) % 60:02d} s"
