"""What a run folder holds besides records: training log, recipe, manifests. Anything missing or broken is named.

Nothing here raises for a missing or damaged part: a report says "not measured" and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from harness.records import record as records
from harness.records.record import ARMS, Record
from qad.untrusted import is_number, mapping, strict_json, text_lines
from qad.untrusted.yaml_text import strict_yaml

KINDS = ("accuracy", "fidelity", "memory", "throughput")
METRICS = "metrics.jsonl"
OTHER_METRICS = "metrics-*.jsonl"  # of other trained arms: metrics-qat.jsonl
RECIPE = "recipe.yaml"
MANIFEST = "qad_manifest.json"


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl; None where the line has none. kl, val_kl, val_cross_entropy (which picks the checkpoint of QAT):
    nats per token. saturated_weight_share, saturated_input_share: of blocks of 16 above their scales, at a validation."""

    step: int
    tokens: int
    kl: float | None
    lr: float | None
    tokens_per_s: float | None
    val_kl: float | None
    val_cross_entropy: float | None = None
    saturated_weight_share: float | None = None
    saturated_input_share: float | None = None


@dataclasses.dataclass(frozen=True)
class SplitText:
    """The text of one role. sources: name -> tokens. counted: positions in the loss. used: tokens over all epochs; both None
    where they say nothing new."""

    role: str
    sources: dict[str, int]
    counted: int | None = None
    used: int | None = None

    @property
    def tokens(self) -> int:
        return sum(self.sources.values())


@dataclasses.dataclass(frozen=True)
class SearchedUnit:
    """What engines run in one format. kl: format -> nats per token when it alone is quantized. format: that of the PTQ arm.
    modules: its members."""

    name: str
    modules: list[str]
    kl: dict[str, float]
    format: str


@dataclasses.dataclass(frozen=True)
class Run:
    """steps: of metrics.jsonl; other_steps: arm -> those of its own log. recipe: the YAML text, "" if there is
    none. manifests: path inside the run -> facts, sorted by path. text: what each role read, as far as it is known.

    missing: (what was not measured, why), in the order of the report. measure, quantize: those sections of the recipe, {} where
    it is not known. left_out: sections that the recipe is without, of calibrate and train. samples: files of samples under
    RUN/measure, as qad/accuracy.samples.parquet. search: what `quantize.search` measured, on so many search_tokens.
    """

    steps: list[Step]
    recipe: str
    manifests: dict[str, dict[str, object]]
    missing: list[tuple[str, str]]
    text: list[SplitText] = dataclasses.field(default_factory=list)
    other_steps: dict[str, list[Step]] = dataclasses.field(default_factory=dict)
    measure: dict[str, object] = dataclasses.field(default_factory=dict)
    samples: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    quantize: dict[str, object] = dataclasses.field(default_factory=dict)
    search: list[SearchedUnit] = dataclasses.field(default_factory=list)
    search_tokens: int = 0

    def unasked(self, kind: str) -> str:
        """Why a kind of measurement is not there, where the recipe tells; else ""."""
        return "" if self.measure.get(kind, True) else f"not measured: the recipe does not ask for it (measure.{kind})"


def load_records(run: Path) -> list[Record]:
    """Every readable RUN/measure/ARM/KIND.json, by path. `load_run` names the ones that cannot be read."""
    return [found for found in map(_read, _paths(run)) if isinstance(found, Record)]


def load_run(run: Path, given: list[Record]) -> Run:
    """The rest of the folder. given: the records the report is about; what they lack is listed as missing."""
    recipe = _text(run / RECIPE)
    settings = _settings(recipe)
    measure, quantize = mapping(settings.get("measure")), mapping(settings.get("quantize"))
    left_out = frozenset(name for name in ("calibrate", "train") if settings.get(name, {}) is None)
    arms = [*mapping(settings.get("arms"))] or [arm for arm in ARMS if arm != "qad" or "train" not in left_out]
    missing = _missing_records(run, given, measure, arms)
    steps = [] if "train" in left_out else _steps(run / METRICS, missing)
    if "train" in left_out:
        missing.append(("training curve", "there is none: the recipe has no train"))
    if not recipe:
        missing.append(("recipe", f"not known: the run holds no {RECIPE}"))
    others = {path.stem.partition("-")[2]: _read_steps(path)[0] for path in sorted(run.glob(OTHER_METRICS))}
    others = {arm: found for arm, found in others.items() if found}
    measured = run / "measure"
    samples = frozenset(p.relative_to(measured).as_posix() for p in measured.glob("*/*.samples.parquet"))
    text = _split_texts(run, given)
    search = _search(run)
    return Run(steps, recipe, _manifests(run), missing, text, others, measure, samples, left_out, quantize, *search)


