"""A measurement in a process of its own: when the process has ended, its memory is free, whatever an engine holds on to."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec

import torch

from qad.errors import QadError

P = ParamSpec("P")
_MARGIN = 0.05  # of the card's memory that may be missing behind a child: other processes come and go


class ChildError(QadError):
    """A measurement in a process of its own ended without a word."""


def run_apart(function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run a function of a module, with arguments that can be pickled, in a child process and await its end.

    Raises what the function raises, and ChildError where the child dies. Warns where less memory of the GPU is free behind the
    child than before it.
    """
    before = _free()
    spawn = multiprocessing.get_context("spawn")  # a forked child could not use the GPU
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool as error:
            raise ChildError(
                f"the process that ran {function.__name__} was killed, by the system where memory ran out: free some, or "
                "measure less at a time"
            ) from error
        except KeyboardInterrupt:  # which the child has not heard of where it is a signal to this process alone
            for child in multiprocessing.active_children():
                child.terminate()
            raise
    after = _free()
    if before and after and after[0] < before[0] - _MARGIN * before[1]:
        lost = (before[0] - after[0]) / 1e9
        warnings.warn(
            f"{lost:.1f} GB of GPU memory are not free again behind {function.__name__}: something else took them", stacklevel=2
        )


def _free() -> tuple[int, int] | None:
    """Bytes free and in all of the current GPU; None without one."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None
