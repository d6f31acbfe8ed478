"""The noise floor: an arm measured again on its own weights, under another batch size, seed and attention kernel.

What differs between the two measurements is what no difference looks like. Under it, each cluster's difference is as likely
to have the other sign; so the band of a recovery is the middle 95 % of 1 + (sum of the clusters' differences under random
signs) / (sum of the scores), and that of the median the middle 95 % of medians over benchmarks of the same draws. For W4A4
activations are rounded, and rounding turns a last bit into a step: its floor is the larger one, and is measured by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from harness.compare.comparable import paired, task_keys, task_scores
from harness.compare.distance import compare_fidelity
from harness.compare.failures import answered
from harness.records.comparison import Band, Estimate, NoiseFloor
from harness.records.record import AccuracyData, FidelityData, Record
from harness.statistics.intervals import LEVEL, Floats, Ints, cluster_totals, mean_interval
from harness.statistics.resampling import RESAMPLES, SEED
from qad.errors import DataError

_CHUNK = 500


def noise_floors(records: Sequence[Record], controls: Sequence[Record], notes: list[str]) -> dict[str, NoiseFloor]:
    """arm -> its floor. records: the arms'. Raises DataError for a control that is of other weights than its arm."""
    floors = {}
    for arm in dict.fromkeys(control.arm for control in controls):
        mine = {r.kind: r for r in controls if r.arm == arm}
        theirs = {r.kind: r for r in records if r.arm == arm}
        for kind, control in mine.items():
            if kind not in theirs:
                notes.append(f"noise floor of {arm}: {kind} was measured again, but there is no first measurement")
            elif theirs[kind].checkpoint != control.checkpoint:
                raise DataError(f"the control of {arm} ({kind}) is of other weights than {arm}: measure it again")
        floors[arm] = _floor(arm, theirs, mine, notes)
    return {arm: floor for arm, floor in floors.items() if floor.differing or floor.kl}


def _floor(arm: str, records: Mapping[str, Record], controls: Mapping[str, Record], notes: list[str]) -> NoiseFloor:
    conditions: dict[str, object] = {}
    for control in controls.values():
        conditions |= control.control or {}
    median: Band | None = None
    bands: dict[str, Band] = {}
    differing: Estimate | None = None
    if "accuracy" in controls and "accuracy" in records:
        median, bands, differing = _accuracy({"first": records["accuracy"], "again": controls["accuracy"]})
    kl = top1 = None
    fidelity = controls.get("fidelity")
    if fidelity is not None and isinstance(fidelity.data, FidelityData):
        row = compare_fidelity({arm: fidelity}, notes).rows.get(arm)
        kl, top1 = (row.kl, row.top1) if row else (None, None)
    return NoiseFloor(arm, dict(conditions), median, bands, differing, kl, top1)


def _accuracy(pair: dict[str, Record]) -> tuple[Band | None, dict[str, Band], Estimate | None]:
    assert all(isinstance(record.data, AccuracyData) for record in pair.values())
    draws: list[Floats] = []
    bands: dict[str, Band] = {}
    moved: list[Floats] = []
    groups: list[Ints] = []
    seen: set[str] = set()
    for stream, key in enumerate(task_keys(pair)):
        scores = answered(key[0], task_scores(pair, key)).scores
        if len(scores) < 2:
            continue
        values, cluster = paired(key[0], scores)
        difference = values["again"] - values["first"]
        total = float(values["first"].sum() + values["again"].sum()) / 2
        if not (np.isfinite(difference).all() and total > 0):
            continue
        drawn = 1.0 + _signed_sums(cluster_totals(difference, cluster), stream) / total
        headline = key[0] not in seen
        bands[key[0] if headline else f"{key[0]} ({key[1]})"] = _band(drawn)
        if headline:
            seen.add(key[0])
            draws.append(drawn)
            moved.append((difference != 0).astype(np.float64))
            groups.append(cluster + (int(groups[-1].max()) + 1 if groups else 0))
    if not draws:
        return None, bands, None
    changed, cluster = np.concatenate(moved), np.concatenate(groups)
    return _band(np.median(np.stack(draws), axis=0)), bands, mean_interval(changed, cluster)


def _signed_sums(totals: Floats, stream: int) -> Floats:
    """Sums of the clusters' totals under random signs [RESAMPLES]."""
    moved = totals[totals != 0]
    rng = np.random.default_rng([SEED, stream, len(moved)])
    sums = [
        (2.0 * rng.integers(0, 2, (min(_CHUNK, RESAMPLES - start), len(moved)), dtype=np.int8) - 1.0) @ moved
        for start in range(0, RESAMPLES, _CHUNK)
    ]
    return np.concatenate(sums).astype(np.float64)


def _band(drawn: Floats) -> Band:
    low, high = np.quantile(drawn, [1 - LEVEL, LEVEL])
    return Band(float(low), float(high))