def _search(run: Path) -> tuple[list[SearchedUnit], int]:
    """Empty where there was none, or where the PTQ arm is not there that says what came of it."""
    try:
        found = strict_json((run / "search" / "sensitivity.json").read_bytes())
        selection = strict_json((run / "arms" / "ptq" / "selection.json").read_bytes())
        own, usual = mapping(selection["formats"]), str(selection["format"])
        formats = {module: str(own.get(module, usual)) for module in mapping(selection["modules"])}
        units = [
            SearchedUnit(
                str(unit["name"]),
                [str(module) for module in unit["modules"]],
                {str(format): float(kl) for format, kl in mapping(unit["kl"]).items()},
                formats.get(str(unit["modules"][0]), "BF16"),
            )
            for unit in found["units"]
        ]
        return units, int(found["tokens"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return [], 0


def _settings(recipe: str) -> dict[str, object]:
    """{} for text that is no recipe."""
    try:
        return mapping(strict_yaml(recipe))
    except ValueError:
        return {}


def _paths(run: Path) -> list[Path]:
    return sorted((run / "measure").glob("*/*.json"))


def _read(path: Path) -> Record | str:
    """The record, or why it cannot be read."""
    try:
        return records.read(path)
    except (ValueError, OSError) as error:
        return str(error.__cause__ or error)


def _missing_records(
    run: Path, given: list[Record], measure: dict[str, object], expected: Sequence[str]
) -> list[tuple[str, str]]:
    """expected: arms that a run of this recipe has."""
    have = {(record.arm, record.kind) for record in given}
    damaged = {(path.parent.name, path.stem): found for path in _paths(run) if isinstance(found := _read(path), str)}
    arms = [*expected, *sorted({arm for arm, _ in {*have, *damaged}} - set(expected))]
    kinds = [*KINDS, *sorted({kind for _, kind in damaged} - set(KINDS))]
    missing = []
    for kind in kinds:
        for arm in arms:
            damage = damaged.get((arm, kind))
            if (arm, kind) in have or (damage is None and kind not in KINDS):
                continue
            if kind == "throughput" and (arm, "serving") in have:  # speed was measured at a server
                continue
            unasked = kind in measure and not measure[kind]
            absent = f"the recipe does not ask for it (measure.{kind})" if unasked else "there is no record"
            why = f"the record cannot be read ({damage})" if damage else absent
            missing.append((f"{kind} of {arm}", f"not measured: {why}"))
    return missing


def _steps(path: Path, missing: list[tuple[str, str]]) -> list[Step]:
    found, broken = _read_steps(path)
    if not found:
        missing.append(("training curve", f"not measured: the run holds no readable {METRICS}"))
    elif broken:
        missing.append((f"{broken} lines of {METRICS}", "they cannot be read"))
    return found


def _read_steps(path: Path) -> tuple[list[Step], int]:
    """One entry a step, and the number of lines that cannot be read; where a resumed run wrote a step again, the later
    line counts."""
    found: dict[int, Step] = {}
    broken = 0
    try:
        lines = [line for _, line in text_lines(path)]
    except OSError:
        lines = []
    for line in lines:
        try:
            raw = strict_json(line, nan_is_null=True)
            step = Step(int(raw["step"]), int(raw["tokens"]), *(_number(raw.get(k)) for k in _CURVES))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            broken += 1
            continue
        found[step.step] = step
    return [found[step] for step in sorted(found)], broken


_CURVES = ("kl", "lr", "tokens_per_s", "val_kl", "val_cross_entropy", "saturated_weight_share", "saturated_input_share")


def _number(value: object) -> float | None:
    """None for null and for what is not a finite number."""
    return float(value) if is_number(value) else None


def _split_texts(run: Path, given: list[Record]) -> list[SplitText]:
    """Calibration, train and validation from the arms, test from the records that were measured on it."""
    found: dict[str, SplitText] = {}
    for path in sorted(run.glob("arms/*/arm.json")):
        facts = _json(path)
        texts, used = facts.get("text"), facts.get("tokens")
        for role, text in texts.items() if isinstance(texts, dict) else ():
            sources = _counts(text.get("sources")) if isinstance(text, dict) else {}
            if sources and role not in found:
                total, counted = sum(sources.values()), text.get("counted")
                spent = used.get(role) if isinstance(used, dict) else None
                found[role] = SplitText(
                    role,
                    sources,
                    counted if isinstance(counted, int) and counted < total else None,
                    spent if isinstance(spent, int) and spent > total else None,
                )
    measured = next((s for s in (_counts(record.settings.get("sources")) for record in given) if s), None)
    if measured:
        found["test"] = SplitText("test", measured)
    return [found[role] for role in ("calibration", "train", "validation", "test") if role in found]


def _counts(value: object) -> dict[str, int]:
    items = value.items() if isinstance(value, dict) else ()
    return {str(name): tokens for name, tokens in items if isinstance(tokens, int)}


def _json(path: Path) -> dict[str, object]:
    try:
        return mapping(strict_json(_text(path)))
    except ValueError:
        return {}


def _manifests(run: Path) -> dict[str, dict[str, object]]:
    found = {}
    for path in sorted({*run.glob(f"*/{MANIFEST}"), *run.glob(f"*/*/{MANIFEST}")}):
        try:
            raw = strict_json(path.read_bytes())
        except (ValueError, OSError):
            continue
        if isinstance(raw, dict):
            found[path.parent.relative_to(run).as_posix()] = raw
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
