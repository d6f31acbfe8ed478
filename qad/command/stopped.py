"""SIGTERM and SIGHUP, which a scheduler or a lost terminal sends, end a command as Ctrl-C does: what is whole is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class StoppedError(KeyboardInterrupt):
    """A signal ended the command. Whatever keeps its work at Ctrl-C keeps it here."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block the signals raise StoppedError, but for one that whoever started the command has turned off (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(error: KeyboardInterrupt) -> int:
    """128 + the signal's number, as a shell has it."""
    return 128 + (error.number if isinstance(error, StoppedError) else signal.SIGINT)
