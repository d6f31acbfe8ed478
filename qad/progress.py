"""How far something is: a bar on a terminal; elsewhere, in a log, a plain line every half minute, none for what takes less."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

EVERY = 30.0  # seconds between lines


class Progress:
    """A context manager. what: is being done. total: in `unit`, None where nobody knows yet. done: of it, from the start."""

    def __init__(
        self, what: str, total: int | None, unit: str, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self._first, self._clock, self._facts = done, clock, ""
        self._started = self._said = clock()
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            scaled = self.unit not in ("req", "run", "seq")
            self._bar = tqdm(
                desc=self.what,
                total=self.total,
                unit=self.unit,
                unit_scale=scaled,
                initial=self.done,
                mininterval=2.0,
                smoothing=0.1,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._said > self._started and kind is None:
            self._say()

    def update(self, more: int) -> None:
        """So much more is done."""
        self.done += more
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.update(more)
        elif self._clock() - self._said >= EVERY:
            self._say()

    def note(self, facts: dict[str, str]) -> None:
        """What else is to stand there, from now on."""
        if self._bar is not None:
            self._bar.set_postfix(facts, refresh=False)
        self._facts = "".join(f", {name} {value}" for name, value in facts.items())

    def _say(self) -> None:
        self._said = self._clock()
        seconds = self._said - self._started
        rate = (self.done - self._first) / seconds if seconds > 0 else 0.0
        share = f" of {_short(self.total)} {self.unit} ({self.done / self.total:.0%})" if self.total else f" {self.unit}"
        left = f", {tqdm.format_interval((self.total - self.done) / rate)} left" if self.total and rate else ""
        print(
            f"{self.what}: {_short(self.done)}{share}, {_short(rate)} {self.unit}/s{left}{self._facts}",
            file=sys.stderr,
            flush=True,
        )


def _short(number: float) -> str:
    """1234567 -> 1.23M; small whole numbers as they are."""
    return f"{number:g}" if number == int(number) and number < 1000 else tqdm.format_sizeof(number)
