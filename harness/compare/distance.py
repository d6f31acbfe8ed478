"""Fidelity records of the arms -> distance from the teacher with intervals, and how much of the PTQ loss QAD undid.

Every number is a ratio of sums over sequences (KL per token, agreeing tokens per token, nats per token), resampled by
`FidelitySequence.cluster`: tokens of one sequence are not independent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from harness.compare.comparable import BASELINE
from harness.records.comparison import Estimate, FidelityRow
from harness.records.record import PLAIN, Continuation, FidelityData, FidelitySequence, FidelityStratum, Record
from harness.statistics.intervals import Floats, Ints, cluster_index, mean_interval, renumbered
from harness.statistics.resampling import ratio_of_sums
from qad.errors import DataError

# Teachers that differ by more are two teachers; the same one, run twice, differs by rounding.
TEACHER_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Distances:
    rows: dict[str, FidelityRow]
    kl_ratio: Estimate | None = None
    kl_ratio_plain: Estimate | None = None
    gap_closed: Estimate | None = None


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Per sequence, float64 [n]."""

    tokens: Floats
    kl: Floats
    agree: Floats
    nll_teacher: Floats
    nll: Floats

    @classmethod
    def of(cls, data: FidelityData) -> _Sums:
        def column(name: str) -> Floats:
            return np.array([getattr(s, name) for s in data.sequences], dtype=np.float64)

        return cls(*map(column, ("tokens", "kl_sum", "top1_agree", "nll_teacher_sum", "nll_student_sum")))

    @property
    def finite(self) -> bool:
        return all(np.isfinite(getattr(self, field.name)).all() for field in dataclasses.fields(self))


def compare_fidelity(arms: dict[str, Record], notes: list[str]) -> Distances:
    """Raises DataError where the arms were measured on other sequences or against another teacher."""
    data: dict[str, FidelityData] = {}
    for arm, record in arms.items():
        assert isinstance(record.data, FidelityData)
        if not record.data.sequences:
            notes.append(f"fidelity: the record of {arm} has no sequences")
        elif not _Sums.of(record.data).finite:
            notes.append(f"fidelity: the sums of {arm} are not all numbers")
        else:
            data[arm] = record.data
    if not data:
        return Distances({})
    _require_same_text(data)
    sums = {arm: _Sums.of(entry) for arm, entry in data.items()}
    cluster = cluster_index([s.cluster for s in next(iter(data.values())).sequences])
    rows = {arm: _row(data[arm], sums[arm], cluster) for arm in data}
    against = [arm for arm in ("ptq", PLAIN) if "qad" in sums and arm in sums]
    ratios = {arm: _kl_ratio(sums, arm, cluster, notes) for arm in against}
    return Distances(rows, ratios.get("ptq"), ratios.get(PLAIN), _gap_closed(sums, cluster, notes) if "ptq" in ratios else None)


def _require_same_text(data: dict[str, FidelityData]) -> None:
    def text(sequences: list[FidelitySequence]) -> list[tuple[str, int]]:
        return [(s.cluster, s.tokens) for s in sequences]

    reference, *others = data
    for arm in others:
        if text(data[arm].sequences) != text(data[reference].sequences):
            raise DataError(f"fidelity of {reference} and {arm} is of other sequences: measure both again on one text")
        a, b = (sum(s.nll_teacher_sum for s in data[name].sequences) for name in (reference, arm))
        if abs(a - b) > TEACHER_TOLERANCE * max(abs(a), abs(b)):
            raise DataError(f"fidelity of {reference} and {arm} is against different teachers: measure both again")


