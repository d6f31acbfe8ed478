"""What has to hold for a checkpoint to ship: thresholds, read from a small YAML file or shipped by name.

    name: mine
    about: one sentence
    median_recovery: {at_least: 0.99}      # share of BF16's score, median over benchmarks
    worst_benchmark: {at_least: 0.95}      # the same of every benchmark
    kl:              {at_most: 0.05}       # nats per token, to the BF16 teacher
    top1:            {at_least: 0.9}       # share of tokens
    memory_ratio:    {at_most: 0.4}        # bytes on disk / BF16's
    speed_up:        {at_least: 1.5, phase: decode}
    served:          {at_least: 1.2, metric: tokens_per_s}   # of every load asked of the servers; or ttft_ms, tpot_ms
    failure_share:   {at_most: 0.01}       # failed / sent requests
    confidence:      0.95                  # of the interval that a threshold is held against (this is the default)

Every threshold is optional, at least one is there. A threshold holds for the whole interval, see harness.compare.gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic

from qad.recipes.strict_yaml import Strict, read_shipped

SHIPPED = Path(__file__).parents[1] / "policies"
DEFAULT = "drop-1pct"

Share = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class AtLeast(Strict):
    at_least: Share


class AtMost(Strict):
    at_most: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class SpeedUp(Strict):
    """phase: prefill or decode, with its shape where one phase was measured at several."""

    at_least: Share
    phase: str = "decode"


class Served(Strict):
    """metric: tokens_per_s, or bf16's ttft_ms or tpot_ms over the arm's: above 1 is better in all."""

    at_least: Share
    metric: Literal["tokens_per_s", "ttft_ms", "tpot_ms"] = "tokens_per_s"


# Beyond these a threshold could never fail, or never pass.
_LARGEST = {"median_recovery": 2, "worst_benchmark": 2, "top1": 1, "memory_ratio": 2, "failure_share": 1}


class Policy(Strict):
    name: str
    about: str = ""
    median_recovery: AtLeast | None = None
    worst_benchmark: AtLeast | None = None
    kl: AtMost | None = None
    top1: AtLeast | None = None
    memory_ratio: AtMost | None = None
    speed_up: SpeedUp | None = None
    served: Served | None = None
    failure_share: AtMost | None = None
    confidence: Annotated[float, pydantic.Field(gt=0.5, le=0.9999)] = 0.95

    @pydantic.model_validator(mode="after")
    def _asks_for_something(self) -> Policy:
        if not self.thresholds:
            raise ValueError(f"it has no threshold: give one of {', '.join(THRESHOLDS)}")
        for name, threshold in self.thresholds.items():
            limit = threshold.at_most if isinstance(threshold, AtMost) else threshold.at_least
            if limit > _LARGEST.get(name, limit):
                raise ValueError(f"{name} is a share, at most {_LARGEST[name]}: {limit:g} in percent is {limit / 100:g}")
        return self

    @property
    def thresholds(self) -> dict[str, AtLeast | AtMost | SpeedUp | Served]:
        """Name -> threshold, of those that are given."""
        return {name: found for name in THRESHOLDS if (found := getattr(self, name)) is not None}


THRESHOLDS = tuple(name for name in Policy.model_fields if name not in ("name", "about", "confidence"))


def load_policy(name: str) -> Policy:
    """A YAML file, or a shipped policy by name. Raises UsageError, in one line, for anything else."""
    hint = f"; thresholds are {', '.join(THRESHOLDS)}, each at_least or at_most"
    return read_shipped(Policy, name, SHIPPED, "policy", "policies", hint)[0]
