"""`qad validate`: a deployment validation of folders that any tool made, in one command and one exit code.

    qad validate bf16=DIR ptq=DIR qad=DIR --out RUN

checks every quantized folder, measures all of them as a run does (memory, distance from bf16, benchmarks, speed where an engine
computes natively), compares, judges and renders the report. Started again, it goes on where it was.

RUN/recipe.yaml                 the folders, and what is measured
RUN/measure/ARM/KIND.json       records
RUN/report/                     as of a run
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from export.check import check, looked_at
from export.rules.findings import finding_lines
from harness.accuracy.section import Scoring
from harness.compare.policy import load_policy
from harness.engines.available import run_engine
from harness.fidelity.section import require_test_text
from harness.measure.arms import KINDS, Measuring
from harness.measure.subject import Subject
from qad.arms.origin import reference_of
from qad.command.measure import accuracy_section, fidelity_section
from qad.command.run import report_run
from qad.errors import ArtifactError, BrokenCheckpointError, UsageError
from qad.lock import only_one
from qad.place import require_apart, require_writable, write_whole
from qad.recipes.load import parse_measure
from qad.recipes.recipe import Measure
from qad.text.documents import Part
from qad.text.packing import MINIMUM
from qad.text.sources import Need, Reader

BASELINE = "bf16"
RECIPE = "recipe.yaml"


@dataclasses.dataclass(frozen=True)
class Validation:
    """What is asked.

    folders: arm -> checkpoint folder, bf16 among them.
    measure: as the section of a recipe.
    policy: name or file of what the numbers are held against.
    """

    folders: dict[str, Path]
    measure: Measure
    policy: str
    dtype: str
    seed: int


def folders_of(arguments: Sequence[str]) -> dict[str, Path]:
    """NAME=DIR, bf16 first by custom. Raises UsageError for a name twice."""
    folders: dict[str, Path] = {}
    for argument in arguments:
        arm, equals, path = argument.partition("=")
        if not equals or not arm.replace("-", "").replace("_", "").replace(".", "").isalnum() or not path:
            raise UsageError(f"{argument!r}: give NAME=DIR, such as bf16=models/mine ptq=export/ptq")
        if arm in folders:
            raise UsageError(f"{arm} is given twice: name each folder differently")
        folders[arm] = Path(path)
    return folders


def validate(asked: Validation, out: Path, say: Callable[[str], None]) -> None:
    """Fill `out`. Raises UsageError, SourceError before anything is measured; BrokenCheckpointError naming the broken folders."""
    if BASELINE not in asked.folders or len(asked.folders) < 2:
        raise UsageError(f"give the original as {BASELINE}=DIR and at least one quantized folder, such as ptq=DIR")
    load_policy(asked.policy)
    require_apart(out, {f"folder {arm}": folder for arm, folder in asked.folders.items()})
    _require_place(out)
    with only_one(out):
        subjects = [Subject.open(arm, folder, asked.dtype, asked.seed) for arm, folder in asked.folders.items()]
        baseline = next(subject for subject in subjects if subject.arm == BASELINE)
        subjects = [dataclasses.replace(subject, model=baseline.model) for subject in subjects]
        _require_originals(subjects, baseline, say)
        if asked.measure.accuracy:
            Scoring.of(asked.measure.accuracy, asked.seed).require_data()
        if asked.measure.fidelity:
            text = _text(asked, baseline), baseline.tokenizer, asked.seed, baseline.source, baseline.dtype
            require_test_text(asked.measure.fidelity, *text)
        _require_sound(subjects, say)
        _claim(asked, out)
        measuring = Measuring(subjects, asked.measure, lambda: _text(asked, baseline), out, say)
        for kind in KINDS[:-1]:
            if getattr(asked.measure, kind):
                say(f"== measure {kind}")
                getattr(measuring, kind)()
        say("== report")
        report_run(out, say, asked.policy)


def section_of(args: argparse.Namespace) -> Measure:
    """The section `measure` of a recipe that the arguments of `qad validate` stand for. Raises UsageError."""
    known = ("memory", "fidelity", "accuracy", "throughput")
    kinds = args.measure.split(",") if args.measure else known[:3]
    odd = next((kind for kind in kinds if kind not in known), None)
    if odd is not None:
        raise UsageError(f"--measure {odd!r} is unknown: use {', '.join(known)}")
    sections = {"fidelity": fidelity_section(args), "accuracy": accuracy_section(args), "throughput": {}}
    asked = {kind: sections[kind] for kind in kinds if kind != "memory"}
    measure = parse_measure({"engine": args.engine, "memory": "memory" in kinds, **asked})
    return measure if args.measure else with_speed(measure, {})


def asked_measure(given: Measure | Mapping[str, object] | None) -> Measure:
    """The same from Python; None: what the command measures by itself. Raises UsageError."""
    if given is None:
        return with_speed(parse_measure({"fidelity": {"data": "python-docs"}, "accuracy": {"suite": "smoke"}}), {})
    return given if isinstance(given, Measure) else parse_measure(dict(given))


def with_speed(measure: Measure, throughput: dict[str, int]) -> Measure:
    """Speed as well, where an engine is here whose speed is its own: on a CPU FP4 is emulated."""
    if run_engine(measure.engine) is None:
        return measure
    return Measure.model_validate({**measure.model_dump(), "throughput": throughput})


def _require_place(out: Path) -> None:
    """Free, or a validation's. Raises ArtifactError, StorageError."""
    if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - {RECIPE, "measure", "report"}):
        raise ArtifactError(f"{out} exists and is no validation's folder: choose another --out")
    require_writable(out / RECIPE if out.is_dir() else out)


