"""When a numeric kernel runs compiled and when eager. The bits are the same; only the time differs.

torch.compile fuses a quantize-dequantize into one pass over memory, but the first call waits for the
compiler (seconds to a minute). So compilation is worth it where many bytes follow: the trainer turns it on, and
large tensors turn it on by themselves.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # torch's own switches, under which a whole graph is an error
_LARGE = 1 << 26  # elements; below this eager finishes before a cold compiler has started
_forced: bool | None = None


@functools.cache
def compiler_available(device_type: str) -> bool:
    """True where torch.compile is on and can generate code for the device: a C++ compiler for the CPU, Triton for CUDA."""
    if any(os.environ.get(name) == "1" for name in _OFF):
        return False
    if device_type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return False
        return True
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)


@contextmanager
def compilation(enabled: bool | None) -> Iterator[None]:
    """Within the block: True compiles every kernel, False none, None decides by size. QAD_COMPILE=0 or 1 wins."""
    global _forced
    before, _forced = _forced, enabled
    try:
        yield
    finally:
        _forced = before


def compiled(kernel: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """`kernel` itself, or its compiled form where that is available and worth it for `tensor`."""
    setting = os.environ.get("QAD_COMPILE", "")
    wanted = setting == "1" if setting in ("0", "1") else _forced
    if wanted is None:
        wanted = tensor.numel() >= _LARGE
    if not wanted or torch.compiler.is_compiling() or not compiler_available(tensor.device.type):
        return kernel
    return _compile(kernel)


@functools.cache
def compiled_for(kernel: Callable[..., Any], device_type: str, serial: bool) -> Callable[..., Any]:
    """`kernel` compiled wherever that is available, for calls so many and small that deciding would cost as much as they do.

    serial: on a CPU with one thread. For small tensors waking the others costs more than they would save, and a multiple of it
    where the machine is busy.
    """
    if os.environ.get("QAD_COMPILE") == "0" or not compiler_available(device_type):
        return kernel
    return _compile(kernel, serial)


@functools.cache
def _compile(kernel: Callable[..., Any], serial: bool = False) -> Callable[..., Any]:
    # One dynamic dimension (the number of blocks) serves every weight and every batch. The options keep, on CUDA, where the
    # defaults do not: the rounding of casts and of each product before it is added, IEEE division, subnormals.
    options: dict[str, Any] = {"emulate_precision_casts": True}
    eager = getattr(torch._inductor.config, "eager_numerics", None)
    options |= {f"eager_numerics.{name}": True for name in ("division_rounding", "disable_ftz") if hasattr(eager, name)}
    if serial:
        options["cpp.threads"] = 1
    return torch.compile(kernel, dynamic=True, fullgraph=True, options=options)
