"""Pages that are made from the code when the documentation is built: recipe keys, commands, records."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs; adds the generated pages."""
    pages = {"keys": keys_page(), "commands": commands_page(), "records": records_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def keys_page() -> str:
    from qad.command.keys import keys_markdown, recipe_keys

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
    rows = [
        f"| `{field.name}` | `{str(field.type).replace('|', chr(92) + '|')}` |" for field in dataclasses.fields(cls)
    ]
    text = (cls.__doc__ or "").strip().replace("\n    ", "\n")
    return "\n".join([f"## {cls.__name__}", "", text, "", "| field | type |", "|---|---|", *rows])
