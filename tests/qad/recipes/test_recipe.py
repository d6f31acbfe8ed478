"""Recipes are refused in one line that says what to do; nothing else happens first."""

from __future__ import annotations

from pathlib import Path

import pytest

from qad.errors import QadError, UsageError
from qad.model.source import open_checkpoint
from qad.recipes.load import load_recipe, shipped_recipes
from qad.recipes.recipe import Recipe

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
        assert load_recipe(name).model


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
        ("quantize.format=w4a4", "quantize.format: expected one of NVFP4, W4A16_NVFP4, FP8 (got 'w4a4')"),
        ("train.lr=-1", "train.lr"),
        ("train.tokens=10", "less than one step"),
        ("train.micro_batch_size=3", "does not divide"),
        ("train.data={source: text}", "key 'train.data.path' is missing"),
        ("train.data={source: python-docs, path: x}", "unknown key 'train.data.path'"),
        ("train.data={source: jsonl, path: x, feild: y}", "unknown key 'train.data.feild': did you mean 'field'?"),
        ("train.data=[notes.txt, {source: random, length: 0}]", "train.data.1.length: Input should be greater than 0 (got 0)"),
        ("train.data=[{source: text, path: x, weight: 0}]", "train.data.0.weight"),
        ("train.data={path: x}", "key 'train.data.source' is missing: one of hub, jsonl, python-docs, random, teacher, text"),
        ("train.data={source: wikipedia}", "train.data.source: one of hub, jsonl, python-docs, random, teacher, text (got"),
        ("train.data={source: teacher, prompts: {source: text}}", "key 'train.data.prompts.path' is missing"),
        ("train.data={source: teacher, prompts: {source: jsonl, path: x, fild: y}}", "'train.data.prompts.fild': did you mean"),
        ("train.data={source: teacher, prompts: {source: random}}", "train.data.prompts.source"),
        ("train.data={source: teacher, temperature: 0}", "train.data.temperature"),
        ("train.data=[]", "train.data"),
        ("train.data=7", "train.data"),
        ("train.epochs=1000", "epochs 1000 is more than the 48 steps"),
        ("train.loss_on=user", "train.loss_on: Input should be 'all' or 'assistant'"),
        ("nonsense", "expected key=value"),
    ],
)
def test_a_bad_value_is_one_line_that_says_what_to_do(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(recipe(tmp_path, BASE), [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_is_one_source_or_a_blend_and_is_resolved_to_a_list(tmp_path: Path) -> None:
    loaded = load_recipe(
        recipe(tmp_path, BASE),
        [
            "train.data=[notes.txt, {source: teacher, prompts: some/chat.jsonl, weight: 2}, {source: hub, path: owner/name}]",
            "train.validation_data={source: jsonl, path: a/b/chat.jsonl, field: messages}",
        ],
    )
    assert [s.source for s in loaded.train.data.root] == ["text", "teacher", "hub"]
    assert loaded.train.data.name == "notes.txt + generations from chat.jsonl + owner/name"
    assert loaded.train.validation_data is not None
    assert loaded.train.validation_data.name == "chat.jsonl"
    assert loaded.section("calibrate")["data"] == [{"weight": 1.0, "split": "auto", "source": "python-docs"}]
    again = Recipe.model_validate(loaded.model_dump(mode="json"))
    assert again == loaded


def test_an_epoch_takes_the_whole_steps_of_its_share(tmp_path: Path) -> None:
    settings = ["train.seq_len=100", "train.batch_size=2", "train.tokens=2000"]
    sizes = {
        epochs: load_recipe(recipe(tmp_path, BASE), [*settings, f"train.epochs={epochs}"]).train.windows
        for epochs in (1, 2, 3, 10)
    }
    assert sizes == {1: 20, 2: 10, 3: 8, 10: 2}


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=.inf", r"train\.lr: .* finite"),
        ("train.betas=[2, 3]", r"train\.betas\.0: .* less than 1"),
        ("train.betas=[0.9]", r"key .train\.betas\.1. is missing"),
        ("train.warmup_steps=1000", "leaves none of the [0-9]+ steps at the full rate$"),
        ("train.method=sgd", r"train\.method: Input should be 'qad' or 'qat' \(got 'sgd'\)"),
        ("calibrate=5", r"calibrate: expected its keys, such as data, samples, seq_len \(got 5\)$"),
        (
            "train.tokens=1",
            r"is less than one step of [\d,]+ \(batch_size 4 x seq_len [\d,]+\): give more tokens, or lower one of the two$",
        ),
        ('model=""', "model: .* at least 1 character"),
    ],
)
def test_a_value_that_makes_no_sense_is_said_in_few_words(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(recipe(tmp_path, BASE), [override])


WEIGHTS_ONLY = "model: m\nquantize: {format: W4A16_NVFP4}\n"


def test_weights_alone_need_neither_calibration_nor_training(tmp_path: Path) -> None:
    loaded = load_recipe(recipe(tmp_path, WEIGHTS_ONLY), ["quantize.kv_cache=cast"])
    assert (loaded.calibrate, loaded.train, loaded.methods) == (None, None, [])
    with pytest.raises(UsageError, match="the recipe has no train"):
        _ = loaded.training


@pytest.mark.parametrize("override", ["format=NVFP4", "formats={x: FP8}", "kv_cache=calibrated", "kv_cache=at_least_one"])
def test_scales_that_are_found_on_text_need_it(tmp_path: Path, override: str) -> None:
    with pytest.raises(UsageError, match=r"recipe\.yaml: calibrate is missing: .* give calibrate\.data, or set"):
        load_recipe(recipe(tmp_path, WEIGHTS_ONLY), [f"quantize.{override}"])


LONG = 300 * "a"


@pytest.mark.parametrize(
    "text", [f"base: {LONG}", f"model: {LONG}\ncalibrate: {{data: {{source: text, path: {LONG}}}}}", f"model: {LONG}"]
)
def test_a_name_that_no_file_system_takes_is_refused_like_another(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(QadError):
        open_checkpoint(load_recipe(str(path)).model)
