"""What has to hold for a checkpoint to ship: thresholds, read from a small YAML file or shipped by name.

    name: mine
    about: one sentence
    median_recovery: {at_least: 0.99}      # share of BF16's score, median over benchmarks
    worst_benchmark: {at_least: 0.95}      # the same of every benchmark
    kl:              {at_most: 0.05}       # nats per token, to the BF16 teacher
    top1:            {at_least: 0.9}       # share of tokens
    memory_ratio:    {at_most: 0.4}        # bytes on disk / BF16's
    speed_up:        {at_least: 1.5, phase: decode}
    failure_share:   {at_most: 0.01}       # failed / sent requests

Every threshold is optional, at least one is there. A threshold holds for the whole interval, see harness.gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pydantic
import yaml

from qad.errors import UsageError

SHIPPED = Path(__file__).parent / "policies"
DEFAULT = "drop-1pct"

Share = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class AtLeast(_Strict):
    at_least: Share


class AtMost(_Strict):
    at_most: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class SpeedUp(_Strict):
    """phase: prefill or decode, with its shape where one phase was measured at several."""

    at_least: Share
    phase: str = "decode"


class Policy(_Strict):
    name: str
    about: str = ""
    median_recovery: AtLeast | None = None
    worst_benchmark: AtLeast | None = None
    kl: AtMost | None = None
    top1: AtLeast | None = None
    memory_ratio: AtMost | None = None
    speed_up: SpeedUp | None = None
    failure_share: AtMost | None = None

    @pydantic.model_validator(mode="after")
    def _asks_for_something(self) -> Policy:
        if not self.thresholds:
            raise ValueError(f"it has no threshold: give one of {', '.join(THRESHOLDS)}")
        return self

    @property
    def thresholds(self) -> dict[str, AtLeast | AtMost | SpeedUp]:
        """Name -> threshold, of those that are given."""
        return {name: found for name in THRESHOLDS if (found := getattr(self, name)) is not None}


THRESHOLDS = ("median_recovery", "worst_benchmark", "kl", "top1", "memory_ratio", "speed_up", "failure_share")


def shipped_policies() -> list[str]:
    """Names that `load_policy` takes without a file."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_policy(name: str) -> Policy:
    """A YAML file, or a shipped policy by name. Raises UsageError, in one line, for anything else."""
    path = Path(name)
    if not path.is_file():
        if name not in shipped_policies():
            raise UsageError(
                f"policy {name!r} is neither a file nor shipped: shipped policies are {', '.join(shipped_policies())}"
            )
        path = SHIPPED / f"{name}.yaml"
    try:
        return Policy.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"policy {path} is not YAML: {str(error).splitlines()[0]}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the policy"
        raise UsageError(
            f"policy {path}: {where}: {first['msg']}; thresholds are {', '.join(THRESHOLDS)}, each at_least or at_most"
        ) from error
