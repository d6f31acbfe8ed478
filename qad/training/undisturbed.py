"""Signals that end a command wait until a step is whole, so that its state can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Lift = Callable[[], AbstractContextManager[None]]


@contextmanager
def undisturbed() -> Iterator[Lift]:
    """Hold SIGINT, SIGTERM and SIGHUP back; the first one acts at the end of the block. Yields `lifted`, within which signals act
    at once, one that waits included: for what may take minutes. Outside the main thread nothing is held back."""
    waiting: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    main = threading.current_thread() is threading.main_thread()
    acting = {number: handler for number, handler in handlers.items() if main and callable(handler)}

    def hold() -> None:
        for number in acting:
            signal.signal(number, lambda number, _frame: waiting.append(number))

    def let() -> None:
        for number, handler in acting.items():
            signal.signal(number, handler)
        if waiting:
            first = waiting[0]
            waiting.clear()
            acting[signal.Signals(first)](first, None)

    @contextmanager
    def lifted() -> Iterator[None]:
        let()
        try:
            yield
        finally:
            hold()

    hold()
    try:
        yield lifted
    finally:
        let()
