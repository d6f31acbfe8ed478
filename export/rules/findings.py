"""What the checker says: one finding a fault, with the module, what an engine would do, and the remedy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from qad.untrusted import clean


@dataclasses.dataclass(frozen=True)
class Finding:
    """severity: error or warning. engine: vllm, trtllm or all. module: a module, tensor or file name."""

    rule: str
    severity: str
    module: str
    engine: str
    message: str
    remedy: str


def error(rule: str, module: str, message: str, remedy: str, engine: str = "all") -> Finding:
    return Finding(rule, "error", module, engine, message, remedy)


def warning(rule: str, module: str, message: str, remedy: str, engine: str = "all") -> Finding:
    return Finding(rule, "warning", module, engine, message, remedy)


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """For a terminal, two lines a finding; equal findings of many modules are one, with their number and the first module."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        alike = re.sub(r"\d+", "#", finding.message)
        groups.setdefault((finding.severity, finding.rule, finding.engine, finding.remedy, alike), []).append(finding)
    lines = []
    for members in groups.values():
        first = members[0]
        many = f"x{len(members)}, such as " if len(members) > 1 else ""
        lines.append(
            f"{first.severity}: {first.rule} {many}{clean(first.module, 300)} ({first.engine}): {clean(first.message, 1000)}"
        )
        lines.append(f"    remedy: {clean(first.remedy, 300)}")
    return lines


def to_json(findings: Sequence[Finding]) -> dict[str, object]:
    """{"ok": bool, "findings": [...]}; warnings leave ok true."""
    return {"ok": not any(f.severity == "error" for f in findings), "findings": [dataclasses.asdict(f) for f in findings]}
