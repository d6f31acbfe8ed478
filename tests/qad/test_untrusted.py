"""Values of foreign JSON."""

from __future__ import annotations

import pytest

from qad.untrusted import is_number, mapping, names


@pytest.mark.parametrize("value", [None, 1, "a", ["a"], True])
def test_what_is_no_object_is_an_empty_one(value: object) -> None:
    assert mapping(value) == {}
    assert mapping({"a": value}) == {"a": value}


def test_names_are_the_strings_of_a_list() -> None:
    assert names(["a", 1, None, "b"]) == ["a", "b"]
    assert names("ab") == names({"a": 1}) == names(None) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (-1.5, True), (True, False), (float("nan"), False), (float("inf"), False), ("1", False), (None, False)],
)
def test_a_number_is_finite_and_no_truth_value(value: object, expected: bool) -> None:
    assert is_number(value) is expected
