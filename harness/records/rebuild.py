"""Values of annotated types out of JSON, each place held against its type: records and comparisons come from anywhere."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

import pydantic
import pydantic_core

from qad.untrusted import clean

T = TypeVar("T")
LARGEST = 1e100  # of a number: squares of it and their sums are finite

# Of every class that is read: nothing is converted, no field is dropped. Classes inside inherit it.
STRICT = pydantic.ConfigDict(strict=True, extra="forbid")

# A number that was not finite is null in JSON.
Number = Annotated[float, pydantic.BeforeValidator(lambda value: math.nan if value is None else value)]


def build(cls: type[T], value: object, where: str) -> T:
    """The dataclass `cls`, which names STRICT as its `__pydantic_config__`, rebuilt from JSON types.

    Raises ValueError, in one line, that names the first place that does not fit and what was expected there.
    """
    try:
        return _adapter(cls).validate_json(pydantic_core.to_json(value))  # from text: a list may be a tuple there
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in fault["loc"])
        given = "" if fault["type"] == "missing" else f", got {clean(repr(fault['input']), 40)}"
        raise ValueError(f"{clean(where + place)}: {fault['msg']}{given}") from None
    except pydantic_core.PydanticSerializationError as error:
        raise ValueError(f"{where} is no JSON: {clean(error)}") from None


def require_measurable(value: object) -> None:
    """Raises ValueError for JSON with a number whose square, or a sum of some, is beyond what a float holds."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            left += found.values()
        elif isinstance(found, list):
            left += found
        elif isinstance(found, (int, float)) and not abs(found) < LARGEST:
            raise ValueError(f"{found:.3g} is a number that nothing measures")


_ADAPTERS: dict[object, pydantic.TypeAdapter[Any]] = {}  # a large class takes a tenth of a second


def _adapter(cls: type[T]) -> pydantic.TypeAdapter[T]:
    return _ADAPTERS.get(cls) or _ADAPTERS.setdefault(cls, pydantic.TypeAdapter(cls))