def _row(data: FidelityData, sums: _Sums, cluster: Ints) -> FidelityRow:
    def per_token(values: Floats, *, log: bool) -> Estimate:
        return ratio_of_sums(values, sums.tokens, cluster, log=log)

    return FidelityRow(
        kl=per_token(sums.kl, log=_positive(sums.kl, cluster)),
        top1=_under(per_token(sums.agree, log=False), lambda share: min(1.0, max(0.0, share))),
        perplexity=_exp(per_token(sums.nll, log=False)),
        perplexity_ratio=_exp(per_token(sums.nll - sums.nll_teacher, log=False)),
        token_kl=dict(data.token_kl),
        sequences=len(cluster),
        tokens=int(sums.tokens.sum()),
        by_position=_strata(data.by_position, cluster),
        by_entropy=_strata(data.by_entropy, cluster),
        by_domain=_strata(data.by_domain, cluster),
        by_part=_strata(data.by_part, cluster),
        by_layer={layer.name: layer.error for layer in data.by_layer or ()},
        bound=data.bound or "",
        saturated_inputs=data.saturated_inputs,
        **_continuations(data.continuations or []),
    )


def _strata(strata: list[FidelityStratum] | None, cluster: Ints) -> dict[str, Estimate]:
    """KL per token of each stratum, over the sequences that have tokens in it."""
    found = {}
    for stratum in strata or ():
        tokens, kl = (np.array(v, dtype=np.float64) for v in (stratum.tokens, stratum.kl_sum))
        there = tokens > 0
        if there.any():
            groups = renumbered(cluster[there])
            found[stratum.name] = ratio_of_sums(kl[there], tokens[there], groups, log=_positive(kl[there], groups))
    return found


def _continuations(entries: list[Continuation]) -> dict[str, Estimate]:
    if not entries:
        return {}
    cluster = cluster_index([entry.cluster for entry in entries])
    columns = [[e.equal, e.diverged, e.written, e.nll_student - e.nll_teacher] for e in entries]
    equal, diverged, written, gap = np.array(columns, dtype=np.float64).T
    return {
        "equal_tokens": mean_interval(equal, cluster),
        "diverged": mean_interval(diverged, cluster),
        "written_ratio": _exp(ratio_of_sums(gap, written, cluster, log=False)),
    }


def _kl_ratio(sums: dict[str, _Sums], against: str, cluster: Ints, notes: list[str]) -> Estimate | None:
    top, bottom = sums["qad"].kl, sums[against].kl
    if not bottom.sum() > 0:
        notes.append(f"KL of qad / KL of {against} is n/a: {against} does not differ from its teacher")
        return None
    return ratio_of_sums(top, bottom, cluster, log=_positive(top, cluster) and _positive(bottom, cluster))


def _gap_closed(sums: dict[str, _Sums], cluster: Ints, notes: list[str]) -> Estimate | None:
    """(ppl ptq - ppl qad) / (ppl ptq - ppl bf16); bf16 is the teacher as it ran beside ptq.

    The interval linearises the three perplexities around the observed ones, which turns numerator and denominator
    into sums over sequences: d exp(a) = exp(a) da.
    """
    ptq, qad = sums["ptq"], sums["qad"]
    gap = ratio_of_sums(ptq.nll - ptq.nll_teacher, ptq.tokens, cluster, log=False)
    if gap.low is None or not gap.low > 0:
        notes.append(f"perplexity gap closed is n/a: the interval of the gap between ptq and {BASELINE} does not lie above 0")
        return None
    total = ptq.tokens.sum()

    def linear(nll: Floats) -> Floats:
        mean = nll.sum() / total
        return np.asarray(np.exp(mean) * (ptq.tokens + nll - mean * ptq.tokens), dtype=np.float64)

    top, bottom = linear(ptq.nll) - linear(qad.nll), linear(ptq.nll) - linear(ptq.nll_teacher)
    return ratio_of_sums(top, bottom, cluster, log=False)


def _positive(values: Floats, cluster: Ints) -> bool:
    """Every cluster's total is positive, so that the log of every resample exists."""
    return bool((np.bincount(cluster, weights=values) > 0).all())


def _exp(mean: Estimate) -> Estimate:
    """Perplexity from nats per token."""
    return _under(mean, lambda nats: math.exp(min(nats, 700.0)))


def _under(found: Estimate, rising: Callable[[float], float]) -> Estimate:
    """A number under a function that rises; its interval keeps its coverage."""
    low, high = (None if end is None else rising(end) for end in (found.low, found.high))
    return dataclasses.replace(found, value=rising(found.value), low=low, high=high)
