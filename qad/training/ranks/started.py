"""Commands at which several ranks work, started by torchrun. Imported when the command line starts: no torch above."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from qad.errors import UsageError


def several_ranks() -> bool:
    """Whether torchrun, or what sets its variables, started more than this process."""
    return "MASTER_ADDR" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def is_first() -> bool:
    """The one of several that speaks."""
    return os.environ.get("RANK", "0") == "0"


def on_ranks(command: Callable[[argparse.Namespace], int], args: argparse.Namespace, may_share: bool) -> int:
    """Run the command, or take part where another rank runs it; its exit code. Raises UsageError for what one process does."""
    if not several_ranks():
        return command(args)
    if not may_share:
        if is_first():
            raise UsageError("several ranks work at qad run, train and ptq only: start this command without torchrun")
        return 2
    from qad.training.ranks.tasks import joined, serve, somebody_gone

    with joined() as ranks:
        try:
            return command(args) if ranks.first else serve()
        except KeyboardInterrupt:
            gone = somebody_gone()
            if gone is not None:
                raise gone from None
            raise
