"""`qad keys`: the list of recipe keys is that of the models, with a sentence each."""

from __future__ import annotations

import pytest

from qad.command.cli import main
from qad.command.planning.keys import keys_markdown, recipe_keys
from qad.recipes.recipe import Recipe, Train


def test_every_key_has_a_sentence_and_a_kind() -> None:
    keys = recipe_keys()
    assert [key.name for key in keys if not key.text or not key.kind] == []
    names = [key.name for key in keys]
    assert len(names) == len(set(names))
    assert set(Recipe.model_fields) <= set(names)
    assert {f"train.{name}" for name in Train.model_fields} <= set(names)


def test_a_key_is_told_with_its_type_its_default_and_whether_it_is_required() -> None:
    by_name = {key.name: key for key in recipe_keys("train")}
    assert by_name["train.lr"].kind == "number above 0"
    assert by_name["train.lr"].default == "1e-05"
    assert by_name["train.tokens"].default is None
    assert by_name["train.schedule"].kind == "constant | linear | cosine"
    assert by_name["train.data"].kind == "source, or a list of them"


def test_a_section_that_is_not_there_names_its_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    assert main(["keys", "measure.fidelity"]) == 0
    assert capsys.readouterr().out.startswith("measure.fidelity: section\n")


def test_the_table_keeps_its_columns_where_a_kind_holds_bars() -> None:
    rows = keys_markdown(recipe_keys()).splitlines()
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}
