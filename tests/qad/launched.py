"""Processes that are ranks of one job: forked from one that has imported everything, so that a test does not wait for that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PRELOADED = [
    "qad.command.run",
    "qad.training.stages",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "torch.distributed.fsdp",
]


def start(size: int, function: Callable[..., Any], *args: Any, log: Path) -> list[Any]:
    """Ranks that call `function(*args)`; their output goes to log.RANK."""
    log.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=_be, args=(rank, size, port, log, function, args)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    return ranks


def ended(ranks: list[Any], seconds: float = 300.0) -> list[int | None]:
    """Exit codes. As torchrun does, the others are sent SIGTERM once one has failed."""
    deadline = time.monotonic() + seconds
    told = False
    while any(rank.is_alive() for rank in ranks):
        if not told and any(rank.exitcode for rank in ranks):
            told = True
            for rank in ranks:
                if rank.is_alive():
                    os.kill(rank.pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
            raise AssertionError("ranks did not end")
        time.sleep(0.05)
    return [rank.exitcode for rank in ranks]


def command(size: int, *argv: str, log: Path) -> list[int | None]:
    """Exit codes of `qad ARGV` on so many ranks."""
    return ended(start(size, _command, argv, log=log))


def _command(argv: tuple[str, ...]) -> int:
    from qad.command.cli import main

    return main(argv)


def _be(rank: int, size: int, port: int, log: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in settings.items()}, QAD_COMPILE="0", HF_HUB_OFFLINE="1")
    if size == 1:
        del os.environ["MASTER_ADDR"]
    file = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(function(*args))
