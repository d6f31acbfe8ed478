"""What a comparison of arms is: the result types of harness.compare.recovery, which reports render. No torch here."""

from __future__ import annotations

import dataclasses

from harness.records.rebuild import STRICT, Number, build


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    low, high: None where no honest interval exists; `note` says why.
    n: independent items behind it.
    clusters: groups that were resampled.
    method: how the interval was made.
    """

    value: Number
    low: float | None
    high: float | None
    n: int
    clusters: int
    method: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class BenchmarkRow:
    """One task under one filter, all arms, paired by item. Dictionaries are keyed by arm; recovery has no bf16.

    recovery: None is n/a, `Comparison.not_compared` says why.
    recovery_above_chance: (candidate - chance) / (bf16 - chance).
    imported: from printed mean scores, so neither paired nor by item; n is 0 and n_shot None where nobody printed them.
    failed: (failed, sent) requests, of arms where some failed; what failed under one arm counts for none.
    doubt: why the recovery of an arm decides nothing, whatever its value.
    """

    task: str
    metric: str
    filter: str
    n_shot: int | None
    higher_is_better: bool
    chance: float | None
    n: int
    clusters: int
    score: dict[str, Estimate]
    recovery: dict[str, Estimate | None]
    recovery_above_chance: dict[str, Estimate | None]
    flips: dict[str, tuple[int, int]]  # items that got (worse, better) than under bf16
    limit: int | None = None  # items asked for; not None: a smoke run, not the whole task
    headline: bool = True  # counts in the median; False for every filter of a task but its first
    imported: bool = False
    failed: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    doubt: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """The task's name; with the filter where the task is shown under several."""
        return self.task if self.headline else f"{self.task} ({self.filter})"


@dataclasses.dataclass(frozen=True)
class Contrast:
    """`arm` against the arm `against` on one benchmark, paired by item.

    difference: mean score of `arm` minus that of `against`, turned so that above 0 is better, in the score's unit.
    worse, better: items.
    p: two-sided, of no difference, by the test named in `test`.
    p_holm: p adjusted by Holm over the benchmarks of this pair of arms that count in the median; None for the others.
    margin: the share of `against`'s score that may be lost.
    verdict: non-inferior, inferior or undecided at that margin (one-sided 5 %).
    items_needed: items at which an arm that is truly equal would be found non-inferior with 80 % power, judged by how often
        answers differed here.
    """

    benchmark: str
    arm: str
    against: str
    difference: Estimate
    worse: int
    better: int
    p: float | None
    p_holm: float | None
    test: str
    margin: Number
    verdict: str
    items_needed: int | None


@dataclasses.dataclass(frozen=True)
class FidelityRow:
    """Distance of one arm from the BF16 teacher.

    kl: nats per token.
    top1: share of the tokens.
    perplexity: of the text; perplexity_ratio is relative to the teacher's.
    token_kl: quantiles over the tokens, nats.
    by_position, by_entropy, by_domain: KL per token of a stratum.
    by_part: KL per token under the weights alone, and under the quantized inputs alone.
    by_layer: relative error of the hidden states.
    equal_tokens: tokens before greedy decoding first differs, up to those asked for.
    diverged: share of the prompts on which it does.
    written_ratio: perplexity of what the teacher wrote, relative to its own.
    bound: what kl is a bound of; "": exact.
    saturated_inputs: share of blocks of inputs above what was calibrated; None: not counted.
    """

    kl: Estimate
    top1: Estimate
    perplexity: Estimate
    perplexity_ratio: Estimate
    token_kl: dict[str, Number]
    sequences: int
    tokens: int
    by_position: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    by_entropy: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    by_domain: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    by_part: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    by_layer: dict[str, Number] = dataclasses.field(default_factory=dict)
    equal_tokens: Estimate | None = None
    diverged: Estimate | None = None
    written_ratio: Estimate | None = None
    bound: str = ""
    saturated_inputs: float | None = None


@dataclasses.dataclass(frozen=True)
class OutputRow:
    """What the answers to one generated benchmark looked like. Dictionaries are keyed by arm; length_ratio has no bf16.

    tokens: generated per answer, thinking included; without an arm whose server counted none.
    length_ratio: of their means to bf16's, paired by item.
    truncated: share of the answers that were cut off by the limit.
    loops: share that ends in a repetition.
    empty: share that left nothing to score.
    tokens_per_correct: tokens generated per unit of score, as of `tokens`; None: n/a, nothing was right.
    """

    benchmark: str
    tokens: dict[str, Estimate]
    length_ratio: dict[str, Estimate | None]
    truncated: dict[str, Estimate]
    loops: dict[str, Estimate]
    empty: dict[str, Estimate]
    tokens_per_correct: dict[str, Estimate | None]


