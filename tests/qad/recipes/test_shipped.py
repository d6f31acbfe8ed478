"""Recipes that come with the tool: each validates, says where it is from, asks for nothing that is not there, and plans for a
model of its family from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_families import config_of

from harness.accuracy.suite import load_suite
from qad.command.planning.plan import plan
from qad.errors import UsageError
from qad.recipes.load import load_recipe, shipped_recipes
from qad.recipes.recipe import Recipe

PUBLISHED = {  # arXiv 2601.20088: tokens, learning rate
    "acereason-7b": (800_000_000, 1e-5),
    "nemotron-super-49b": (300_000_000, 1e-6),
    "nemotron-nano-9b-v2": (6_000_000_000, 1e-6),
    "nemotron-nano-12b-v2-vl": (500_000_000, 2e-6),
    "nemotron-3-nano-30b-a3b": (2_500_000_000, 1e-5),
}
FAMILY = {  # of tiny_families; what differs is what the recipe's globs need
    "acereason-7b": "Qwen2",
    "nemotron-super-49b": "Llama",
    "nemotron-nano-9b-v2": "Nemotron-H dense",
    "nemotron-nano-12b-v2-vl": "Nemotron-H dense",
    "nemotron-3-nano-30b-a3b": "Nemotron-H MoE",
    "lightning-max": "Nemotron-H MoE",
    "lightning-mamba-fp8-max": "Nemotron-H MoE",
    "lightning-mse": "Nemotron-H MoE",
    "lightning-four-over-six": "Nemotron-H MoE",
    "lightning-four-over-six-nvfp4-kv": "Nemotron-H MoE",
    "smollm2-135m": "Llama",
    "smollm2-135m-full": "Llama",
    "llama-3": "Llama",
    "qwen3": "Qwen3",
    "qwen3-moe": "Qwen3-MoE",
    "qwen3-vl": "Qwen3-VL",
    "gemma-3": "Gemma3",
    "nemotron-h": "Nemotron-H dense",
    "gpt-oss": "gpt-oss",
    "deepseek": "DeepSeek-V3",
}
LAYERS = {"nemotron-nano-9b-v2": 56}


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_validates_and_names_its_source(name: str) -> None:
    recipe = load_recipe(name)
    comment = [line for line in shipped_recipes()[name].read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(word in " ".join(comment) for word in ("Source:", "starting point", "make demo"))
    if recipe.measure.accuracy and recipe.measure.accuracy.suite:
        load_suite(recipe.measure.accuracy.suite)


def test_no_two_differ_by_a_name_only() -> None:
    contents = [load_recipe(name).model_copy(update={"model": ""}).model_dump_json() for name in shipped_recipes()]
    alike = {"nemotron-nano-12b-v2-vl"}  # nothing of these is published but what the other one says as well
    assert len(set(contents)) >= len(contents) - len(alike)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_plans_from_a_config_alone(name: str, tmp_path: Path) -> None:
    config: dict[str, Any] = config_of(FAMILY[name]).to_dict()
    if name in LAYERS:
        config["layers_block_type"] = (config["layers_block_type"] * LAYERS[name])[: LAYERS[name]]
        config.pop("num_hidden_layers", None)
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    lines: list[str] = []
    plan(load_recipe(name, [f"model={tmp_path}"]), lines.append)
    assert any("Linears are quantized" in line for line in lines), lines
    assert any(line.startswith("train") for line in lines) == (load_recipe(name).train is not None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_as_published(name: str) -> None:
    train = load_recipe(name).training
    tokens, lr = PUBLISHED[name]
    assert (train.tokens, train.lr, train.schedule) == (tokens, lr, "constant")
    assert train.method == "qad"
    assert train.betas == (0.9, 0.95)


def test_there_is_one_for_each_published_ptq_of_lightning() -> None:
    found = {name: load_recipe(name) for name in shipped_recipes() if name.startswith("lightning")}
    assert {name: (r.quantize.scales, r.quantize.kv_format) for name, r in found.items()} == {
        "lightning-max": ("dynamic", "FP8"),
        "lightning-mamba-fp8-max": ("dynamic", "FP8"),
        "lightning-mse": ("mse", "FP8"),
        "lightning-four-over-six": ("four_over_six", "FP8"),
        "lightning-four-over-six-nvfp4-kv": ("four_over_six", "NVFP4"),
    }
    assert all(r.quantize.format == "W4A16_NVFP4" and r.quantize.kv_cache == "calibrated" for r in found.values())
    trains = {(r.training.lr, r.training.steps, r.training.batch_size, r.training.seq_len) for r in found.values()}
    assert trains == {(5e-6, 400, 16, 32768)}
    assert found["lightning-mamba-fp8-max"].quantize.formats == {"*.mixer.in_proj": "FP8", "*.mixer.out_proj": "FP8"}


def test_a_recipe_stands_on_another(tmp_path: Path) -> None:
    """Sections are merged; a source of text and a mapping of globs are the recipe's own."""
    (tmp_path / "below.yaml").write_text(
        "model: below\nquantize: {scales: mse, formats: {'*.a': FP8}}\n"
        "calibrate: {data: {source: text, path: a.txt}, samples: 7}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "base: below.yaml\nseed: 3\nquantize: {formats: {'*.b': FP8}}\ncalibrate: {data: python-docs}\n"
    )
    recipe = load_recipe(str(tmp_path / "own.yaml"), ["calibrate.seq_len=9"])
    assert (recipe.model, recipe.seed, recipe.quantize.scales, recipe.base) == ("below", 3, "mse", None)
    assert recipe.quantize.formats == {"*.b": "FP8"}
    assert recipe.calibrate is not None
    assert (recipe.calibrate.samples, recipe.calibrate.seq_len) == (7, 9)
    assert isinstance(recipe, Recipe)


@pytest.mark.parametrize(
    ("text", "told"), [("base: own.yaml", "in a circle"), ("base: [a]", "base is"), ("base: nothing", "neither")]
)
def test_a_base_that_is_none_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "own.yaml").write_text(f"{text}\nmodel: x\n")
    with pytest.raises(UsageError, match=told):
        load_recipe(str(tmp_path / "own.yaml"))
