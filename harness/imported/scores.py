"""Scores made elsewhere -> records, with their source named: CSV tables, lm-eval result folders, NeMo Evaluator runs.

CSV             benchmark,bf16,ptq,qad or benchmark,arm,score: printed means, without items. Further columns, all
                optional: metric, items, repeats, stderr, maximum (of the score; 100 where the file holds anything
                above 1, else 1), higher_is_better (true or false), chance, and settings that must be equal between
                arms: n_shot, version, filter, limit, template, seed, temperature, top_p, max_tokens, and in a table
                with the column score any other name. Lines `# source: ...` and `# model: ...` come first.
lm-eval         a folder with results_DATE.json, and samples_TASK_DATE.jsonl where --log_samples was given: with
                samples, items that are paired; without, printed means with their standard error.
NeMo Evaluator  results.jsonl, or a folder of BENCHMARK/results.jsonl: one line a problem and repeat.
load tools      result files of vLLM bench, SGLang, AIPerf, GuideLLM, trtllm-bench: speed, see harness.imported.load_tools.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.imported.lm_eval import LOWER_IS_BETTER, lm_eval_records
from harness.imported.load_tools import import_results, is_load_result
from harness.imported.stamp import MODEL, imported_record
from harness.records.record import AccuracyData, Item, PublishedScore, Record, ScoresData, TaskScore
from qad.artifact import digest_of
from qad.errors import DataError
from qad.untrusted import clean, count, is_number, json_lines

_CSV_FACTS = ("benchmark", "arm", "score", "metric", "items", "repeats", "stderr", "maximum", "higher_is_better", "chance")
_YES, _NO = ("", "true", "yes", "1", "-"), ("false", "no", "0")
_SETTINGS = ("n_shot", "version", "filter", "limit", "template", "seed", "temperature", "top_p", "max_tokens")


def read_imported(path: Path, arm: str) -> list[Record] | None:
    """Records of a file or folder in one of the formats above; None where it is none of them.

    arm: its name, where the file does not name its arms itself. Raises DataError for a damaged file.
    """
    if path.suffix.lower() == ".csv" and path.is_file():
        return _csv_records(path, arm)
    if path.is_file() and is_load_result(path):
        return [serving_record(path, arm)]
    if path.suffix.lower() == ".jsonl" and path.is_file():
        return [_nemo_record([path], path.parent.name or path.stem, path, arm)]
    if not path.is_dir():
        return None
    results = sorted(path.rglob("results_*.json"))
    if results:
        return lm_eval_records(results, path, arm)
    bundles = sorted(path.rglob("results.jsonl"))
    return [_nemo_record(bundles, "", path, arm)] if bundles else None


def serving_record(path: Path, arm: str, tool: str | None = None, concurrency: int | None = None) -> Record:
    """A load tool's result file. tool, concurrency: see `import_results`, which also says what is raised."""
    data, found = import_results(path, tool, concurrency)
    return imported_record(arm, data, {}, found, [path], f"a result file of {data.driver}", path.name, MODEL)


# --- CSV -----------------------------------------------------------------------------------------


def _csv_records(path: Path, arm: str) -> list[Record]:
    source, model, rows = _csv_rows(path)
    header = list(rows[0])
    wide = "score" not in header
    arms = [n for n in header if n not in (*_CSV_FACTS, *_SETTINGS)] if wide else []
    if "benchmark" not in header or (wide and not arms):
        raise DataError(
            f"{path} has the columns {clean(', '.join(header), 200)}: give benchmark and one column an arm, or benchmark and "
            "score"
        )
    scores: dict[str, dict[tuple[str, str, str], PublishedScore]] = {}
    cells = [(line, row, name) for line, row in enumerate(rows, 1) for name in (arms or [row.get("arm") or arm])]
    values = [_number(path, line, row, name if wide else "score") for line, row, name in cells]
    maximum = _unit(
        path,
        [
            (line, row, name if wide else "score", value)
            for (line, row, name), value in zip(cells, values, strict=True)
            if value is not None
        ],
    )
    for (line, row, name), value in zip(cells, values, strict=True):
        if value is not None:
            score = _printed(path, line, row, value, maximum)
            mine, key = scores.setdefault(name, {}), (score.task, score.filter, score.metric)
            if key in mine:
                raise DataError(f"{path}, row {line}: {score.task} of {name} is there already: leave one of the two out")
            mine[key] = score
    if not scores:
        raise DataError(f"{path} holds no score: fill its score columns")
    return [
        imported_record(name, ScoresData(source, [*entries.values()]), {}, "imported", [path], "a CSV table", source, model)
        for name, entries in scores.items()
    ]


