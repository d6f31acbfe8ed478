"""This process among those that work together: its number, what it holds of a tensor, what it exchanges with the others.

A process alone is rank 0 of 1, for which nothing here costs anything: every call returns what it was given.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ranks:
    """rank: of this process, 0 leads. size: how many there are. device: where tensors to be exchanged lie.

    calls: exchanges that were begun, equal on all ranks that keep step.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.calls = 0
        self._signal = 0
        self._handlers: dict[int, Any] = {}

    @property
    def first(self) -> bool:
        """The rank that decides, writes and speaks."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def rows(self, length: int) -> slice:
        """Of a tensor's `length` rows, those that this rank holds, as FSDP2 shards them: the last ranks may have none."""
        each = -(-length // self.size)
        return slice(min(self.rank * each, length), min((self.rank + 1) * each, length))

    def part(self, items: Sequence[_T]) -> list[_T | None]:
        """Every size-th item; None behind them, so that all ranks get as many."""
        rounds = -(-len(items) // self.size)
        mine = list(items[self.rank :: self.size])
        return [*mine, *[None] * (rounds - len(mine))]

    def add(self, *values: float) -> list[float]:
        """Sums over all ranks, in FP64."""
        if self.alone:
            return list(values)
        sums = self.summed(torch.tensor(values, dtype=torch.float64))
        return [float(value) for value in sums]

    def summed(self, tensor: Tensor) -> Tensor:
        """Elementwise over all ranks."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """Elementwise over all ranks."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def of_first(self, value: _T) -> _T:
        """What rank 0 has; others give anything."""
        if self.alone:
            return value
        self.calls += 1
        told = [value]
        dist.broadcast_object_list(told, src=0, device=self.device)
        return told[0]

    def wait(self) -> None:
        """Until all ranks are here."""
        self.add(0.0)

    @contextmanager
    def signals_held(self) -> Iterator[None]:
        """Within the block a signal that ends the command waits for `heed`; not of one process, nor outside the main thread."""
        if self.alone or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _ENDING}
        self._handlers = {number: handler for number, handler in before.items() if callable(handler)}
        for number in self._handlers:
            signal.signal(number, self._hold)
        try:
            yield
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers, self._signal = {}, 0

    def heed(self) -> None:
        """Act, on all ranks at this same place, on a signal that any of them was sent within `signals_held`."""
        if self._handlers:
            number = int(self.largest(torch.tensor(float(self._signal))))
            if number:
                self._signal = 0
                self._handlers[number](number, None)

    def _hold(self, number: int, frame: object) -> None:
        self._signal = self._signal or number

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.alone:
            return tensor
        self.calls += 1
        moved = tensor.to(self.device, copy=True)
        dist.all_reduce(moved, op=operation)
        return moved.to(tensor.device)


ALONE = Ranks()
_here = ALONE


def here() -> Ranks:
    """This process among its job's."""
    return _here


def become(ranks: Ranks) -> None:
    """What `here` says from now on."""
    global _here
    _here = ranks
