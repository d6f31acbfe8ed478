"""RUN/report/{report.html,report.md,report.json,tables/*} from a comparison, its records and the run folder.

A pure function of those: no clock, no randomness, no path of the machine; two renders give the same bytes.
"""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from harness.records.comparison import Comparison
from harness.records.record import Record
from harness.records.verdict import Verdict
from qad.place import write_whole
from qad.untrusted import markdown_text
from reports.contents import contents
from reports.document import document
from reports.load import load_run
from reports.parts import Document
from reports.rows import table_files
from reports.sections import items, origin, seeds
from reports.sections.missing import not_measured

_NUMBER = re.compile(r"[-+−]?\d[\d.,]* (?:%|GB|nats|points)(?: \([\d.,–−+to -]+\))?")


def render(run: Path, comparison: Comparison, records: list[Record], verdict: Verdict | None = None) -> list[Path]:
    """Write HTML, Markdown, JSON and tables (each aside, then renamed) and return their paths, in that order.

    records: the arms', and controls (second measurements, for the noise floor). verdict: what harness.compare.gate says of the
    comparison, shown first; None where there was nothing to judge.
    """
    every = origin.ordered(records)
    controls = [record for record in every if record.control is not None]
    records, further = seeds.first_and_further(comparison, [record for record in every if record.control is None])
    loaded = load_run(run, records)
    pairs = items.pairs(records)
    missing = not_measured(loaded, comparison, records)
    changed = items.on_page(run, comparison, pairs)
    others = [*further, *controls]
    page = document(loaded, comparison, records, others, verdict, changed, missing)
    raw = contents(page, comparison, records, others, loaded, verdict, pairs, missing)
    files = {
        "report.html": html(page).encode(),
        "report.md": markdown(page).encode(),
        "report.json": (json.dumps(raw, indent=1, allow_nan=False) + "\n").encode(),
    }
    files |= {f"tables/{name}": found for name, found in table_files(comparison, records, loaded, pairs).items()}
    folder = run / "report"
    for name, found in files.items():
        write_whole(folder / name, found)
    return [folder / name for name in files]


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
        loader=jinja2.PackageLoader("reports"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    environment.filters["md"] = markdown_text
    environment.filters["fence"] = _fence
    return environment


def _unbroken(text: str) -> Markup:
    """Escaped HTML in which a number stays on one line with its unit and interval."""
    return Markup(_NUMBER.sub(r'<span class="unbroken">\g<0></span>', str(escape(text))))


def _fence(text: str) -> str:
    """A fence longer than any run of backticks in the text."""
    return "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
