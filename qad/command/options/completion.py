"""`qad completion SHELL`: a script for a shell, made of the parser by shtab."""

from __future__ import annotations

import argparse
from typing import Any

import shtab

_NO_FILES = {"N", "N,N", "NAME", "KEY=VALUE", "TOKENS", "SECONDS", "BYTES", "URL", "TEXT", "KIND", "KINDS", "SECTION"}


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """shell: bash, zsh or fish. Whatever may be a path is completed as one."""
    _name_files(parser)
    return str(shtab.complete(parser, shell))


def _name_files(parser: argparse.ArgumentParser) -> None:
    action: Any
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                _name_files(sub)
        elif action.choices is None and action.nargs != 0 and action.metavar and action.metavar not in _NO_FILES:
            action.complete = shtab.FILE
