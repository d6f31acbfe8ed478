"""Pages that are made from the code when the documentation is built: recipe keys, commands, records, Python; and the studies."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
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

    pages = {"keys": keys_page(), "commands": commands_page(), "records": records_page(), "python": python_page()}
    pages["studies"] = (Path(config.docs_dir).parent / "reports/published/studies/result.md").read_text(encoding="utf-8")
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def results_table(report: dict[str, Any]) -> str:
    """README's table of results, from report.json of a run."""
    from harness.records.record import arm_label

    comparison = report["comparison"]
    fidelity, median = comparison["fidelity"], comparison["median_recovery"]
    arms = [arm for arm in ("ptq_plain", "ptq", "qad") if arm in fidelity]
    rows = [
        ("KL to BF16, nats per token", "0", [_number(fidelity[arm]["kl"], 3) for arm in arms]),
        ("top-1 agreement with BF16", "100 %", [_percent(fidelity[arm]["top1"]) for arm in arms]),
        ("median recovery of 3 small benchmarks", "100 %", [_percent(median[arm]) for arm in arms]),
        ("size on disk", "100 %", [_percent(comparison["memory_ratio"][arm]) for arm in arms]),
    ]
    head = f"| {report['title']} | BF16 | {' | '.join(map(arm_label, arms))} |"
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


_PYTHON = """# Python

```python
import qad

found = qad.run("recipe.yaml", "runs/mine")      # or validate, compare
found.verdict                                    # outcome, reason, next_action
found.estimates.query("quantity == 'recovery'")  # a pandas DataFrame
found.training.plot(x="step", y=["kl", "val_kl"])
```

These are the functions behind the commands; nothing heavy is imported before one is called. What was done wrong is a
`qad.errors.QadError` whose message holds the remedy. A `Place` is a path, as text or `pathlib.Path`; `say` is given every line
that the command would print, and prints by itself. `import qad.hf` is for other tools:
[Serve, and debug without a GPU](../guides/serve.md)."""


def python_page() -> str:
    """The names of `qad.__all__`, with signature and docstring."""
    import qad

    parts = [_PYTHON]
    for name in ("load_recipe", "plan", "run", "check", "validate", "compare", "gate"):
        function = getattr(qad, name)
        given = list(inspect.signature(function).parameters.values())
        lines = [f"    {_parameter(p)},\n" for p in given]
        if by_name := [place for place, p in enumerate(given) if p.kind is p.KEYWORD_ONLY]:
            lines.insert(by_name[0], "    *,\n")
        returns = inspect.signature(function).return_annotation
        signature = f"{name}(\n{''.join(lines)}) -> {returns}"
        parts.append(f"## qad.{name}\n\n```python\n{signature}\n```\n\n{_prose(function)}")
    members = [(name, value) for name, value in vars(qad.Results).items() if isinstance(value, property)]
    rows = [
        f"| `.{name}` | `{value.fget.__annotations__['return'].partition(' |')[0]}` | {_prose(value.fget)} |"
        for name, value in members
    ]
    parts.append("\n".join([f"## qad.Results\n\n{_prose(qad.Results)}\n", "| | | |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _parameter(found: inspect.Parameter) -> str:
    default = "print" if found.default is print else repr(found.default)
    return f"{found.name}: {found.annotation}" + ("" if found.default is found.empty else f" = {default}")


def _prose(documented: Any) -> str:
    """A docstring as Markdown: one field a line."""
    head, _, fields = (inspect.getdoc(documented) or "").partition("\n\n")
    listed = "\n".join(f"- `{line.partition(': ')[0]}`: {line.partition(': ')[2]}" for line in fields.splitlines())
    return f"{' '.join(head.split())}\n\n{listed}".strip()


def _data_class(cls: Any) -> str:
    rows = [f"| `{field.name}` | `{str(field.type).replace('|', chr(92) + '|')}` |" for field in dataclasses.fields(cls)]
    text = (cls.__doc__ or "").strip().replace("\n    ", "\n")
    return "\n".join([f"## {cls.__name__}", "", text, "", "| field | type |", "|---|---|", *rows])


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    report = json.loads((root / "reports" / "published" / "demo" / "report.json").read_text(encoding="utf-8"))
    readme = root / "README.md"
    readme.write_text(with_results(readme.read_text(encoding="utf-8"), report), encoding="utf-8")
