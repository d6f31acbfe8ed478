"""What the command prints: the one place through which a line reaches the terminal, so that nothing foreign in it acts there."""

from __future__ import annotations

import sys

from qad.untrusted import clean

_LONGEST = 4000  # characters of an error or a warning


def say(text: str) -> None:
    """A result, on standard output, whole."""
    print(clean(text, None, lines=True), flush=True)


def tell(text: str) -> None:
    """An error, a warning or what is being done, on standard error, of bounded length."""
    print(clean(text, _LONGEST, lines=True), file=sys.stderr)
