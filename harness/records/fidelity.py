"""Records of fidelity: how far a student is from its teacher, raw sums by sequence. harness.records.record hands them on."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from harness.records.rebuild import STRICT

# Of fields that came after the first records: None is not written, so that older readers read what they can.
LATER = {"later": True}


@dataclasses.dataclass(frozen=True)
class FidelitySequence:
    """Sums over the predicted tokens of one sequence; sequences are the clusters of every interval.

    kl_sum: nats, KL(teacher || student) over the full vocabulary. nll_*: nats of the text's own next token.
    """

    cluster: str
    tokens: int
    kl_sum: float
    top1_agree: int
    nll_teacher_sum: float
    nll_student_sum: float


@dataclasses.dataclass(frozen=True)
class FidelityStratum:
    """A part of the predicted tokens: lists hold one entry a sequence, in the record's order. kl_sum: nats."""

    name: str
    tokens: list[int]
    kl_sum: list[float]
    top1_agree: list[int]


@dataclasses.dataclass(frozen=True)
class LayerDistance:
    """error: sum |h_student - h_teacher|^2 / sum |h_teacher|^2 of the hidden states behind this layer."""

    name: str
    error: float


@dataclasses.dataclass(frozen=True)
class Continuation:
    """After one prompt. equal: tokens that both write greedily before they first differ. diverged: whether they did, within the
    tokens asked for. written: tokens the teacher wrote at temperature 1; nll_*: nats of those under each model."""

    cluster: str
    equal: int
    diverged: bool
    written: int
    nll_teacher: float
    nll_student: float


@dataclasses.dataclass(frozen=True)
class FidelityData:
    """Distance from the BF16 teacher on the test split. `token_kl`: quantiles p50 p90 p99 p99_9 and max, nats.

    by_position, by_entropy (deciles of the teacher's entropy), by_domain (sources of the text): strata of the tokens.
    by_part: the same tokens under the arm's weights alone, and under its quantized inputs alone (harness.fidelity.parts).
    bound: what the KL is a bound of, where it is none of the full vocabulary; None: exact.
    saturated_inputs: share of blocks of 16 inputs that lay above what was calibrated, over all quantized Linears; None: none
    quantizes its input, or nobody counted.
    """

    KIND: ClassVar[str] = "fidelity"
    __pydantic_config__ = STRICT
    data: str
    sequences: list[FidelitySequence]
    token_kl: dict[str, float]
    by_position: list[FidelityStratum] | None = dataclasses.field(default=None, metadata=LATER)
    by_entropy: list[FidelityStratum] | None = dataclasses.field(default=None, metadata=LATER)
    by_domain: list[FidelityStratum] | None = dataclasses.field(default=None, metadata=LATER)
    by_part: list[FidelityStratum] | None = dataclasses.field(default=None, metadata=LATER)
    by_layer: list[LayerDistance] | None = dataclasses.field(default=None, metadata=LATER)
    continuations: list[Continuation] | None = dataclasses.field(default=None, metadata=LATER)
    bound: str | None = dataclasses.field(default=None, metadata=LATER)
    saturated_inputs: float | None = dataclasses.field(default=None, metadata=LATER)
