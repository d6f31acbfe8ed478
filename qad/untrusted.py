"""Values out of JSON that others wrote: what each is, before it is used."""

from __future__ import annotations

import math
from typing import Any, TypeGuard


def mapping(value: object) -> dict[str, Any]:
    """The value itself where it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def names(value: object) -> list[str]:
    """The strings of a list; empty for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
