"""`qad compare` and `qad gate`: measured or imported arms side by side, and the verdict of a policy on them.

DIR/measure/ARM/KIND.json   the compared records, as they were read
DIR/comparison.json         every number of the comparison, unrounded
DIR/report/{report.html,report.md,report.json}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from harness.compare.comparable import BASELINE
from harness.compare.contrasts import MARGIN
from harness.compare.gate import judge
from harness.compare.policy import Policy, load_policy
from harness.compare.recovery import compare
from harness.imported.scores import read_imported
from harness.imported.stamp import MODEL
from harness.records import comparison as comparisons
from harness.records import record as record_files
from harness.records.comparison import Comparison, from_json
from harness.records.record import ARMS, Record, to_json
from harness.records.verdict import Verdict
from qad.artifact import Artifact, digest_of, require_place, run_stage
from qad.errors import DataError, UsageError
from qad.untrusted import clean, mapping, strict_json
from reports.contents import finite
from reports.load import load_records
from reports.render import render
from reports.sections.details import contrasts
from reports.sections.seeds import training_seeds
from reports.sections.serving import serving_table
from reports.sections.tables import summary_text, table_text

COMPARISON = "comparison.json"
_KIND = "comparison"
_UNNAMED = "custom"  # what `qad measure` calls an arm without --arm


def compare_arms(
    arguments: Sequence[str], out: Path, *, margin: float, policy: str, noise_floor: Sequence[Path] = ()
) -> tuple[Artifact, str]:
    """Compare the arms, write DIR, and return it with the table and the verdict as text.

    arguments: [NAME=]PATH, baseline first. margin: the share of a score that may be lost, between 0 and 1. noise_floor:
    folders or files of controls. Raises UsageError for a path that holds no measurement and for a single arm, DataError where
    the arms are not comparable.
    """
    rules = load_policy(policy)
    require_place(out, _KIND, replace=True)
    arms = read_arms(arguments)
    if not noise_floor and len({record.arm for record in arms}) < 2:
        raise UsageError(f"{arms[0].arm} is the only arm: give another one to compare with it, or its controls (--noise-floor)")
    return _compared([*arms, *_controls(noise_floor)], out, margin, rules)


def compare_again(out: Path, policy: str) -> tuple[Artifact, str]:
    """A comparison folder made anew from the records it holds, with the verdict of another policy. Raises QadError."""
    return _compared(load_records(out), out, _margin(out), load_policy(policy))


def _compared(read: list[Record], out: Path, margin: float, rules: Policy) -> tuple[Artifact, str]:
    comparison = compare(read, margin)
    _require_something(comparison)
    records = [record for record in read if record.control is None]
    verdict = verdict_on(comparison, rules)

    def work(folder: Path) -> None:
        for name, record in _named(read).items():
            record_files.write(record, folder / "measure" / f"{name}.json")
        text = json.dumps(finite(comparisons.to_json(comparison)), indent=1, allow_nan=False)
        (folder / COMPARISON).write_text(text + "\n", encoding="utf-8")
        render(folder, comparison, read, verdict)

    inputs = {name.replace("/", " "): _identity(record) for name, record in _named(read).items()}
    config = {"margin": margin, "policy": rules.model_dump(mode="json")}
    artifact = run_stage(_KIND, out, config, inputs, work, replace=True)
    found = contrasts(comparison), training_seeds(comparison), serving_table(comparison, records)
    tables = [table_text(table) for table in found if table]
    left_out = "\n".join(f"not compared: {clean(note, 500)}" for note in comparison.not_compared)
    parts = [summary_text(comparison, records), *tables, *noise_lines(comparison), left_out]
    if verdict:
        parts.append(f"{verdict.outcome}: {clean(verdict.paragraph, 2000)}")
    return artifact, "\n\n".join(part for part in parts if part)


def _require_something(comparison: Comparison) -> None:
    served = any(comparison.serving_ratio.values()) or any(comparison.throughput_ratio.values())
    found = served or comparison.benchmarks or comparison.fidelity or comparison.memory_ratio or comparison.noise_floor
    if comparison.not_compared and not found:
        raise DataError(f"nothing could be compared: {clean('; '.join(comparison.not_compared), 2000)}")


def noise_lines(comparison: Comparison) -> list[str]:
    """The noise floors in words, one paragraph an arm."""
    lines = []
    for arm, floor in comparison.noise_floor.items():
        changed = ", ".join(f"{name} {value}" for name, value in floor.conditions.items())
        parts = []
        if floor.median is not None:
            band = f"{100 * floor.median.low:.1f}-{100 * floor.median.high:.1f} %"
            parts.append(f"95 % of median recoveries without any difference lie in {band}")
        if floor.differing is not None:
            parts.append(f"{100 * floor.differing.value:.1f} % of {floor.differing.n:,} items scored otherwise")
        if floor.kl is not None:
            parts.append(f"KL {floor.kl.value:.3g} nats")
        lines.append(f"noise floor, {arm} against itself ({changed}): {'; '.join(parts)}")
    return lines


def verdict_on(comparison: Comparison, policy: Policy, arm: str | None = None) -> Verdict | None:
    """The gate's verdict; None where nothing but the baseline was measured."""
    return judge(comparison, policy, arm) if set(comparison.arms) - {BASELINE} else None


