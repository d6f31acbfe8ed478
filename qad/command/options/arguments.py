"""Types of command line arguments: what is no path or count is refused before anything is read."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from qad.untrusted import clean

_DIGITS = 18  # of any number


def path(text: str) -> Path:
    """An empty string, often an unset variable of a shell, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty string")
    return Path(text)


def text(given: str) -> str:
    """A string that is not empty."""
    if not given:
        raise argparse.ArgumentTypeError("expected a value, got an empty string")
    return given


def count(given: str) -> int:
    """A whole number, 1 or more."""
    return _whole(given, 1)


def unsigned(given: str) -> int:
    """A whole number, 0 or more."""
    return _whole(given, 0)


def seed(given: str) -> int:
    """A whole number that every generator takes."""
    value = _whole(given, 0)
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**32, got {value}")
    return value


def counts(given: str) -> list[int]:
    """Whole numbers of 1 or more, separated by commas."""
    return [count(part) for part in given.split(",")]


def share(given: str) -> float:
    """A number between 0 and 1, without both."""
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1, such as 0.01, got {given!r}")
    return value


def _whole(given: str, least: int) -> int:
    if not given.strip().isdecimal() or len(given) > _DIGITS or int(given) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more, got {clean(given)!r}")
    return int(given)
