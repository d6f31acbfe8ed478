"""Exclude entries and targets that others wrote, held against names in bounded time: which of them never come to an end.

A regular expression such as `(.*)*x` takes Python's matcher, which engines use, time without end to refuse a name. It is tried
here first, under a limit of processor time, on every name that a rule will ask about.
"""

from __future__ import annotations

import functools
import re
import signal
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 3.0  # of processor time for one pattern and all names; an ordinary one takes 0.2 microseconds a name
_ALL_SECONDS = 20.0  # for all patterns
_CHARACTERS = 10_000  # of a pattern
_PAIRS = 1_000_000_000  # of patterns and names; the largest published checkpoints come to a tenth


def endless(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """The `re:` patterns that take longer than SECONDS to match or refuse all `names`, and all that is too long, or behind the
    number for which there is time. Limits of time hold in the main thread, as signals do."""
    every = list(dict.fromkeys(patterns))
    most = _PAIRS // max(1, len(names))
    left, found = _ALL_SECONDS, every[most:]
    for pattern in every[:most]:
        if len(pattern) > _CHARACTERS:
            found.append(pattern)
        if len(pattern) > _CHARACTERS or not pattern.startswith("re:"):
            continue
        try:
            with _at_most(min(SECONDS, left)) as used:
                for name in names:
                    matches(pattern[3:], name)
                    matches(pattern[3:], name, whole=True)
        except TimeoutError:
            found.append(pattern)
        left = max(0.01, left - used[0])
    return found


def matches(expression: str, name: str, *, whole: bool = False) -> bool:
    """From the name's start, or all of it. False for what is no regular expression."""
    compiled = _compiled(expression)
    return compiled is not None and (compiled.fullmatch(name) if whole else compiled.match(name)) is not None


@functools.lru_cache(maxsize=1000)
def _compiled(expression: str) -> re.Pattern[str] | None:
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        return None


@contextmanager
def _at_most(seconds: float) -> Iterator[list[float]]:
    """Raises TimeoutError inside the block after so many seconds of this process's time; yields the seconds that it took."""
    used = [0.0]
    if threading.current_thread() is not threading.main_thread():
        yield used
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield used
    finally:
        used[0] = seconds - signal.setitimer(signal.ITIMER_VIRTUAL, 0)[0]
        signal.signal(signal.SIGVTALRM, before)
