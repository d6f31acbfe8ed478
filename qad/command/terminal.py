"""What the command prints: the one place through which a line reaches the terminal, so that nothing foreign in it acts there."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from qad.untrusted import clean

_LONGEST = 4000  # characters of an error or a warning


def say(text: str) -> None:
    """A result, on standard output, whole."""
    print(clean(text, None, lines=True), flush=True)


def tell(text: str) -> None:
    """An error, a warning or what is being done, on standard error, of bounded length."""
    print(clean(text, _LONGEST, lines=True), file=sys.stderr)


def forget_output() -> None:
    """What standard output has no room or no reader for is not tried again at the end of the process."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quiet_third_parties() -> None:
    """Warnings become one line; libraries log errors only. Their own environment variables still win."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # torchao's GPU kernels that a CPU cannot load, and what torch thinks of it; matplotlib's first list of fonts.
    for name in ("torchao", "torch.utils._pytree", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if filename.startswith(str(Path(__file__).parents[1])) or category is UserWarning:
            tell(f"warning: {message}")

    warnings.showwarning = show
