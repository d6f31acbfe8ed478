"""An event loop in a thread of its own, for a server beside code that waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def loop_in_a_thread(name: str) -> Iterator[asyncio.AbstractEventLoop]:
    """It runs until the block ends; `asyncio.run_coroutine_threadsafe` takes it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
