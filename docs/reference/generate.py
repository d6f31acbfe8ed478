"""Pages that are made from the code when the documentation is built: recipe keys, commands, records."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

if typing.TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs; adds the generated pages."""
    from mkdocs.structure.files import File

    pages = {"keys": keys_page(), "commands": commands_page(), "records": records_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def results_table(report: dict[str, Any]) -> str:
    """README's table of results, from report.json of a run."""
    comparison = report["comparison"]
    fidelity, median = comparison["fidelity"], comparison["median_recovery"]
    arms = [arm for arm in ("ptq", "qad") if arm in fidelity]
    rows = [
        ("KL to BF16, nats per token", "0", [_number(fidelity[arm]["kl"], 3) for arm in arms]),
        ("top-1 agreement with BF16", "100 %", [_percent(fidelity[arm]["top1"]) for arm in arms]),
        ("median recovery of 3 small benchmarks", "100 %", [_percent(median[arm]) for arm in arms]),
        ("size on disk", "100 %", [_percent(comparison["memory_ratio"][arm]) for arm in arms]),
    ]
    head = f"| {report['title']} | BF16 | {' | '.join(arm.upper() for arm in arms)} |"
    lines = [f"| {what} | {base} | {' | '.join(cells)} |" for what, base, cells in rows]
    return "\n".join([head, "|---|---|" + "---|" * len(arms), *lines])


def _number(found: dict[str, Any], digits: int) -> str:
    return f"{found['value']:.{digits}f} ({found['low']:.{digits}f}-{found['high']:.{digits}f})"


def _percent(found: dict[str, Any]) -> str:
    value, low, high = (100 * found[name] for name in ("value", "low", "high"))
    return f"{value:.1f} %" if low == high else f"{value:.1f} % ({low:.1f}-{high:.1f})"


def with_results(readme: str, report: dict[str, Any]) -> str:
    """README with its table of results from a report."""
    start, end = readme.index("\n", readme.index("<!-- results")), readme.index("<!-- end of results")
    return f"{readme[:start]}\n\n{results_table(report)}\n\n{readme[end:]}"


def keys_page() -> str:
    from qad.command.planning.keys import keys_markdown, recipe_keys

    intro = "Every key of a recipe, from the models that validate recipes. `qad keys [SECTION]` prints the same."
    return f"# Recipe keys\n\n{intro}\n\n{keys_markdown(recipe_keys())}\n"


def commands_page() -> str:
    from qad.command.cli import _parser

    parser = _parser()
    codes = "0 ok, 1 a negative verdict, 2 usage or input error, 3 inconclusive, 128 + n ended by a signal (130 Ctrl-C)"
    parts = ["# Commands", f"Exit codes of every command: {codes}."]
    for name, sub in _subcommands(parser):
        parts.append(f"## qad {name}\n\n```\n{sub.format_help().strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _subcommands(parser: argparse.ArgumentParser, prefix: str = "") -> list[tuple[str, argparse.ArgumentParser]]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found.append((f"{prefix}{name}", sub))
                found += _subcommands(sub, f"{prefix}{name} ")
    return found


def records_page() -> str:
    from harness.records import record

    parts = [
        "# Records",
        "`RUN/measure/ARM/KIND.json` holds one record: raw values of every item, what has to be equal between arms, the hash of "
        "what was measured. Units are in the names; unknown is null, never 0.",
    ]
    for cls in (record.Record, record.Engine, *typing.get_args(record.Data)):
        parts.append(_data_class(cls))
    return "\n\n".join(parts) + "\n"


def _data_class(cls: Any) -> str:
    rows = [f"| `{field.name}` | `{str(field.type).replace('|', chr(92) + '|')}` |" for field in dataclasses.fields(cls)]
    text = (cls.__doc__ or "").strip().replace("\n    ", "\n")
    return "\n".join([f"## {cls.__name__}", "", text, "", "| field | type |", "|---|---|", *rows])


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    report = json.loads((root / "reports" / "published" / "demo" / "report.json").read_text(encoding="utf-8"))
    readme = root / "README.md"
    readme.write_text(with_results(readme.read_text(encoding="utf-8"), report), encoding="utf-8")