def _unit(path: Path, cells: list[tuple[int, dict[str, str], str, float]]) -> float:
    """Largest score of the table: 100 where a score is above 1 or is written with %, else 1. Rows that name their own maximum,
    and those where lower is better, say nothing. Raises DataError for a row of the other unit."""
    free = [cell for cell in cells if not cell[1].get("maximum") and not _lower(cell[1])]
    percent = any(value > 1 or row[name].endswith("%") for _, row, name, value in free)
    for line, row, name, value in free:
        if percent and 0 < value <= 1 and not row[name].endswith("%"):
            raise DataError(
                f"{path}, row {line}: {clean(name)} of {clean(row['benchmark'])} is {clean(row[name])} in a table of percent: "
                "write all scores in one unit, or give that row its maximum in a column of that name"
            )
    return 100.0 if percent else 1.0


def _lower(row: dict[str, str]) -> bool:
    told = row.get("higher_is_better", "").lower()
    return told in _NO if told else row.get("metric", "").lower() in LOWER_IS_BETTER


def _csv_rows(path: Path) -> tuple[str, str, list[dict[str, str]]]:
    """Source, model, and rows with lower-case column names."""
    try:
        lines = list(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""))
        found = [re.match(r"#\s*(source|model)\s*:\s*(.+?)\s*$", line) for line in lines]
        body = [line for line in lines if line.strip() and not line.startswith("#")]
        header, *entries = csv.reader(body, skipinitialspace=True, strict=True)
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):
            raise DataError(f"{path} cannot be read ({clean(error, 200)}): save it as UTF-8 text") from error
        raise DataError(f"{path} has no rows: give a header line and one line a benchmark") from error
    except (OSError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read as a CSV table ({clean(error, 200)}): save it as UTF-8 text, one line a benchmark"
        ) from error
    columns = [name.strip().lower() for name in header]
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {clean(twice)!r}: leave one of them out")
    for line, entry in enumerate(entries, 1):
        if len(entry) > len(columns):
            raise DataError(f"{path}, row {line} has {len(entry)} cells, the header {len(columns)}: quote what holds commas")
    if not entries:
        raise DataError(f"{path} has no rows: give a header line and one line a benchmark")
    notes = {match[1]: match[2] for match in found if match}
    rows = [dict(itertools.zip_longest(columns, (cell.strip() for cell in entry), fillvalue="")) for entry in entries]
    for line, row in enumerate(rows, 1):
        if (said := row.get("higher_is_better", "").lower()) not in (*_YES, *_NO):
            raise DataError(f"{path}, row {line}: higher_is_better is {clean(said)!r}: write true or false")
    return notes.get("source", path.name), notes.get("model", MODEL), rows


