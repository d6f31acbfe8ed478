"""RUN/report/{report.html,report.md,report.json} from a comparison, its records and the run folder.

A pure function of those: no clock, no randomness, no path of the machine; two renders give the same bytes.
"""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from harness import comparison as comparisons
from harness import records as record_types
from harness import verdict as verdicts
from harness.comparison import Comparison
from harness.records import Record
from harness.verdict import Verdict
from reports import origin
from reports.document import document
from reports.load import Run, load_run
from reports.parts import Document
from reports.tables import memory_of, points_of

SCHEMA_VERSION = 1
# Everything Markdown or HTML could take for markup.
_MARKUP = re.compile(r"([\\`*_\[\]<>#|&~$])")
_NUMBER = re.compile(r"\d[\d.,]* (?:%|GB|nats)(?: \([\d.,–−to ]+\))?")
_BLOCK_START = re.compile(r"^(\d*)([-+=.)])(?=\s|[-=]|$)")


def render(run: Path, comparison: Comparison, records: list[Record], verdict: Verdict | None = None) -> list[Path]:
    """Write the three files (each aside, then renamed) and return their paths: HTML, Markdown, JSON.

    verdict: what harness.gate says of the comparison, shown first; None where there was nothing to judge.
    """
    records = origin.ordered(records)
    loaded = load_run(run, records)
    contents = document(loaded, comparison, records, verdict)
    texts = {
        "report.html": html(contents),
        "report.md": markdown(contents),
        "report.json": _json(contents, comparison, records, loaded, verdict),
    }
    folder = run / "report"
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(folder / name)
        written.append(folder / name)
    return written


def html(contents: Document) -> str:
    """One self-contained page: no script, nothing loaded; every string escaped by jinja2."""
    return _environment(autoescape=True).get_template("report.html.j2").render(doc=contents) + "\n"


def markdown(contents: Document) -> str:
    """The same tables and sentences. Figures are in the HTML; their numbers are in the tables."""
    text = _environment(autoescape=False).get_template("report.md.j2").render(doc=contents)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@functools.cache
def _environment(*, autoescape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"), autoescape=autoescape, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["unbroken"] = _unbroken
    environment.filters["md"] = markdown_text
    environment.filters["fence"] = _fence
    return environment


def _unbroken(text: str) -> Markup:
    """Escaped HTML in which a number stays on one line with its unit and interval."""
    return Markup(_NUMBER.sub(r'<span class="value">\g<0></span>', str(escape(text))))


def markdown_text(text: str) -> str:
    """Plain text on one line, with nothing left that Markdown or HTML would interpret."""
    escaped = _MARKUP.sub(r"\\\1", " ".join(text.split()))
    return _BLOCK_START.sub(r"\1\\\2", escaped.replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;"))


def _fence(text: str) -> str:
    """A fence longer than any run of backticks in the text."""
    return "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))


def _json(contents: Document, comparison: Comparison, records: list[Record], run: Run, verdict: Verdict | None) -> str:
    """The numbers unrounded, for programs."""
    value = {
        "schema_version": SCHEMA_VERSION,
        "title": contents.title,
        "verdict": verdicts.to_json(verdict) if verdict else None,
        "outcome": contents.outcome,
        "banners": [dataclasses.asdict(banner) for banner in contents.banners],
        "comparison": comparisons.to_json(comparison),
        "memory": {
            arm: {**dataclasses.asdict(data), "effective_bits": _bits(data), "quantized_share": _share(data)}
            for arm, data in memory_of(records).items()
        },
        "throughput": {arm: [dataclasses.asdict(p) for p in points] for arm, points in points_of(records).items()},
        "training": [dataclasses.asdict(step) for step in run.steps],
        "not_measured": [{"what": what, "why": why} for what, why in run.missing],
        "recipe": run.recipe,
        "text": [dataclasses.asdict(split) for split in run.text],
        "records": [_record(record) for record in records],
        "manifests": run.manifests,
    }
    return json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"


def _record(record: Record) -> dict[str, Any]:
    """A record without its data, and its hash."""
    facts = record_types.to_json(record)
    return {"sha256": origin.record_hash(record), **{key: value for key, value in facts.items() if key != "data"}}


def _bits(data: record_types.MemoryData) -> float | None:
    return data.effective_bits if data.parameters else None


def _share(data: record_types.MemoryData) -> float | None:
    return data.quantized_share if data.parameters else None


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not a number is null."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
