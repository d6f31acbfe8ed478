"""What a chat template reads when it asks for the time (`strftime_now`): one instant a run, so that text is the same tomorrow.

transformers tells templates the machine's time, and takes no function in its place: inside `template_clock(instant)` its
clock stands still, for whoever renders, lm-eval included. Outside of it the machine's clock counts, as in serving.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_instant: datetime.datetime | None = None


@contextmanager
def template_clock(time: datetime.datetime | None) -> Iterator[None]:
    """None: the machine's clock."""
    global _instant
    if time is None:
        yield
        return
    from transformers.utils import chat_template_utils

    now = time

    class StoppedClock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:  # type: ignore[override]
            return now

    before, clock = _instant, chat_template_utils.datetime
    _instant, chat_template_utils.datetime = time, StoppedClock
    try:
        yield
    finally:
        _instant, chat_template_utils.datetime = before, clock


def instant() -> datetime.datetime | None:
    """The one that templates see here; None: the machine's clock."""
    return _instant


def reads_clock(tokenizer: Any) -> bool:
    """True where the chat template, or one of several, asks for the time."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None) or "")
