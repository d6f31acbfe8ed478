"""Studies are recipes that load, each on top of the one before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qad.recipes.load import load_recipe

STUDIES = sorted((Path(__file__).parents[3] / "studies").glob("*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_is_a_recipe_that_says_its_own_command(path: Path) -> None:
    recipe = load_recipe(str(path))
    assert f"qad run studies/{path.name} --out runs/{path.stem}" in path.read_text(encoding="utf-8")
    assert recipe.measure.fidelity is not None
    assert recipe.measure.fidelity.split is not recipe.quantize.balance
    assert recipe.quantize.scales == "mse"


def test_gptq_stands_on_balance() -> None:
    recipe = load_recipe(str(STUDIES[0].parent / "gptq.yaml"))
    assert (recipe.quantize.balance, recipe.quantize.rounding) == (True, "gptq")
