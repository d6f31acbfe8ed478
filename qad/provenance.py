"""Who made a file, from what code, on which machine. Reads package metadata; imports none of the packages."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from qad.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "lm_eval", "nvidia-modelopt", "vllm")


def now() -> str:
    """UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@functools.cache
def producer() -> dict[str, object]:
    """Name, version, commit and dirty flag of this tool; commit None where it does not run from a git checkout."""
    root = Path(__file__).resolve().parent.parent
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no")) if commit else None
    return {"name": "nvfp4-qad", "version": __version__, "commit": commit, "dirty": dirty}


@functools.cache
def environment() -> dict[str, object]:
    """Python, packages, operating system, processor, memory, GPUs."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "packages": packages,
        "os": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "gpus": _gpus(),
    }


def provenance() -> dict[str, object]:
    """The header that every record and manifest carries."""
    argv = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"producer": producer(), "environment": environment(), "argv": argv}


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = facts.get("flags", "").split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return " ".join([facts.get("model name", platform.machine()), *(flag for flag in wanted if flag in flags)])


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> list[str]:
    """Names of the CUDA devices; empty unless torch is already loaded, because asking costs seconds."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
