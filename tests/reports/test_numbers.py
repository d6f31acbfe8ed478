"""Numbers as they are printed: units that match their divisors, limits with the value's decimals, names made visible."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import pytest

from harness.records.comparison import Estimate
from reports.numbers import gigabytes, gigabytes_in_column, interval, percent, percent_interval, plural, significant


def estimate(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value, low, high, 10, 10, "test")


@pytest.mark.parametrize(
    ("count", "gb", "gib"),
    [
        (14_480_000_000, "14.48", "13.49"),
        (269_060_200, "0.269", "0.251"),
        (2**30, "1.074", "1.000"),
        (83_000_000_000, "83.00", "77.30"),
        (0, "0.00", "0.00"),
    ],
)
def test_gigabytes_and_gibibytes(count: int, gb: str, gib: str) -> None:
    assert gigabytes(count) == gb
    assert gigabytes(count, binary=True) == gib


def test_a_column_has_one_number_of_decimals() -> None:
    assert [gigabytes_in_column(n, 16_060_000_000) for n in (16_060_000_000, 524_000_000, 1_680, 0)] == [
        "16.06",
        "0.52",
        "< 0.01",
        "0",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(0.98941, "98.9 %"), (1.004, "100.4 %"), (0.0, "0.0 %"), (-0.021, "−2.1 %"), (0.99999, "100.0 %")]
)
def test_percent(value: float, text: str) -> None:
    assert percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.18934, "0.189"),
        (18.204, "18.2"),
        (1234.5, "1,234"),
        (0.000031, "3.10e−05"),
        (0.0, "0"),
        (-0.5, "−0.500"),
        (99.97, "100.0"),
        (2.5e9, "2.50e+09"),
    ],
)
def test_significant(value: float, text: str) -> None:
    assert significant(value) == text


def test_interval_has_the_decimals_of_its_value() -> None:
    assert interval(estimate(0.18934, 0.1671, 1.218)) == "0.167–1.218"
    assert percent_interval(estimate(0.989, 0.9712, 1.004)) == "97.1–100.4"
    assert interval(estimate(0.1, -0.02, 0.22)) == "−0.020 to 0.220"


def test_no_interval_is_no_text() -> None:
    assert interval(estimate(0.5, None, None)) == ""
    assert interval(estimate(0.0, 0.0, 0.0)) == ""


def test_plural() -> None:
    assert [plural(n, "item") for n in (0, 1, 1200)] == ["0 items", "1 item", "1,200 items"]
