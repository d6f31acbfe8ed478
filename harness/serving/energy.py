"""Energy of the machine's NVIDIA accelerators over an interval, where NVML and the card tell; None elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

import numpy as np

_PERIOD_S = 0.1


class EnergyMeter:
    """Reads the cards' energy counters ten times a second while the block runs."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # perf_counter s, J since driver load, summed over cards
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EnergyMeter:
        nvml = _nvml()
        if nvml is not None and _joules(nvml) is not None:
            self._thread = threading.Thread(target=self._sample, args=(nvml,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self, nvml: Any) -> None:
        while True:
            joules = _joules(nvml)
            if joules is not None:
                self._samples.append((time.perf_counter(), joules))
            if self._stop.wait(_PERIOD_S):
                return

    def between(self, start_s: float, end_s: float) -> float | None:
        """Joules from start to end on the clock of time.perf_counter, interpolated; None where not sampled."""
        times = [time_s for time_s, _ in self._samples]
        if len(times) < 2 or start_s < times[0] or end_s > times[-1] + _PERIOD_S:
            return None
        start, end = np.interp([start_s, end_s], times, [joules for _, joules in self._samples])
        return float(end - start)


def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: all the same to the reader of a record
        return None
    return pynvml


def _joules(nvml: Any) -> float | None:
    """Sum over cards; None where any of them has no counter (before Volta)."""
    try:
        cards = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return sum(nvml.nvmlDeviceGetTotalEnergyConsumption(card) for card in cards) / 1000 if cards else None
    except Exception:
        return None
