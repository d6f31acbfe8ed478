"""Memory of a server's process tree: RAM from the operating system, GPU memory from NVML, by process.

Other processes of the machine or the card are not counted, and a server that does its work in a child is. What cannot be
asked is None, never 0.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import psutil


@dataclasses.dataclass(frozen=True)
class TreeMemory:
    """bytes: sum over the tree. method: PSS, RSS or NVML; both None where nothing could be asked."""

    bytes: int | None
    method: str | None


NOTHING = TreeMemory(None, None)


def tree_memory(processes: Sequence[psutil.Process], *, gpu: bool) -> TreeMemory:
    """Memory of these processes: on the GPUs (gpu=True), or in RAM."""
    return gpu_memory([process.pid for process in processes]) if gpu else ram(processes)


def ram(processes: Sequence[psutil.Process]) -> TreeMemory:
    """PSS, which divides a page by the processes that share it; where one may not be asked for it, RSS of all (shared
    pages then count in each)."""
    for method in ("pss", "rss"):
        try:
            sizes = [_size(process, method) for process in processes]
        except (psutil.Error, AttributeError):
            continue
        known = [size for size in sizes if size is not None]
        if known:
            return TreeMemory(sum(known), method.upper())
    return NOTHING


def _size(process: psutil.Process, method: str) -> int | None:
    """None where the process has ended meanwhile."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return int(process.memory_full_info().pss if method == "pss" else process.memory_info().rss)
    except psutil.NoSuchProcess:
        return None


def gpu_memory(pids: Sequence[int], nvml: Any = None) -> TreeMemory:
    """Sum over all cards of what NVML says of these processes. None where there is no NVML, where it lists none of them
    (inside a container it may see other numbers), or where it hides a size.

    nvml: a module with pynvml's interface.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            sizes = _sizes(nvml, set(pids))
        finally:
            nvml.nvmlShutdown()
    except Exception:  # no package, no driver, no permission: all the same to the reader of a record
        return NOTHING
    known = [size for size in sizes if size is not None]
    return TreeMemory(sum(known), "NVML") if known and len(known) == len(sizes) else NOTHING


def _sizes(nvml: Any, pids: set[int]) -> list[int | None]:
    found: list[int | None] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        found += [None if p.usedGpuMemory is None else int(p.usedGpuMemory) for p in running if p.pid in pids]
    return found
