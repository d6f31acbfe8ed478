from __future__ import annotations

import time
from typing import Any

import pytest

from harness.serving import energy
from harness.serving.energy import EnergyMeter


class Cards:
    """Two cards; each draws 50 W on the clock of the meter, and counts in mJ."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, card: int) -> float:  # noqa: N802
        return 50_000 * time.perf_counter()


def test_joules_of_an_interval_over_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "_nvml", lambda: Cards())
    monkeypatch.setattr(energy, "_PERIOD_S", 0.01)
    with EnergyMeter() as meter:
        while len(meter._samples) < 5:
            time.sleep(0.01)
    start, end = meter._samples[0][0], meter._samples[-1][0]
    middle = (start + end) / 2
    whole, half = meter.between(start, end), meter.between(start, middle)
    assert whole == pytest.approx(100 * (end - start), rel=0.2)
    assert half is not None
    assert 0 < half < (whole or 0)
    assert meter.between(start - 1, end) is None, "not sampled there"
    assert meter.between(start, end + 1) is None


def test_without_a_counter_energy_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(Cards):
        def nvmlDeviceGetTotalEnergyConsumption(self, card: int) -> Any:  # noqa: N802
            raise RuntimeError("not supported")

    for found in (None, Old()):
        monkeypatch.setattr(energy, "_nvml", lambda found=found: found)
        with EnergyMeter() as meter:
            pass
        assert meter.between(0.0, 1.0) is None
