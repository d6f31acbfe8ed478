"""One hybrid the whole way, and the page that `make families` wrote against the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_families import FAMILIES
from walk import page, walk

from qad.model.families import TRIED

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


@pytest.mark.filterwarnings("ignore")
def test_a_family_goes_the_whole_way(tmp_path: Path) -> None:
    seen = walk("LFM2", tmp_path)
    assert seen.note == ""
    assert seen.reload == "equal"
    assert seen.packing.startswith("one document a row")
    assert "| LFM2 |" in page([seen])


@pytest.mark.filterwarnings("ignore")
def test_a_refusal_is_a_row_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "Llama", ("llama", {"hidden_size": 40, "head_dim": None, "intermediate_size": 72}))
    seen = walk("Llama", tmp_path)
    assert seen.note.startswith("refused: nothing would be quantized")
    assert not seen.whole


def test_a_family_is_called_tried_where_its_row_on_the_page_is_whole() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \|.*\| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {*FAMILIES} <= {*rows}
    assert {FAMILIES[name][0] for name in FAMILIES if rows[name] == "whole"} == TRIED
