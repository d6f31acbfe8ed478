"""Data of a parity record: an engine's log-probabilities beside the torch reference's. No torch here."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from harness.records.fidelity import LATER
from harness.records.rebuild import STRICT


@dataclasses.dataclass(frozen=True)
class ParityPrompt:
    """One sequence in the engine and in the reference, over the whole vocabulary at every position.

    max_difference, mean_difference: of a log-probability, nats; the mean is over positions and vocabulary, and None in records
    from before it was kept. tokens_equal: generated tokens that are the reference's argmax as well. mean_kl: KL(reference ||
    engine), nats; floor_kl: KL(reference || the reference in a finer dtype), None where it was not needed. None elsewhere: not a
    number. ties: blocks of activations on the edge between two codes that the reference decided as the engine did before it
    agreed (harness.parity.ties); None: it needed none, or they could not be had. untied_difference: max_difference without them.
    parts_at: of a prompt that does not agree, the first Linear whose input in the engine is not the reference's; None: unknown.
    """

    input_tokens: int
    output_tokens: int
    max_difference: float | None
    tokens_equal: int
    mean_kl: float | None
    floor_kl: float | None
    mean_difference: float | None = dataclasses.field(default=None, metadata=LATER)
    ties: int | None = dataclasses.field(default=None, metadata=LATER)
    untied_difference: float | None = dataclasses.field(default=None, metadata=LATER)
    parts_at: str | None = dataclasses.field(default=None, metadata=LATER)


@dataclasses.dataclass(frozen=True)
class ParityLayer:
    """A Linear alone, on the reference's input. max_difference: of its largest output; None: not a number."""

    module: str
    max_difference: float | None


@dataclasses.dataclass(frozen=True)
class ParityData:
    """Whether an engine computes what the folder says (harness.parity.rules has the rules). failures: empty where it does.

    reference: what it was compared with, with versions. engine_log: the engine's own lines about its kernels.
    """

    KIND: ClassVar[str] = "parity"
    __pydantic_config__ = STRICT
    prompts: list[ParityPrompt]
    layers: list[ParityLayer]
    tolerance: float
    layer_tolerance: float
    floor_factor: float
    reference: str
    engine_log: list[str]
    failures: list[str]

    @property
    def holds(self) -> bool:
        """True where nothing but rounding lies between engine and reference."""
        return not self.failures
