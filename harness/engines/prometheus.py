"""Samples of Prometheus' text format, as /metrics of a server gives them."""

from __future__ import annotations

import re

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of every sample of metric `name`; lines that are no samples are skipped."""
    found = []
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match is None or match[1] != name:
            continue
        labels = {key: re.sub(r"\\(.)", _unescape, value) for key, value in _LABEL.findall(match[2] or "")}
        try:
            found.append((labels, float(match[3])))
        except ValueError:
            continue
    return found


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