@dataclasses.dataclass(frozen=True)
class Band:
    """Where 95 % of the values lie that an arm without any true difference would show."""

    low: Number
    high: Number


@dataclasses.dataclass(frozen=True)
class NoiseFloor:
    """One arm measured twice on its own weights under conditions that should not matter.

    conditions: what was changed on purpose.
    median: band of the median recovery.
    benchmarks: label -> band of its recovery.
    differing: share of the items with another score.
    kl: nats per token between the two; None where fidelity was not measured twice.
    top1: their agreement; None likewise.
    """

    arm: str
    conditions: dict[str, object]
    median: Band | None
    benchmarks: dict[str, Band]
    differing: Estimate | None
    kl: Estimate | None
    top1: Estimate | None


@dataclasses.dataclass(frozen=True)
class TrainedSeed:
    """One training of an arm that was trained under several seeds.

    values: what it shows by itself (median recovery, recovery of each benchmark, KL divergence in nats, ...).
    """

    seed: int
    checkpoint: str
    values: dict[str, Number]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything the report says about PTQ and QAD against BF16.

    median_recovery: per arm, over the headline rows that have a recovery.
    worst: label and recovery of the lowest of all rows.
    kl_ratio: KL of qad / KL of ptq.
    kl_ratio_plain: KL of qad / KL of ptq_plain.
    perplexity_gap_closed: (ptq - qad) / (ptq - bf16); None unless the interval of the PTQ gap lies above 0.
    throughput_ratio: arm -> phase (with its shape where a phase was measured at several) -> speed / bf16's.
    not_compared: what was left out and why.
    contrasts: every arm against bf16 and qad against ptq, benchmark by benchmark.
    median_gain: median recovery of qad minus that of ptq.
    memory_ratio: bytes on disk / bf16's, exact.
    failure_share: failed / sent requests.
    emulated: arms whose speed was measured without FP4 arithmetic.
    sources: arm -> where imported scores come from.
    serving_ratio: arm -> cell -> tokens_per_s, ttft_ms, tpot_ms relative to bf16's, above 1 is better; cells that may not be
        compared are missing.
    outputs: the generated benchmarks, what their answers looked like.
    noise_floor: arm -> it against itself.
    training_seeds: arm -> its trainings under several seeds, of which its numbers are means
        (harness.compare.training_seeds); size, speed and noise floor are the first one's.
    """

    __pydantic_config__ = STRICT
    arms: list[str]
    benchmarks: list[BenchmarkRow]
    median_recovery: dict[str, Estimate]
    worst: dict[str, tuple[str, Estimate]]
    fidelity: dict[str, FidelityRow]
    kl_ratio: Estimate | None
    perplexity_gap_closed: Estimate | None
    throughput_ratio: dict[str, dict[str, Estimate]]
    not_compared: list[str]
    contrasts: list[Contrast] = dataclasses.field(default_factory=list)
    median_gain: Estimate | None = None
    memory_ratio: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    kl_ratio_plain: Estimate | None = None
    failure_share: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    emulated: list[str] = dataclasses.field(default_factory=list)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    serving_ratio: dict[str, dict[str, dict[str, Estimate]]] = dataclasses.field(default_factory=dict)
    outputs: list[OutputRow] = dataclasses.field(default_factory=list)
    noise_floor: dict[str, NoiseFloor] = dataclasses.field(default_factory=dict)
    training_seeds: dict[str, list[TrainedSeed]] = dataclasses.field(default_factory=dict)


def standing(estimate: Estimate | None, null: float) -> str:
    """Whether an interval leaves out `null`, the value of no difference: stands out, within noise or inconclusive."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return "inconclusive"
    return "within noise" if estimate.low <= null <= estimate.high else "stands out"


def to_json(comparison: Comparison) -> dict[str, object]:
    """Plain JSON types."""
    return dataclasses.asdict(comparison)


def from_json(raw: dict[str, object]) -> Comparison:
    """The reverse of `to_json`; a number that is null was not finite. Raises ValueError where fields do not fit."""
    return build(Comparison, raw, "comparison")
