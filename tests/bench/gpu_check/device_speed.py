"""Fake quantization against a copy on the same device: time and bandwidth, medians of one run."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from qad.numerics import nvfp4
from qad.numerics.compiled import compilation


@dataclasses.dataclass(frozen=True)
class Speed:
    """milliseconds: median. gigabytes_per_s: bytes read once and written once, over that. of_copy: time over a copy's."""

    operation: str
    dtype: str
    milliseconds: float
    gigabytes_per_s: float
    of_copy: float


def median_ms(work: Callable[[], object], device: str, repeats: int) -> float:
    """Of `repeats` calls after two that warm up; the device's own clock where it has one."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def measure_speed(device: str, side: int, compile_too: bool, repeats: int = 20) -> list[Speed]:
    """A square weight of `side` rows, many times any cache on a GPU; scales are given, as in training."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
        scale = nvfp4.global_scale_from_amax(weight.abs().amax())
        q = nvfp4.quantize(weight, scale)
        size = weight.numel() * weight.element_size()
        packed = weight.numel() // 2 + weight.numel() // 16
        operations: list[tuple[str, int, Callable[[], object]]] = [
            ("copy", 2 * size, lambda w=weight: w.clone()),  # type: ignore[misc]
            ("fake_quantize", 2 * size, lambda w=weight, s=scale: nvfp4.fake_quantize(w, s)),  # type: ignore[misc]
            (
                "fake_quantize, frozen scales",
                2 * size + weight.numel() // 16,
                lambda w=weight, s=scale, b=q.block_scale: nvfp4.fake_quantize(w, s, b),
            ),  # type: ignore[misc]
            ("fake_quantize_activation", 2 * size, lambda w=weight, s=scale: nvfp4.fake_quantize_activation(w, s)),  # type: ignore[misc]
            ("quantize", size + packed, lambda w=weight, s=scale: nvfp4.quantize(w, s)),  # type: ignore[misc]
        ]
        name, copy_ms = str(dtype).removeprefix("torch."), 0.0
        for mode in (False, True) if compile_too else (False,):
            for operation, bytes_moved, work in operations:
                if operation == "copy" and mode:
                    continue
                with compilation(mode):
                    ms = median_ms(work, device, repeats)
                copy_ms = ms if operation == "copy" else copy_ms
                label = operation if operation == "copy" else f"{operation}, {'compiled' if mode else 'eager'}"
                rows.append(Speed(label, name, ms, bytes_moved / ms / 1e6, ms / copy_ms))
    return rows
