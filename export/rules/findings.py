"""What the checker says: one finding a fault, with the module, what an engine would do, and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


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


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """{"ok": bool, "findings": [...]}; warnings leave ok true."""
    return {
        "ok": not any(f.severity == "error" for f in findings),
        "findings": [dataclasses.asdict(f) for f in findings],
    }
