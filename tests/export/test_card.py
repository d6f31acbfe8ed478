"""The card says how to serve the folder, on what, and how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from export.card_sections import serve_section
from export.convert import convert
from export.layouts.layout import COMPRESSED_TENSORS, MODELOPT
from export.writer import export_arm
from qad.recipes.job import prepare
from qad.recipes.load import parse_recipe
from qad.training.stages import ptq_arm, trained_arm


def commands(card: str) -> list[str]:
    return card.partition("## Serve\n\n```\n")[2].partition("\n```")[0].splitlines()


@pytest.mark.parametrize(
    ("layout", "config", "kv_format", "expected"),
    [
        (MODELOPT, {}, None, ["vllm serve .", "trtllm-serve ."]),
        (COMPRESSED_TENSORS, {}, None, ["vllm serve ."]),
        (MODELOPT, {}, "FP8", ["vllm serve . --kv-cache-dtype fp8", "trtllm-serve ."]),
        (MODELOPT, {}, "NVFP4", ["vllm serve . --kv-cache-dtype nvfp4", "trtllm-serve ."]),
        (MODELOPT, {"auto_map": {}}, None, ["vllm serve . --trust-remote-code", "trtllm-serve . --trust_remote_code"]),
    ],
)
def test_serve_lines_have_the_options_that_the_checkpoint_needs(
    layout: Any, config: dict[str, Any], kv_format: str | None, expected: list[str]
) -> None:
    assert commands(serve_section(layout, ["NVFP4"], config, kv_format)) == expected


@pytest.mark.parametrize(
    ("formats", "blackwell", "ada"), [(["NVFP4"], True, False), (["W4A16_NVFP4", "FP8"], True, True), (["FP8"], False, True)]
)
def test_the_hardware_is_that_of_the_formats(formats: list[str], blackwell: bool, ada: bool) -> None:
    text = serve_section(MODELOPT, formats, {}, False)
    assert ("Blackwell" in text, "Ada and Hopper" in text) == (blackwell, ada)


def test_a_conversion_says_how_the_other_layout_is_served(exported: Path, tmp_path: Path) -> None:
    before = (exported / "README.md").read_text()
    there = convert(exported, "compressed-tensors", tmp_path / "there").path
    assert commands((there / "README.md").read_text()) == ["vllm serve ."]
    back = convert(there, "modelopt", tmp_path / "back").path
    assert (back / "README.md").read_text() == before


@pytest.fixture(scope="module")
def trained(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    text = folder / "secret place" / "text.jsonl"
    text.parent.mkdir()
    words = "The heron stands where bank {} is low and counts {} sacks."
    text.write_text("".join(json.dumps({"text": " ".join(words.format(i, j) for j in range(9))}) + "\n" for i in range(90)))
    train = {"data": str(text), "tokens": 256, "seq_len": 32, "batch_size": 4, "lr": 3e-4, "validation_tokens": 64}
    calibrate = {"data": str(text), "samples": 2, "seq_len": 32}
    recipe = {"model": str(tiny_llama_dir), "dtype": "float32", "calibrate": calibrate, "train": train}
    job = prepare(parse_recipe(recipe, "test"))
    ptq_arm(job, folder / "ptq")
    trained_arm(job, "qad", folder / "ptq", folder / "qad", folder / "metrics.jsonl")
    return folder


@pytest.mark.filterwarnings("ignore:.*inputs lie above what was calibrated:UserWarning")
def test_the_steps_and_the_recipe_stand_there_without_places_of_this_machine(trained: Path, tmp_path: Path) -> None:
    for name, steps in (("ptq", 3), ("qad", 4)):
        card = (export_arm(trained / name, tmp_path / name).path / "README.md").read_text()
        made = card.partition("## How it was made\n\n")[2]
        numbered = [line for line in made.splitlines() if line[:2] in ("1.", "2.", "3.", "4.")]
        assert len(numbered) == steps
        assert "2. Scales of activations from 64 tokens of text.jsonl." in numbered
        recipe = yaml.safe_load(made.partition("```yaml\n")[2].partition("```")[0])
        assert recipe["calibrate"]["data"][0]["path"] == "text.jsonl"
        assert ("train" in recipe) == (name == "qad")
        assert "secret place" not in card
    assert "3. Trained (qad) for 2 steps on 256 tokens of text.jsonl; kept is step " in made
    assert recipe["train"]["lr"] == 3e-4
