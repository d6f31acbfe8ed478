"""Recipes are refused in one line that says what to do; nothing else happens first."""

from __future__ import annotations

from pathlib import Path

import pytest

from qad.config import load_recipe, shipped_recipes
from qad.errors import UsageError

BASE = """
model: somewhere
calibrate: {data: python-docs}
train: {data: python-docs, tokens: 100000, lr: 1e-5}
"""


def recipe(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_shipped_recipe_is_valid_and_usable_by_name() -> None:
    assert shipped_recipes()
    for name in shipped_recipes():
        assert load_recipe(name).train.steps > 0


def test_defaults_are_the_published_method(tmp_path: Path) -> None:
    loaded = load_recipe(recipe(tmp_path, BASE))
    assert loaded.train.lr == 1e-5
    assert (loaded.train.betas, loaded.train.clip, loaded.train.schedule) == ((0.9, 0.95), 1.0, "constant")
    assert loaded.quantize.format == "NVFP4"


def test_overrides_reach_any_depth_and_keep_their_types(tmp_path: Path) -> None:
    loaded = load_recipe(recipe(tmp_path, BASE), ["train.lr=2e-6", "measure.accuracy.tasks=[a, b]", "model=other/name"])
    assert loaded.train.lr == 2e-6
    assert loaded.measure.accuracy is not None
    assert loaded.measure.accuracy.tasks == ["a", "b"]
    assert loaded.model == "other/name"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown key 'train.lrr': did you mean 'lr'?"),
        ("quantise.format=NVFP4", "unknown key 'quantise': did you mean 'quantize'?"),
        ("measure.fidelity.tokns=5", "measure.fidelity"),
        ("quantize.format=w4a4", "quantize.format: Input should be 'NVFP4' or 'W4A16_NVFP4' (got 'w4a4')"),
        ("train.lr=-1", "train.lr"),
        ("train.tokens=10", "less than one step"),
        ("train.micro_batch_size=3", "does not divide"),
        ("train.data={source: text}", "needs path"),
        ("nonsense", "expected key=value"),
    ],
)
def test_a_bad_value_is_one_line_that_says_what_to_do(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(recipe(tmp_path, BASE), [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not valid YAML"),
        ("- a\n- b\n", "not a recipe"),
        ("model: a\nmodel: b\n", "appears twice"),
        ("calibrate: {data: x.txt}\ntrain: {data: x.txt, tokens: 100000}\n", "key 'model' is missing"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(recipe(tmp_path, text))


def test_a_missing_recipe_names_the_nearest_shipped_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'smollm2-135m'"):
        load_recipe("smolm2-135m")
