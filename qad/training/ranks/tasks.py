"""How ranks that torchrun started work as one command.

    torchrun --nproc-per-node N -m qad run RECIPE

Rank 0 runs the command as one process would, and is the only one to decide, to write manifests and to speak. The others wait, and
come in where `together` calls a function on all ranks; that is training, its calibration and its teacher's cache. So nothing that
is read or found twice can make them part.

Every rank tells torchrun's store each second that it lives, and how far it is. One that dies or hangs makes an exchange of the
others fail; then the first that is left says which it was, and all end. What was saved last is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from qad.errors import QadError, TrainingError, UsageError
from qad.model.loader import default_device
from qad.training.ranks.group import ALONE, Ranks, become, here

_T = TypeVar("_T")
_EVERY = 1.0  # seconds between signs of life
_PATIENCE = 4.0  # seconds without one, after which a rank is taken for gone
_MINUTES = 20.0  # that an exchange waits for the slowest rank
_AGAIN = "The last saved state is kept: start the same command again"
_store: Any = None


def asked() -> tuple[int, int]:
    """Rank of this process, and how many torchrun started; 0 of 1 where it did not."""
    rank, size = (os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if "MASTER_ADDR" not in os.environ or not (rank.isdigit() and size.isdigit()):
        return 0, 1
    return int(rank), int(size)


def _give_back_freed_memory() -> None:
    """Of glibc: it keeps what gathered layers leave behind, .9 GB of a rank of a 135M model. mallopt(3)'s numbers."""
    arenas, mapped_from, trimmed_from = -8, -3, -1
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((arenas, 1), (mapped_from, 1 << 18), (trimmed_from, 1 << 20)):
            mallopt(option, value)


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Within the block this process is one of its job's ranks."""
    global _store
    device, (rank, size) = default_device(), asked()
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {rank} has no GPU of its own ({torch.cuda.device_count()} are here): start fewer ranks a node"
            )
        torch.cuda.set_device(local)
    else:
        _give_back_freed_memory()
    minutes = timedelta(minutes=float(os.environ.get("QAD_RANKS_MINUTES", _MINUTES)))
    _store, rank, size = next(iter(rendezvous("env://", timeout=minutes)))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=_store, rank=rank, world_size=size, timeout=minutes)
    ranks = Ranks(rank, size, device)
    _store.set(f"place/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
    pulse = _Pulse(ranks)
    pulse.start()
    become(ranks)
    try:
        ranks.wait()
        yield ranks
        if ranks.first:
            _announce(None)
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store is gone
            _store.compare_set("ended", "", f"{rank} {_words(error)}")
        raise
    finally:
        become(ALONE)
        pulse.over.set()


def together(function: Callable[..., _T], *args: Any, **own: Any) -> _T:
    """Call a top-level function on all ranks; what it returns to this one, the first. own: arguments that only this one gets.

    Raises TrainingError naming a rank that died, hangs or failed.
    """
    ranks = here()
    if ranks.alone:
        return function(*args, **own)
    _announce((function, args))
    return _explained(lambda: function(*args, **own))


def serve() -> int:
    """What every rank but the first does: what `together` asks for, until the first is done. Returns an exit code."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        task = 0
        while (call := _next_call(task)) is not None:
            task += 1
            function, args = call
            try:
                _explained(functools.partial(function, *args))
            except RankLostError:
                raise
            except QadError as error:  # the first says it, be it its own or this one's
                raise RankLostError(str(error), silent=True) from error
    return 0


_Call = tuple[Callable[..., Any], tuple[Any, ...]]


def _next_call(task: int) -> _Call | None:
    _wait_for(f"task/{task}")
    return _explained(functools.partial(here().of_first, None))


def _announce(call: _Call | None) -> None:
    pickle.dumps(call)  # what cannot travel is a defect, to be seen here and not by the others
    number = _store.add("tasks", 1) - 1
    _store.set(f"task/{number}", "")
    _explained(lambda: here().of_first(call))


def _wait_for(key: str) -> None:
    pause = 0.02
    while not _store.check([key]):
        if _store.check(["ended"]):
            raise RankLostError("another rank ended", silent=True)
        time.sleep(pause)
        pause = min(0.5, pause * 1.2)


class _Pulse(threading.Thread):
    """Signs of life in the store: their number, and how many exchanges the rank has begun."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(daemon=True)
        self._ranks, self._store = ranks, _store.clone()
        self.over = threading.Event()

    def run(self) -> None:
        beat = 0
        while not self.over.wait(_EVERY):
            beat += 1
            with contextlib.suppress(RuntimeError):  # the store goes before the last rank does
                self._store.set(f"beat/{self._ranks.rank}", f"{beat} {self._ranks.calls}")


class RankLostError(TrainingError):
    """Another rank died, hangs or failed. silent: somebody else says so. gone: it lives no more, for sure."""

    def __init__(self, message: str, silent: bool = False, gone: bool = False) -> None:
        super().__init__(message)
        self.silent, self.gone = silent, gone


def _explained(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except QadError:
        raise
    except RuntimeError as error:
        if not _of_exchange(error):
            raise
        raise lost(error) from error


def _of_exchange(error: RuntimeError) -> bool:
    """An exchange failed, not what this rank computes. gloo raises plain RuntimeErrors."""
    signs = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out", "Broken pipe")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def somebody_gone() -> RankLostError | None:
    """Of a signal: whether torchrun sent it because a rank is gone, which this one may have to say."""
    if here().alone:
        return None
    found = lost()
    return found if found.gone else None


def lost(error: BaseException | None = None) -> RankLostError:
    """Which rank is to blame for a failed exchange, in words."""
    ranks = here()
    try:
        deadline, before = time.monotonic() + _PATIENCE, _beats(ranks)
        while time.monotonic() < deadline:
            if _store.check(["ended"]):
                who, _, words = _store.get("ended").decode().partition(" ")
                if who != str(ranks.rank):
                    return RankLostError(f"{_named(int(who), ranks)} failed: {words}", silent=not ranks.first)
            time.sleep(0.2)
        after = _beats(ranks)
    except RuntimeError:
        return RankLostError("torchrun's store is gone: another node or torchrun itself ended. Start the same command again")
    gone = [rank for rank in range(ranks.size) if rank != ranks.rank and after[rank][0] == before[rank][0]]
    speaks = next(rank for rank in range(ranks.size) if rank not in gone) == ranks.rank
    if gone:
        who = " and ".join(_named(rank, ranks) for rank in gone[:4])
        why = "no sign of life: killed, perhaps for memory, stopped, or its machine is gone"
        return RankLostError(f"{who} gave {why}. {_AGAIN}", not speaks, gone=True)
    behind = min(range(ranks.size), key=lambda rank: after[rank][1])
    if after[behind][1] < max(calls for _, calls in after):
        who = _named(behind, ranks)
        return RankLostError(f"{who} hangs: the others waited in vain. {_AGAIN}", not speaks)
    return RankLostError(f"the ranks lost each other ({_words(error)}): start the same command again", not speaks)


def _beats(ranks: Ranks) -> list[tuple[int, int]]:
    found = []
    for rank in range(ranks.size):
        key = f"beat/{rank}"
        beat, calls = _store.get(key).decode().split() if _store.check([key]) else ("0", "0")
        found.append((int(beat), int(calls)))
    return found


def _named(rank: int, ranks: Ranks) -> str:
    place = _store.get(f"place/{rank}").decode() if _store.check([f"place/{rank}"]) else "place unknown"
    return f"rank {rank} of {ranks.size} ({place})"


def _words(error: BaseException | None) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:500]
