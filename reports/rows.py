"""The numbers as flat tables for other programs: RUN/report/tables/NAME.csv and NAME.parquet, the same rows in both.

estimates: every number of the comparison with its interval. items: every item beside BF16's. memory, throughput, training: the
raw values. parity: an engine beside the torch reference, a row a prompt and a row a Linear. Numbers are unrounded. Text in
Parquet is as it was; in CSV it is one visible line that no spreadsheet takes for a formula.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import csv

from harness.records.comparison import Comparison, Estimate
from harness.records.record import PLAIN, Record
from qad.untrusted import clean, utf8
from reports.load import Run
from reports.sections.engine_parity import parity_of
from reports.sections.items import Pair
from reports.sections.outcome import memory_of
from reports.sections.tables import points_of

_FORMULA = ("=", "+", "-", "@")
CSV_LIMIT = 400  # characters of a text
_COLUMNS = {
    "estimates": "quantity arm against benchmark metric filter unit method note value low high n clusters",
    "items": "task filter metric arm doc_hash prompt_hash cluster change repeat bf16 score",
    "memory": "arm class bytes",
    "throughput": "arm phase batch input_tokens output_tokens repeat tokens_per_s",
    "parity": "arm engine version kernel layout verdict module prompt input_tokens output_tokens tokens_equal max_difference "
    "mean_difference mean_kl floor_kl",
    "training": "arm step tokens kl lr tokens_per_s val_kl val_cross_entropy saturated_weight_share saturated_input_share",
}
# What is not named here is text.
_INTEGERS = "n clusters repeat bytes batch input_tokens output_tokens prompt tokens_equal step tokens"
_FLOATS = (
    "value low high bf16 score tokens_per_s max_difference mean_difference mean_kl floor_kl kl lr val_kl val_cross_entropy "
    "saturated_weight_share saturated_input_share"
)
_TYPES = {**dict.fromkeys(_INTEGERS.split(), "Int64"), **dict.fromkeys(_FLOATS.split(), "float64")}


def table_files(comparison: Comparison, records: list[Record], run: Run, pairs: list[Pair]) -> dict[str, bytes]:
    """File name -> contents, two of each table; an empty table has its columns."""
    steps = {"qad": run.steps, **run.other_steps}
    rows = {
        "estimates": list(estimates(comparison)),
        "items": [dataclasses.asdict(pair) for pair in pairs],
        "memory": [
            {"arm": arm, "class": name, "bytes": count}
            for arm, data in memory_of(records).items()
            for name, count in {**data.bytes_by_class, "files": data.file_bytes}.items()
        ],
        "throughput": [
            {**dataclasses.asdict(p), "arm": arm, "repeat": repeat, "tokens_per_s": rate}
            for arm, points in points_of(records).items()
            for p in points
            for repeat, rate in enumerate(p.tokens_per_s)
        ],
        "parity": list(_parity(records)),
        "training": [{"arm": arm, **dataclasses.asdict(step)} for arm, found in steps.items() for step in found],
    }
    files = {}
    for name, entries in rows.items():
        frame = _frame(name, entries)
        files[f"{name}.csv"], files[f"{name}.parquet"] = _csv(frame), frame.to_parquet(index=False, compression="zstd")
    return files


def _parity(records: list[Record]) -> Iterator[dict[str, Any]]:
    """A row a prompt, whose difference is of a log-probability in nats, and a row a Linear, whose is of its largest output."""
    for arm, found in parity_of(records).items():
        engine = found.engine
        facts = {
            "arm": arm,
            "engine": engine.name,
            "version": engine.version,
            "kernel": engine.kernel_path,
            "layout": found.layout or "",
            "verdict": "holds" if found.holds else "fails",
        }
        for number, prompt in enumerate(found.data.prompts):
            yield {**facts, "prompt": number, **dataclasses.asdict(prompt)}
        for layer in found.data.layers:
            yield {**facts, "module": layer.module, "max_difference": layer.max_difference}


def estimates(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """One row an estimate, whatever it is of. unit: share (1 is 100 %), score, nats, ratio, bytes ratio."""

    def row(quantity: str, arm: str, estimate: Estimate | None, unit: str, **more: str) -> Iterator[dict[str, Any]]:
        if estimate is not None:
            facts = dataclasses.asdict(estimate)
            yield {"quantity": quantity, "arm": arm, "unit": unit, "against": "", "benchmark": "", **facts, **more}

    for b in comparison.benchmarks:
        which = {"benchmark": b.task, "metric": b.metric, "filter": b.filter}
        for arm, score in b.score.items():
            yield from row("score", arm, score, "score", **which)
        for name, by_arm in (("recovery", b.recovery), ("recovery_above_chance", b.recovery_above_chance)):
            for arm, recovery in by_arm.items():
                yield from row(name, arm, recovery, "share", against="bf16", **which)
    for arm, median in comparison.median_recovery.items():
        yield from row("median_recovery", arm, median, "share", against="bf16")
    for arm, (label, worst) in comparison.worst.items():
        yield from row("worst_recovery", arm, worst, "share", against="bf16", benchmark=label)
    yield from row("median_gain", "qad", comparison.median_gain, "share", against="ptq")
    for c in comparison.contrasts:
        yield from row("difference", c.arm, c.difference, "score", against=c.against, benchmark=c.benchmark)
    for arm, found in comparison.fidelity.items():
        for name, unit in (("kl", "nats"), ("top1", "share"), ("perplexity", "perplexity"), ("perplexity_ratio", "ratio")):
            yield from row(name, arm, getattr(found, name), unit, against="bf16" if name != "perplexity" else "")
    yield from row("kl_ratio", "qad", comparison.kl_ratio, "ratio", against="ptq")
    yield from row("kl_ratio", "qad", comparison.kl_ratio_plain, "ratio", against=PLAIN)
    yield from row("perplexity_gap_closed", "qad", comparison.perplexity_gap_closed, "share", against="ptq")
    for arm, ratios in comparison.throughput_ratio.items():
        for phase, ratio in ratios.items():
            yield from row("speed_ratio", arm, ratio, "ratio", against="bf16", benchmark=phase)
    for arm, ratio in comparison.memory_ratio.items():
        yield from row("size_ratio", arm, ratio, "ratio", against="bf16")
    for arm, share in comparison.failure_share.items():
        yield from row("failure_share", arm, share, "share")


def numbers_by_name(comparison: Comparison) -> dict[str, float]:
    """recovery/qad/TASK -> value: the estimates for a tracker, which knows names and numbers only."""
    names = ("quantity", "arm", "benchmark", "filter")
    return {
        "/".join(clean(row[name], 60) for name in names if row.get(name) not in (None, "", "none")): row["value"]
        for row in estimates(comparison)
        if row["quantity"] != "difference"
    }


def _frame(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The same columns and types whatever the rows hold, none included. A missing text is empty; a lone surrogate, which a broken
    answer may hold, is no UTF-8."""
    columns = {}
    for column in _COLUMNS[name].split():
        found = [row.get(column) if column in _TYPES else utf8(str(row.get(column, ""))) for row in rows]
        columns[column] = pd.Series(found, dtype=_TYPES.get(column, "string"))
    return pd.DataFrame(columns)


def _csv(frame: pd.DataFrame) -> bytes:
    texts: pd.DataFrame = frame.select_dtypes("string").map(_plain_line)
    out = io.BytesIO()
    csv.write_csv(pa.Table.from_pandas(frame.assign(**texts), preserve_index=False), out)
    return out.getvalue()


def _plain_line(text: str) -> str:
    shown = clean(text, CSV_LIMIT)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown
