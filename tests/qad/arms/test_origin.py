"""Where a checkpoint comes from, and whether a teacher is its original."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qad.arms.origin import origin_of, reference_of, training_of
from qad.artifact import MANIFEST
from qad.errors import UsageError
from qad.model.source import Checkpoint, open_checkpoint


def checkpoint(folder: Path, *, quantized: bool = False, layers: int = 2, origin: object = None) -> Checkpoint:
    """A folder by its files; its weights are one number."""
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": layers, "vocab_size": 512}
    if quantized:
        config["quantization_config"] = {"quant_method": "modelopt"}
    (folder / "config.json").write_text(json.dumps(config))
    if origin is not None:
        (folder / MANIFEST).write_text(json.dumps({"origin": origin}))
    return Checkpoint(folder, config, {})


@pytest.fixture
def teacher(tiny_llama_dir: Path) -> Checkpoint:
    return open_checkpoint(tiny_llama_dir)


def test_the_original_is_no_other_reference(tmp_path: Path, teacher: Checkpoint) -> None:
    made = checkpoint(tmp_path / "made", quantized=True, origin={"source": teacher.digest})
    assert reference_of(made, teacher, False) == (None, "")
    assert reference_of(teacher, teacher, False) == (None, "")
    with pytest.raises(UsageError, match="leave the option out"):
        reference_of(made, teacher, True)


def test_behind_a_balanced_folder_its_original_is_one_too(tmp_path: Path, teacher: Checkpoint) -> None:
    made = checkpoint(tmp_path / "made", quantized=True, origin={"source": "0" * 64, "original": teacher.digest})
    assert reference_of(made, teacher, False) == (None, "")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"quantized": True, "origin": {"source": "0" * 64}}, "it was made from 000000000000, that is "),
        ({"quantized": True, "layers": 3}, "their num_hidden_layers differ"),
        ({}, "it is a BF16 model itself"),
    ],
)
def test_another_model_is_refused_unless_it_is_meant(
    tmp_path: Path, teacher: Checkpoint, facts: dict[str, object], why: str
) -> None:
    made = checkpoint(tmp_path / "made", **facts)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=why) as caught:
        reference_of(made, teacher, False)
    assert "--other-teacher" in str(caught.value)
    name, told = reference_of(made, teacher, True)
    assert name == teacher.display_name
    assert "which is not the original of" in told


def test_where_nothing_tells_it_is_said(tmp_path: Path, teacher: Checkpoint) -> None:
    made = checkpoint(tmp_path / "made", quantized=True)
    name, told = reference_of(made, teacher, False)
    assert name is None
    assert told == f"nothing tells which model {made.folder} was made from: {teacher.folder} is taken for its original"


@pytest.mark.parametrize("text", ["", "[]", '{"origin": 3}', "{"])
def test_a_damaged_manifest_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    assert origin_of(tmp_path) == {}
    assert training_of(tmp_path) is None


@pytest.mark.parametrize("training", [[], {"seed": 1}, {"seed": "1", "recipe": {}}, {"seed": True, "recipe": {}}])
def test_a_training_without_seed_or_recipe_is_none(tmp_path: Path, training: object) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"origin": {"training": training}}))
    assert training_of(tmp_path) is None
    (tmp_path / MANIFEST).write_text(json.dumps({"origin": {"training": {"seed": 1, "recipe": {"lr": 1}, "more": 2}}}))
    assert training_of(tmp_path) == {"seed": 1, "recipe": {"lr": 1}}