def _printed(path: Path, line: int, row: dict[str, str], value: float, maximum: float) -> PublishedScore:
    lower = _lower(row)
    items, repeats, stderr = (_number(path, line, row, name, least) for name, least in _LEAST.items())
    others = (name for name in row if "score" in row and name not in (*_CSV_FACTS, *_SETTINGS))
    settings: dict[str, Any] = {name: row[name] for name in (*_SETTINGS, *others) if row.get(name)}
    for name in ("n_shot", "limit"):
        if name in settings:
            settings[name] = int(_number(path, line, row, name) or 0)
    largest = _number(path, line, row, "maximum", 0) or (1.0 if lower else maximum)
    if not lower and value > largest:
        raise DataError(
            f"{path}, row {line}: {clean(row['benchmark'])} scores {value:g}, above {largest:g}: give the largest possible "
            "score in a column maximum"
        )
    chance = _number(path, line, row, "chance")
    told = f"{path}, row {line}: {clean(row['benchmark'])} scores {value:g} of {largest:g}"
    if largest == 100 and chance is not None and 0 < chance <= 1:
        raise DataError(f"{told}, and chance is {chance:g}: write both in percent")
    if stderr and not lower and items is None and not row.get("maximum") and 0 < value < largest:
        taken = value * (largest - value) / stderr**2
        if taken < 1 or (largest == 100 and taken > _MOST_ITEMS):
            raise DataError(
                f"{told} with a standard error of {stderr:g}, which {taken:.3g} items would have: write both in one unit, "
                "or give items"
            )
    return PublishedScore(
        task=row["benchmark"],
        metric=row.get("metric") or "score",
        value=value,
        maximum=largest,
        higher_is_better=not lower,
        chance=chance,
        items=None if items is None else int(items),
        repeats=None if repeats is None else int(repeats),
        stderr=stderr,
        filter=settings.pop("filter", "none"),
        settings=settings,
    )


_LEAST = {"items": 1, "repeats": 1, "stderr": 0}
_MOST_ITEMS = 5e6  # of a benchmark, answers of all repeats counted; also what a standard error may stand for


def _number(path: Path, line: int, row: dict[str, str], name: str, least: float = -math.inf) -> float | None:
    """None for an empty cell, "-" and "n/a"; NaN is kept out of records, so it is no score either."""
    text = row.get(name, "").removesuffix("%").strip()
    if text.lower() in ("", "-", "n/a", "na", "nan"):
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise DataError(f"{path}, row {line}: {clean(name)} is {clean(text)!r}, expected a number") from error
    if not math.isfinite(value) or value < least or (name in ("items", "repeats") and value > 1e12):
        allowed = "a finite number" if math.isinf(least) else f"{least} or more, below 1e12"
        raise DataError(f"{path}, row {line}: {clean(name)} is {clean(text)!r}, expected {allowed}")
    return value


# --- NeMo Evaluator ------------------------------------------------------------------------------


def _nemo_record(files: list[Path], name: str, path: Path, arm: str) -> Record:
    tasks = []
    for file in files:
        task = name or file.parent.relative_to(path).as_posix()
        tasks.append(_nemo_task(file, path.name if task == "." else task))
    source = f"NeMo Evaluator, {path.name}"
    return imported_record(arm, AccuracyData(tasks), {}, "NeMo Evaluator", files, "NeMo Evaluator results", source, MODEL)


def _nemo_task(file: Path, task: str) -> TaskScore:
    rows = sorted(_nemo_rows(file), key=lambda row: (str(row["problem_idx"]), int(row.get("repeat") or 0)))
    items, seen = [], set()
    for row in rows:
        problem = str(row["problem_idx"])
        repeat = row.get("repeat") or 0
        if (problem, repeat) in seen:
            raise DataError(f"{file} holds problem {clean(problem)}, repeat {repeat}, twice: give the file of one run")
        seen.add((problem, repeat))
        target = digest_of(row["expected_answer"]) if row.get("expected_answer") is not None else ""
        items.append(Item(problem, "", target, problem, float(row["reward"])))
    return TaskScore(
        task=task,
        version="",
        metric="reward",
        filter="none",
        n_shot=None,
        higher_is_better=True,
        chance=None,
        limit=None,
        items=items,
    )


def _nemo_rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        for line, row in json_lines(file, nan_is_null=True):
            try:
                reward = row["reward"]
                if row["problem_idx"] is None or count(row.get("repeat") or 0) is None or not is_number(reward + 0.0):
                    raise ValueError(f"reward is {reward}, repeat {row.get('repeat')}")
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(f"line {line} is no result of NeMo Evaluator (problem_idx, reward): {error}") from error
            yield row
    except (OSError, ValueError) as error:
        raise DataError(f"{file}, {clean(error, 300)}: give a result file of NeMo Evaluator") from error
