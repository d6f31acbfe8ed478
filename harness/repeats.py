"""Speed as a ratio to bf16, from interleaved repeats: what speed in this process and that of a server have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from harness.comparable import BASELINE
from harness.comparison import Estimate
from harness.estimates import estimate
from harness.intervals import log_ratio_t
from harness.records import Record


def beside_baseline(
    kind: str, what: str, arms: dict[str, Record], obstacle: Callable[[Record, Record], str], notes: list[str]
) -> Iterator[tuple[str, Record, Record]]:
    """(arm, bf16's record, its own) of each arm that may be held against bf16; of every other one a note with the reason.

    kind, what: of speed, as notes call it. obstacle: of two records; "" where there is none.
    """
    if arms and BASELINE not in arms:
        notes.append(f"{kind}: {BASELINE} was not measured, so there are no ratios")
        return
    for arm, record in arms.items():
        if arm == BASELINE:
            continue
        reason = obstacle(arms[BASELINE], record)
        if reason:
            notes.append(f"{what} of {arm} has no ratio to {BASELINE}: {reason}")
        else:
            yield arm, arms[BASELINE], record


def differing_settings(base: Record, other: Record) -> list[str]:
    """Names of the settings in which two records differ, sorted."""
    return sorted(
        key for key in {**base.settings, **other.settings} if base.settings.get(key) != other.settings.get(key)
    )


def mean_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Geometric mean of top / bottom over paired repeats, both positive; None without any. The interval is Student's t on the
    logs."""
    if not pairs:
        return None
    value = math.exp(sum(math.log(top / bottom) for top, bottom in pairs) / len(pairs))
    interval = log_ratio_t([top for top, _ in pairs], [bottom for _, bottom in pairs])
    return estimate(value, interval, len(pairs))
