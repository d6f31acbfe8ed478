"""What a gate says: types only, which reports render. No torch here."""

from __future__ import annotations

import dataclasses

from harness.records.rebuild import STRICT

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}


@dataclasses.dataclass(frozen=True)
class Check:
    """One threshold.

    rule: what is asked, in words.
    value, low, high: what was found; None where it was not measured or has no interval.
    why: in words.
    probability: that the limit holds, given these measurements; None where there is no interval.
    """

    threshold: str
    rule: str
    outcome: str
    value: float | None
    low: float | None
    high: float | None
    why: str
    probability: float | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """outcome of `arm` by the policy: PASS, FAIL or INCONCLUSIVE.

    others: outcome of every other arm.
    paragraph: the same in plain words, with the reason.
    reason: the check that decides, in one line.
    next_action: what to do, in one line.
    """

    __pydantic_config__ = STRICT
    outcome: str
    policy: str
    about: str
    arm: str
    checks: list[Check]
    others: dict[str, str]
    paragraph: str
    reason: str = ""
    next_action: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


def to_json(verdict: Verdict) -> dict[str, object]:
    """Plain JSON types."""
    return dataclasses.asdict(verdict)
