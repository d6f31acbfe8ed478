"""Numbers and names as a reader sees them. Rounding happens here, for display, and nowhere before a comparison."""

# ruff: noqa: RUF001, RUF002 - typographic characters are what is printed
from __future__ import annotations

import math
from collections.abc import Callable

from harness.records.comparison import Estimate

GB, GIB = 10**9, 2**30
Format = Callable[[float, float], str]  # value, the scale that sets the number of decimals -> text


def percent(share: float, scale: float = 0.0) -> str:
    """0.9894 -> 98.9 %."""
    return f"{_bare_percent(share, scale)} %"


def _bare_percent(share: float, scale: float = 0.0) -> str:
    return _minus(f"{100 * share:.1f}")


def significant(value: float, scale: float = 0.0, digits: int = 3) -> str:
    """`digits` significant digits of `scale` (of the value where it is 0), so that limits show the value's decimals."""
    size = abs(scale or value)
    if size == 0:
        return _minus(f"{value:.1e}") if value else "0"
    exponent = math.floor(math.log10(size))
    if not -4 <= exponent <= 6:
        return _minus(f"{value:.{digits - 1}e}")
    return _minus(f"{value:,.{max(0, digits - 1 - exponent)}f}")


def _minus(text: str) -> str:
    return text.replace("-", "−")


def interval(estimate: Estimate, form: Format = significant) -> str:
    """97.1–100.4, or "" where there is none or it has no width. `form` writes a limit without its unit."""
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return ""
    low, high = form(estimate.low, estimate.value), form(estimate.high, estimate.value)
    return f"{low} to {high}" if set("−+e") & set(low + high) else f"{low}–{high}"


def percent_interval(estimate: Estimate) -> str:
    return interval(estimate, _bare_percent)


def signed(value: float) -> str:
    """+3.4 or −3.4, one decimal."""
    return _minus(f"{value:+.1f}")


def points_interval(estimate: Estimate) -> str:
    """+1.8 to +5.0 points of a difference of shares, or "" where there is none."""
    return interval(estimate, lambda limit, _scale: signed(100 * limit))


def gigabytes(count: int, *, binary: bool = False) -> str:
    """Bytes / 1e9, or / 2^30 with `binary`; without unit. 14480000000 -> 14.48, 13.49."""
    value = count / (GIB if binary else GB)
    return f"{value:.2f}" if value >= 10 or value == 0 else significant(value, digits=4 if value >= 1 else 3)


def gigabytes_in_column(count: int, largest: int) -> str:
    """The same with the decimals that `largest`, the column's largest number of bytes, asks for."""
    decimals = 2 if largest >= 10 * GB else 3 if largest >= GB else 4 if largest >= GB / 100 else 6
    text = f"{count / GB:.{decimals}f}"
    return "0" if count == 0 else text if float(text) else f"< {10**-decimals:.{decimals}f}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def people_list(words: list[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
