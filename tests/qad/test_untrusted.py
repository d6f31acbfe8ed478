"""Foreign JSON: one strict reader of values and lines, and what each value is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qad.untrusted import clean, count, is_number, json_lines, mapping, names, regular_bytes, strict_json, text_lines

SEPARATORS = ["\u2028", "\u2029", "\x85", "\x1c", "\x0b", "\x0c"]  # where str.splitlines cuts


@pytest.mark.parametrize("value", [None, 1, "a", ["a"], True])
def test_what_is_no_object_is_an_empty_one(value: object) -> None:
    assert mapping(value) == {}
    assert mapping({"a": value}) == {"a": value}


def test_names_are_the_strings_of_a_list() -> None:
    assert names(["a", 1, None, "b"]) == ["a", "b"]
    assert names("ab") == names({"a": 1}) == names(None) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, True),
        (-1.5, True),
        (True, False),
        (float("nan"), False),
        (float("inf"), False),
        ("1", False),
        (None, False),
        (10**400, False),
    ],
)
def test_a_number_is_finite_and_no_truth_value(value: object, expected: bool) -> None:
    assert is_number(value) is expected


@pytest.mark.parametrize("value", [-7, 1.0, True, "3", None, [1]])
def test_a_count_is_a_whole_number_from_0(value: object) -> None:
    assert count(value) is None
    assert (count(0), count(7)) == (0, 7)


REFUSED = {
    "a key twice": ('{"a": {"b": 1, "b": 1}}', "the key 'b' occurs twice"),
    "a key twice, written otherwise": ('{"a": 1, "\\u0061": 2}', "the key 'a' occurs twice"),
    "a long key twice": (f'{{"{"k" * 9999}": 1, "{"k" * 9999}": 2}}', "occurs twice"),
    "brackets": ("[" * 100_000, "nested too deeply"),
    "braces": ('{"a":' * 100_000, "nested too deeply"),
    "1e999": ('{"a": 1e999}', "1e999 is too large a number"),
    "-1e999": ("[-1e999]", "too large a number"),
    "long whole numbers": ("9" * 100_000, "a number of 100,000 digits is too large"),
    "NaN": ("[NaN]", "NaN is no number of JSON"),
    "Infinity": ("[-Infinity]", "Infinity is no number of JSON"),
    "no JSON": ("{'a': 1}", "Expecting property name"),
    "two values": ("{} {}", "Extra data"),
    "nothing": ("", "Expecting value"),
    "bytes": (b'"\xff"', "can't decode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_strict_reader_refuses_it_names_in_one_line(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason) as caught:
        strict_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    if not text:
        return
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"a": 1}\n\n' + (text if isinstance(text, bytes) else text.encode()) + b"\n")
    lines = json_lines(file)
    assert next(lines) == (1, {"a": 1})
    with pytest.raises(ValueError, match=rf"line 3 is not JSON \(.*{reason}"):
        next(lines)


def test_what_python_writes_for_nan_may_be_null() -> None:
    written = json.dumps([float("nan"), float("inf"), -float("inf"), 1.5])
    assert strict_json(written, nan_is_null=True) == [None, None, None, 1.5]
    assert strict_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}, "a byte order mark is no part of the text"


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_newline_alone_ends_a_line(separator: str, tmp_path: Path) -> None:
    rows = [{"text": f"a{separator}b"}, {"text": f"{separator}"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\r\n" for row in rows), encoding="utf-8")
    if separator >= " ":  # the others have to be escaped in JSON
        assert [row for _, row in json_lines(path)] == rows
    assert [number for number, _ in text_lines(path)] == [1, 3]


def test_clean_shows_what_would_hide() -> None:
    assert clean("a\x00b\u202ec\ud800d\ne\u200bf") == "a�b�c�d�e�f"
    assert clean("a\n\tb", lines=True) == "a\n\tb"
    assert clean("日本 é") == "日本 é"
    assert clean("x" * 10_000) == "x" * 119 + "…"


def test_a_regular_file_alone_is_read(tmp_path: Path) -> None:
    """A pipe without a writer is not waited for."""
    file = tmp_path / "file"
    file.write_bytes(b"1234")
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    assert regular_bytes(file) == regular_bytes(tmp_path / "link", 4) == b"1234"
    with pytest.raises(ValueError, match="4 bytes, 3 at the most"):
        regular_bytes(file, 3)
    for name in ("pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="no regular file"):
            regular_bytes(tmp_path / name)
    for name in ("absent", "."):
        with pytest.raises((OSError, ValueError)):
            regular_bytes(tmp_path / name)
