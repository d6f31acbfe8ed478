"""What quantization cost and distillation gave back: records of the arms -> Comparison, with 95 % intervals.

recovery = candidate / bf16 where higher is better, bf16 / candidate where lower is. Nothing is rounded, recovery above
100 % is allowed, and what cannot be computed is n/a with its reason in `not_compared`, never 0 and never left out of
a mean in silence. How the intervals are made, and what they cover: harness.statistics.intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from harness.compare.comparable import (
    BASELINE,
    TaskKey,
    by_kind,
    doubtful,
    paired,
    require_comparable,
    require_same_targets,
    task_keys,
    task_scores,
    with_recovery,
    worst_of,
)
from harness.compare.contrasts import MARGIN, PairedScores, contrasts
from harness.compare.distance import compare_fidelity
from harness.compare.drift import output_rows
from harness.compare.failures import answered, failed_requests
from harness.compare.noise import noise_floors
from harness.compare.published import published_rows, sources
from harness.compare.serving_cells import compare_serving
from harness.compare.speed import compare_throughput, emulated, failure_shares
from harness.compare.training_seeds import compare_seeds, merge_seeds, seeds_of
from harness.records.comparison import BenchmarkRow, Comparison, Estimate
from harness.records.record import MemoryData, Record, TaskScore, arm_order
from harness.statistics.intervals import Floats, cluster_count, mean_interval, paired_ratio_interval
from harness.statistics.medians import median_difference_interval, median_interval, paired_ratio_deviations
from qad.untrusted import mapping, names


def compare(records: list[Record], margin: float = MARGIN) -> Comparison:
    """Compare the arms of one model. margin: the share of a score that may be lost, for non-inferiority. Records that are
    controls give the noise floor of their arm and are no arms; records of one arm under several seeds are one, and so are
    weights of one recipe trained under several seeds (harness.compare.training_seeds).

    Raises DataError where accuracy, fidelity or imported records were not made under the same settings, from the same items or
    text, or where the records of one arm are of different weights and not seeds of one recipe; every difference is named.
    """
    if seeds := seeds_of(records):
        return compare_seeds(records, seeds, lambda some: _compare(some, margin))
    return _compare(records, margin)


def _compare(records: list[Record], margin: float) -> Comparison:
    """Where an arm is one checkpoint."""
    controls = [record for record in records if record.control is not None]
    records = merge_seeds([record for record in records if record.control is None])
    kinds = by_kind(records)
    imported = [(record.arm, mapping(record.provenance.get("imported"))) for record in records]
    notes = [f"{arm}, {reason}" for arm, facts in imported for reason in names(facts.get("left_out"))]
    arms = sorted({record.arm for record in records}, key=arm_order)
    for kind in ("accuracy", "fidelity", "scores"):
        if kind in kinds:
            require_comparable(kind, kinds[kind])
            notes += [f"{kind}: {arm} was not measured" for arm in arms if arm not in kinds[kind]]
    benchmarks = _benchmarks(kinds.get("accuracy", {}), notes)
    benchmarks += published_rows(kinds.get("scores", {}), len(benchmarks), notes)
    medians = {arm: _median(arm, benchmarks, notes) for arm in arms if arm != BASELINE}
    rows = [benchmark.row for benchmark in benchmarks]
    fidelity = compare_fidelity(kinds.get("fidelity", {}), notes)
    return Comparison(
        arms=arms,
        benchmarks=rows,
        median_recovery={arm: median for arm, median in medians.items() if median},
        worst={arm: worst for arm in medians if (worst := worst_of(arm, rows))},
        fidelity=fidelity.rows,
        kl_ratio=fidelity.kl_ratio,
        kl_ratio_plain=fidelity.kl_ratio_plain,
        perplexity_gap_closed=fidelity.gap_closed,
        throughput_ratio=compare_throughput(kinds.get("throughput", {}), notes),
        not_compared=notes,
        contrasts=contrasts(benchmarks, arms, margin),
        median_gain=_median_gain(benchmarks),
        memory_ratio=_memory_ratio(kinds.get("memory", {})),
        failure_share=failure_shares(kinds.get("throughput", {}), failed_requests(kinds.get("accuracy", {}))),
        emulated=emulated({**kinds.get("serving", {}), **kinds.get("throughput", {})}),
        sources=sources(kinds.get("scores", {})),
        outputs=output_rows(kinds.get("accuracy", {})),
        serving_ratio=compare_serving(kinds.get("serving", {}), notes),
        noise_floor=noise_floors(records, controls, notes),
    )


# --- benchmarks ----------------------------------------------------------------------------------


def _benchmarks(arms: dict[str, Record], notes: list[str]) -> list[PairedScores]:
    shown: set[str] = set()
    found = []
    for stream, key in enumerate(task_keys(arms)):
        scores = task_scores(arms, key)
        headline = key[0] not in shown
        if not scores:
            notes.append(f"{key[0]} (filter {key[1]}): no items")
            continue
        if not headline:
            notes.append(f"{key[0]}: filter {key[1]} is shown but not in the median, which takes a task's first filter")
        missing = [arm for arm in arms if arm not in scores]
        notes += [f"{key[0]} (filter {key[1]}): no scores of {arm}" for arm in missing]
        found.append(_benchmark(key, scores, headline, stream, notes))
        shown.add(key[0])
    return found


def _benchmark(key: TaskKey, scores: dict[str, TaskScore], headline: bool, stream: int, notes: list[str]) -> PairedScores:
    task, filter_name, metric = key
    label, first = f"{task} (filter {filter_name})", next(iter(scores.values()))
    found = answered(task, scores)
    require_same_targets(task, scores)
    values, cluster = paired(task, found.scores)
    usable = {arm: v for arm, v in values.items() if np.isfinite(v).all()}
    notes += [f"{label}: scores of {arm} are not all numbers" for arm in values if arm not in usable]
    notes += [f"{label}: recovery of {arm} is n/a, {why}" for arm, why in found.refused.items()]
    if found.scores and (left := len(first.items) - len(cluster)):
        notes.append(f"{label}: {left} of {len(first.items)} items are left out, their requests failed under an arm")
    doubt = {arm: why for arm, why in found.refused.items() if arm != BASELINE}
    recovery: dict[str, Estimate | None] = dict.fromkeys(arm for arm in (*doubt, *values) if arm != BASELINE)
    above = dict(recovery)
    deviations: dict[str, Floats | None] = dict.fromkeys(recovery)
    score = {arm: mean_interval(v, cluster) for arm, v in usable.items()}
    means, low = {arm: one.value for arm, one in score.items()}, score[BASELINE].low if BASELINE in score else None
    for arm, top, bottom in with_recovery(label, values, means, low, first, notes):
        pair = usable[top], usable[bottom]
        recovery[arm] = paired_ratio_interval(*pair, cluster)
        deviations[arm] = paired_ratio_deviations(*pair, cluster, stream, list(values).index(arm))
        if first.chance is not None and first.higher_is_better:
            above[arm] = paired_ratio_interval(*pair, cluster, first.chance)
        # One arm within 0 and 1 is enough: the other may have been written in percent.
        bounded = first.higher_is_better and all(v.min() >= 0 for v in pair) and min(v.max() for v in pair) <= 1
        if bounded and (why := doubtful(recovery[arm])):
            doubt[arm] = why
            notes.append(f"{label}: recovery of {arm}, {why}")
    row = BenchmarkRow(
        task=task,
        metric=metric,
        filter=filter_name,
        n_shot=first.n_shot,
        higher_is_better=first.higher_is_better,
        chance=first.chance,
        n=len(cluster),
        clusters=cluster_count(cluster),
        failed=found.failed,
        doubt=doubt,
        score=score | _alone(task, found.alone),
        recovery=recovery,
        recovery_above_chance=above,
        flips=_flips(usable, first.higher_is_better),
        limit=first.limit,
        headline=headline,
    )
    return PairedScores(row, usable, cluster, deviations)


def _alone(task: str, scores: Mapping[str, TaskScore]) -> dict[str, Estimate]:
    """Scores of arms that are not compared, each of the items that it answered; nothing where it answered none."""
    found = {arm: paired(task, {arm: score}) for arm, score in scores.items() if score.items}
    return {arm: mean_interval(v[arm], cluster) for arm, (v, cluster) in found.items() if np.isfinite(v[arm]).all()}


def _flips(usable: Mapping[str, Floats], higher_is_better: bool) -> dict[str, tuple[int, int]]:
    """Items that got (worse, better) than under bf16, of every other arm."""
    sign = 1.0 if higher_is_better else -1.0
    others = [arm for arm in usable if arm != BASELINE] if BASELINE in usable else []
    moved = {arm: sign * (usable[arm] - usable[BASELINE]) for arm in others}
    return {arm: (int(np.count_nonzero(by < 0)), int(np.count_nonzero(by > 0))) for arm, by in moved.items()}


# --- over benchmarks -----------------------------------------------------------------------------


def _median(arm: str, benchmarks: Sequence[PairedScores], notes: list[str]) -> Estimate | None:
    """Median over the headline rows that have a recovery; no interval unless each of them has one."""
    asked = [b for b in benchmarks if b.row.headline and arm in b.row.recovery]
    counted = [(b, recovery) for b in asked if (recovery := b.row.recovery[arm])]
    if len(counted) < len(asked):
        notes.append(f"median recovery of {arm}: {len(asked) - len(counted)} of {len(asked)} benchmarks are n/a, left out")
    if not counted:
        return None
    values = [recovery.value for _, recovery in counted]
    clusters = sum(b.row.clusters for b, _ in counted)
    drawn = [d for b, _ in counted if (d := b.deviations[arm]) is not None]
    if len(drawn) < len(counted):
        unsure = [b.row.task for b, recovery in counted if recovery.low is None]
        note = f"inconclusive: {', '.join(unsure)} {'has' if len(unsure) == 1 else 'have'} no interval"
        return Estimate(float(np.median(values)), None, None, len(values), clusters, "none", note)
    return median_interval(values, drawn, clusters)


def _median_gain(benchmarks: Sequence[PairedScores]) -> Estimate | None:
    """Median recovery of qad minus that of ptq, over the headline rows in which both have one."""
    counted = [b for b in benchmarks if b.row.headline and b.row.recovery.get("ptq") and b.row.recovery.get("qad")]
    if not counted:
        return None
    values: dict[str, list[float]] = {"qad": [], "ptq": []}
    drawn: dict[str, list[Floats]] = {"qad": [], "ptq": []}
    for arm in values:
        for b in counted:
            recovery, deviations = b.row.recovery[arm], b.deviations.get(arm)
            assert recovery is not None
            values[arm].append(recovery.value)
            drawn[arm] += [] if deviations is None else [deviations]
    clusters = sum(b.row.clusters for b in counted)
    if any(len(drawn[arm]) < len(counted) for arm in values):
        value = float(np.median(values["qad"]) - np.median(values["ptq"]))
        return Estimate(value, None, None, len(counted), clusters, "none", "inconclusive: a benchmark has no interval")
    return median_difference_interval(values["qad"], drawn["qad"], values["ptq"], drawn["ptq"], clusters)


def _memory_ratio(arms: dict[str, Record]) -> dict[str, Estimate]:
    """arm -> bytes of its weight files / bf16's, exact; empty without bf16."""
    size = {arm: record.data.file_bytes for arm, record in arms.items() if isinstance(record.data, MemoryData)}
    if not size.get(BASELINE):
        return {}
    ratios = {arm: count / size[BASELINE] for arm, count in size.items() if arm != BASELINE}
    return {arm: Estimate(ratio, ratio, ratio, 1, 1, "exact") for arm, ratio in ratios.items()}