def _require_originals(subjects: Sequence[Subject], baseline: Subject, say: Callable[[str], None]) -> None:
    """bf16 is unquantized and what the others were made from, as far as that can be told."""
    if baseline.source.config.get("quantization_config"):
        raise UsageError(f"{BASELINE}={baseline.folder} is quantized: give the BF16 original as {BASELINE}")
    for subject in subjects:
        if subject is not baseline:
            _, told = reference_of(subject.source, baseline.source, other=False)
            if told:
                say(told)


def _require_sound(subjects: Sequence[Subject], say: Callable[[str], None]) -> None:
    """Every quantized folder is checked before any is measured. Raises BrokenCheckpointError."""
    broken = []
    for subject in subjects:
        if not subject.source.config.get("quantization_config") and subject.arm == BASELINE:
            continue
        findings = check(subject.folder)
        for line in finding_lines(findings):
            say(line)
        bad = any(finding.severity == "error" for finding in findings)
        broken += [subject.arm] * bad
        say(f"check  {subject.arm}: {'broken' if bad else 'ok'} ({looked_at(subject.folder)})")
    if broken:
        raise BrokenCheckpointError(
            f"{', '.join(broken)} would be served wrong, so nothing was measured: leave it out, or mend the folder "
            "(`qad check DIR --fix OUT` writes metadata and index anew; weights and scales need another export)"
        )


def _claim(asked: Validation, out: Path) -> None:
    """Write what is asked; the report reads it as a recipe without training."""
    said = {
        "arms": {arm: str(folder) for arm, folder in asked.folders.items()},
        "seed": asked.seed,
        "dtype": asked.dtype,
        "calibrate": None,
        "train": None,
        "measure": asked.measure.model_dump(mode="json"),
    }
    write_whole(out / RECIPE, yaml.safe_dump(said, sort_keys=False, allow_unicode=True))


def _text(asked: Validation, baseline: Subject) -> list[Part]:
    section = asked.measure.fidelity
    assert section is not None
    need = Need("test", section.tokens, section.seq_len, min(MINIMUM, section.seq_len))
    return Reader(baseline.tokenizer, asked.seed).parts(section.data, need)
