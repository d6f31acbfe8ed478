"""Values of annotated types out of JSON, each place held against its type: records and comparisons come from anywhere."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

_SCALARS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
_NAMES = {**_SCALARS, type(None): "null", dict: "an object", list: "a list"}


def build(cls: Any, value: Any, where: str, null: float | None = None) -> Any:
    """Rebuild a value of (possibly nested) annotated type `cls` from JSON types. null: what the null of a number stands for,
    None: nothing. Raises ValueError naming the place and what was expected there."""
    if dataclasses.is_dataclass(value) or cls is Any:
        return value
    if dataclasses.is_dataclass(cls):
        return _build_dataclass(cls, value, where, null)
    origin, args = get_origin(cls), get_args(cls)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)) or (origin is tuple and len(value) != len(args)):
            raise _unfit(where, value, "a list" if origin is list else f"a list of {len(args)}")
        kinds = args if origin is tuple else args * len(value)
        return origin(
            build(kind, item, f"{where}[{i}]", null) for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict:
        return {
            name: build(args[1], item, f"{where}.{name}", null) for name, item in expect_object(value, where).items()
        }
    if origin in (Union, types.UnionType):
        return None if value is None else build(next(a for a in args if a is not type(None)), value, where, null)
    return _scalar(cls, value, where, null)


def _scalar(cls: type, value: Any, where: str, null: float | None) -> Any:
    if cls is float and value is None and null is not None:
        return null
    if cls is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise _unfit(where, value, _SCALARS[cls])
    return value


def expect_object(value: Any, where: str) -> dict[str, Any]:
    """The value. Raises ValueError where it is no object."""
    if not isinstance(value, dict):
        raise _unfit(where, value, "an object")
    return value


def _unfit(where: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{where} is {_NAMES.get(type(value), type(value).__name__)}, expected {expected}")


def _build_dataclass(cls: Any, value: Any, where: str, null: float | None) -> Any:
    value = expect_object(value, where)
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(value) - set(fields))
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(value))
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    return cls(**{name: build(hints[name], item, f"{where}.{name}", null) for name, item in value.items()})
