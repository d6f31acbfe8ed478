"""JSON files of a folder that somebody else wrote: regular files alone, and in what their readers would differ."""

from __future__ import annotations

from pathlib import Path

from qad.untrusted import json_with_faults, regular_bytes


def read_json(path: Path) -> dict[str, object] | None:
    """The object a JSON file holds; None where there is none."""
    return _object_in(path)[0]


def json_faults(path: Path) -> list[str]:
    """What readers of a JSON file would differ in: a key twice, half a character."""
    return _object_in(path)[1]


def _object_in(path: Path) -> tuple[dict[str, object] | None, list[str]]:
    try:
        value, faults = json_with_faults(regular_bytes(path))
    except (OSError, ValueError):
        return None, []
    return (value, faults) if isinstance(value, dict) else (None, [])