def gate(results: Path, policy: str, arm: str | None) -> Verdict:
    """The verdict on a run folder, a comparison folder, comparison.json or report.json. Raises QadError."""
    rules = load_policy(policy)
    return judge(load_comparison(results), rules, arm)


def load_comparison(results: Path) -> Comparison:
    """From records where there are any, else from a written comparison. Raises UsageError for anything else."""
    if (results / "measure").is_dir():
        records = load_records(results)
        if not records:
            raise UsageError(f"{results} holds no readable measurement record: run `qad measure` or `qad run`")
        return compare(records, _margin(results))
    candidates = [results, results / COMPARISON, results / "report.json", results / "report" / "report.json"]
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        raise UsageError(f"{results} is no run folder, comparison folder or report.json: check the path")
    return _read_comparison(file)


def _read_comparison(file: Path) -> Comparison:
    try:
        raw = mapping(strict_json(file.read_bytes()))
        return from_json(raw.get("comparison", raw))
    except ValueError as error:
        raise UsageError(f"{file} is no comparison of this version ({error}): compare the arms again") from error


def _margin(folder: Path) -> float:
    """The margin that a comparison folder was made with."""
    try:
        contrasts = strict_json((folder / COMPARISON).read_bytes())["contrasts"]
        return float(contrasts[0]["margin"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return MARGIN


# --- arms ----------------------------------------------------------------------------------------


def read_arms(arguments: Sequence[str]) -> list[Record]:
    """Records of all arms. An arm is named by NAME=, else by its records, else by its place: bf16, ptq, qad.

    Raises UsageError for a path without measurements and where no arm is bf16, DataError for a damaged file.
    """
    records: list[Record] = []
    placed: list[str] = []
    paths = [_split(argument)[1].resolve() for argument in arguments]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} is given as more than one arm: each arm has results of its own")
    for place, argument in enumerate(arguments):
        name, path = _split(argument)
        default = name or (ARMS[place] if place < len(ARMS) else path.stem)
        imported = read_imported(path, default)
        for record in _read(path) if imported is None else imported:
            if not name and record.arm == (_UNNAMED if imported is None else default):
                placed.append(f"{default}={path}")
            records.append(dataclasses.replace(record, arm=name or (default if record.arm == _UNNAMED else record.arm)))
    if placed:
        warnings.warn(f"taken by their place: {' '.join(dict.fromkeys(placed))} (NAME=PATH says it)", stacklevel=2)
    if ARMS[0] not in {record.arm for record in records}:
        found = ", ".join(dict.fromkeys(record.arm for record in records))
        raise UsageError(f"none of the arms is {ARMS[0]} ({found}): name the baseline, {ARMS[0]}=PATH")
    measured = [record.model for record in records if "imported" not in record.provenance]
    foreign = [record.model for record in records if record.model != MODEL]
    model = (measured or foreign or [MODEL])[0]
    return [dataclasses.replace(r, model=model) if "imported" in r.provenance else r for r in records]


def _controls(paths: Sequence[Path]) -> list[Record]:
    records = [record for path in paths for record in read_imported(path, "") or _read(path)]
    wrong = next((record for record in records if record.control is None), None)
    if wrong is not None:
        raise UsageError(
            f"the {wrong.kind} record of {wrong.arm} is no control: make one with `qad measure {wrong.kind} --noise-floor`"
        )
    return records


def _named(records: Sequence[Record]) -> dict[str, Record]:
    """Place of each record under DIR/measure, without .json: controls beside their arms, further seeds beside the first."""
    named: dict[str, Record] = {}
    for record in records:
        arm = f"{_folder_name(record.arm)}{'' if record.control is None else '-again'}"
        name, number = f"{arm}/{record.kind}", 1
        while name in named:
            number += 1
            name = f"{arm}/{record.kind}-{number}"
        named[name] = record
    return named


def _split(argument: str) -> tuple[str, Path]:
    """NAME=PATH, or a path, which may hold = itself."""
    name, equals, path = argument.partition("=")
    if equals and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) and not Path(argument).exists():
        return name, Path(path)
    return "", Path(argument)


def _read(path: Path) -> list[Record]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        if not path.exists():
            raise UsageError(f"{path} does not exist: give a folder of records, a record or a result file")
        raise UsageError(
            f"{path} holds no measurement: give a folder of records such as RUN/measure/bf16, a record, a CSV file, "
            "or a result folder of lm-eval or NeMo Evaluator"
        )
    try:
        return [record_files.read(file) for file in files]
    except ValueError as error:
        raise DataError(f"{error}: measure that arm again or leave the file out") from error


def _folder_name(arm: str) -> str:
    """The arm's name where it can be a folder's, else what is left of it and a hash."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", arm)[:60]
    if safe == arm and not safe.startswith("."):
        return safe
    return f"{safe.lstrip('.')}-{hashlib.sha256(arm.encode('utf-8', 'replace')).hexdigest()[:8]}"


def _identity(record: Record) -> str:
    """Digest of a record without when and by what it was made."""
    left_out = ("created", "seconds", "provenance")
    return digest_of({name: value for name, value in to_json(record).items() if name not in left_out})
