"""Processes that are ranks of one job: forked from one that has imported everything, so that a test does not wait for that."""

from __future__ import annotations

import multiprocessing
import os
import signal
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

_STORES: list[Any] = []


def start(size: int, function: Callable[..., Any], *args: Any, log: Path) -> list[Any]:
    """Ranks that call `function(*args)`; their output goes to log.RANK."""
    log.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun does, it outlives any rank
    _STORES.append(store)
    port = store.port
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


def start_command(size: int, *argv: str, log: Path) -> list[Any]:
    """Ranks of `qad ARGV`."""
    return start(size, _command, argv, log=log)


def _command(argv: tuple[str, ...]) -> int:
    from qad.command.cli import main

    return main(argv)


def deployed_is_the_export(ptq: Path) -> int:
    """On every rank: 1 where a value that a student deploys is not that of its whole masters by `fake_quantize_group`."""
    import torch
    import torch.distributed as dist

    from qad.arms.arm import open_arm
    from qad.numerics.groups import fake_quantize_group
    from qad.training.ranks.shards import own_rows, skeleton
    from qad.training.ranks.tasks import joined, serve
    from qad.training.student import Student

    with joined() as ranks, torch.no_grad():
        arm = open_arm(ptq)
        student = Student(arm, skeleton(arm.source, "bfloat16", ranks), None, "bfloat16")
        whole, deployed = {}, {}
        for seed, (name, master) in enumerate(student.masters.items()):
            shape = student.lengths[name], *master.shape[1:]
            whole[name] = 0.05 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
            master.copy_(whole[name][ranks.rows(len(whole[name]))])
        student.deploy()
        for name, parameter in student.model.named_parameters():
            rows: list[Any] = [None] * ranks.size
            dist.all_gather_object(rows, own_rows(parameter.detach()).clone())
            deployed[name] = torch.cat(rows)
        assert arm.selection is not None
        weights, values = student.stored.of(whole), student.stored.of(deployed)
        expected = {name: weight.bfloat16() for name, weight in weights.items()}
        for group in arm.selection.groups:
            frozen = {module: scales.to_nearest for module, scales in arm.frozen_scales(group).items()}
            members = {module: weights[f"{module}.weight"] for module in group}
            for module, value in fake_quantize_group(members, frozen, arm.selection.format_of(group[0])):
                expected[f"{module}.weight"] = value
        if not ranks.first:
            serve()
        return int(any(not torch.equal(values[name].float(), value.float()) for name, value in expected.items()))


def _exchange_without_rank_1() -> None:
    from qad.training.ranks.group import here

    if here().rank == 1:
        time.sleep(600)
    here().wait()


def rank_1_hangs() -> int:
    """On every rank: an exchange for which the others wait six seconds. Says what ends it."""
    from qad.errors import QadError
    from qad.training.ranks.tasks import joined, serve, together

    os.environ["QAD_RANKS_MINUTES"] = "0.1"
    try:
        with joined() as ranks:
            return together(_exchange_without_rank_1) or 0 if ranks.first else serve()
    except QadError as error:
        print(error)
        return 2


def _be(rank: int, size: int, port: int, log: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    settings |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in settings.items()}, QAD_COMPILE="0", HF_HUB_OFFLINE="1")
    if size == 1:
        del os.environ["MASTER_ADDR"]
    file = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(function(*args))
