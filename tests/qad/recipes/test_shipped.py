"""Recipes that come with the tool: each validates, says where it is from, and asks for nothing that is not there."""

from __future__ import annotations

import pytest

from harness.accuracy.suite import load_suite
from qad.recipes.load import load_recipe, shipped_recipes

PUBLISHED = {  # arXiv 2601.20088: tokens, learning rate
    "acereason-7b": (800_000_000, 1e-5),
    "nemotron-super-49b": (300_000_000, 1e-6),
    "nemotron-nano-9b-v2": (6_000_000_000, 1e-6),
    "nemotron-3-nano-30b-a3b": (2_500_000_000, 1e-5),
}


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_validates_and_names_its_source(name: str) -> None:
    recipe = load_recipe(name)
    comment = shipped_recipes()[name].read_text(encoding="utf-8").partition("\nmodel:")[0]
    assert comment.startswith("# ")
    assert any(word in comment for word in ("Source:", "starting point", "make demo"))
    if recipe.measure.accuracy and recipe.measure.accuracy.suite:
        load_suite(recipe.measure.accuracy.suite)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_as_published(name: str) -> None:
    train = load_recipe(name).training
    tokens, lr = PUBLISHED[name]
    assert (train.tokens, train.lr, train.schedule) == (tokens, lr, "constant")
    assert train.method == "qad"
    assert train.betas == (0.9, 0.95)


def test_there_is_one_for_each_published_ptq_of_lightning_that_is_computed_here() -> None:
    found = {name: load_recipe(name).quantize for name in shipped_recipes() if name.startswith("lightning")}
    assert {name: q.scales for name, q in found.items()} == {
        "lightning-max": "dynamic",
        "lightning-mamba-fp8-max": "dynamic",
        "lightning-mse": "mse",
        "lightning-four-over-six": "four_over_six",
    }
    assert all(q.format == "W4A16_NVFP4" and q.kv_cache == "calibrated" for q in found.values())
