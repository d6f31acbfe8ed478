"""Memory of the server's own processes, and of no other."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from harness.engines.tree_memory import NOTHING, TreeMemory, gpu_memory, ram, tree_memory


class FakeNvml:
    """Simulated pynvml: cards, each a list of (pid, bytes)."""

    class NVMLError(Exception):
        pass

    def __init__(self, *cards: list[tuple[int, int | None]], fails: str = "") -> None:
        self.cards, self.fails, self.open = cards, fails, 0

    def nvmlInit(self) -> None:  # noqa: N802 - pynvml's names
        if self.fails == "init":
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        if self.fails == "list":
            raise self.NVMLError
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.cards[handle]]


def test_other_processes_of_the_cards_do_not_count() -> None:
    nvml = FakeNvml([(11, 14_480_000_000), (99, 60_000_000_000)], [(12, 1_000), (98, 5)])
    assert gpu_memory([10, 11, 12], nvml) == TreeMemory(14_480_001_000, "NVML")
    assert nvml.open == 0


@pytest.mark.parametrize(
    "nvml",
    [FakeNvml(fails="init"), FakeNvml([(11, 5)], fails="list"), FakeNvml([(99, 5)]), FakeNvml([(11, None)]), FakeNvml()],
    ids=["no driver", "not allowed", "other numbers in a container", "hidden size", "no card"],
)
def test_what_cannot_be_asked_is_unknown_and_not_zero(nvml: FakeNvml) -> None:
    assert gpu_memory([10, 11], nvml) == NOTHING == TreeMemory(None, None)
    assert nvml.open == 0


def test_ram_of_a_child_counts_and_that_of_others_does_not() -> None:
    code = "held = bytearray(64 * 2**20); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        child.stdout.readline()
        found = tree_memory([psutil.Process(child.pid)], gpu=False)
        child.communicate("\n")
    assert found.method in ("PSS", "RSS")
    assert found.bytes is not None
    assert 64 * 2**20 <= found.bytes < 256 * 2**20
    assert ram([psutil.Process(os.getpid())]).bytes != found.bytes


def test_a_process_that_ended_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        ended = psutil.Process(child.pid)
        child.wait()
    assert ram([ended]) == NOTHING
    mine = psutil.Process(os.getpid())
    assert ram([ended, mine]).bytes


def test_where_pss_may_not_be_asked_rss_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: psutil.Process) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)
    found = ram([psutil.Process(os.getpid())])
    assert found.method == "RSS"
    assert found.bytes
