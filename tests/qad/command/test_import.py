"""`qad import`: folders that other tools made become arms, and what cannot become one is refused with the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qad.arms.arm import KEPT, open_arm
from qad.command.cli import main

RECIPE = """
model: {model}
calibrate: {{data: {{source: random}}, samples: 2, seq_len: 32}}
train: {{data: {{source: random}}, tokens: 128, seq_len: 32, validation_tokens: 64}}
"""


@pytest.fixture(scope="module")
def trained(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama after a training elsewhere: other weights, no scales."""
    folder = tmp_path_factory.mktemp("elsewhere") / "trained"
    shutil.copytree(tiny_llama_dir, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    moved = {n: w + 0.02 * w.std() * torch.randn(w.shape, generator=generator) for n, w in weights.items() if "layers.1" in n}
    save_file(weights | {n: w.to(torch.bfloat16) for n, w in moved.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def recipe(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    file.write_text(RECIPE.format(model=tiny_llama_dir))
    return file


@pytest.fixture(scope="module")
def exported(trained: Path, recipe: Path, tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arm and export of the trained weights, calibrated by a recipe."""
    root = tmp_path_factory.mktemp("imported")
    given = ["import", str(trained), "--as", "qad", "--source", str(tiny_llama_dir), "--recipe", str(recipe)]
    assert main([*given, "--out", str(root / "arm")]) == 0
    assert main(["export", str(root / "arm"), "--out", str(root / "export")]) == 0
    return root


def test_weights_are_calibrated_as_they_are(exported: Path, trained: Path, recipe: Path) -> None:
    assert main(["ptq", str(recipe), "--set", f"model={trained}", "--out", str(exported / "own")]) == 0
    arm, own = open_arm(exported / "arm"), open_arm(exported / "own")
    assert arm.input_scales == own.input_scales
    assert {"1"} == {name.split(".")[2] for name in arm.trained_shapes()}
    assert main(["export", str(exported / "own"), "--out", str(exported / "own-export")]) == 0
    ours, theirs = (load_file(exported / name / "model.safetensors") for name in ("export", "own-export"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in ours if ours[n].dim())
    assert not (exported / "arm" / "calibrated").exists()


def test_an_export_comes_back_and_its_conversion_too(exported: Path, tiny_llama_dir: Path, tmp_path: Path) -> None:
    converted = tmp_path / "converted"
    assert main(["convert", str(exported / "export"), "--layout", "compressed-tensors", "--out", str(converted)]) == 0
    for folder, layout in ((exported / "export", "modelopt"), (converted, "compressed-tensors")):
        arm, again = tmp_path / layout / "arm", tmp_path / layout / "again"
        assert main(["import", str(folder), "--as", "qad", "--source", str(tiny_llama_dir), "--out", str(arm)]) == 0
        assert open_arm(arm).scales == KEPT
        assert main(["export", str(arm), "--layout", layout, "--out", str(again)]) == 0
        assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
        assert main(["check", str(again), "--source", str(arm), "--strict"]) == 0
        assert "quantized by another tool, whose codes" in (again / "README.md").read_text()
    assert "Trained by another tool; its weights" in (exported / "export" / "README.md").read_text()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_weights_without_scales_need_a_recipe(
    trained: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["import", str(trained), "--as", "qad", "--source", str(tiny_llama_dir), "--out", str(tmp_path / "arm")]
    assert "give --recipe" in refused(given, capsys)
    same = ["import", str(tiny_llama_dir), "--as", "qad", "--source", str(tiny_llama_dir), "--out", str(tmp_path / "arm")]
    assert "give --recipe" in refused(same, capsys)
    assert not (tmp_path / "arm").exists()


def test_another_original_is_refused(
    exported: Path, make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_llama(tmp_path / "other", seed=5)
    for name in ("with", "without"):
        folder = tmp_path / name
        shutil.copytree(exported / "export", folder)
        if name == "without":  # as another tool leaves it
            (folder / "qad_manifest.json").unlink()
        given = ["import", str(folder), "--as", "qad", "--source", str(other), "--out", str(tmp_path / "arm")]
        assert "was not made from" in refused(given, capsys)


def test_a_broken_folder_is_refused(
    exported: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(exported / "export", folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("input_scale"))
    save_file({n: t * 0 if n == name else t for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    given = ["import", str(folder), "--as", "qad", "--source", str(tiny_llama_dir), "--out", str(tmp_path / "arm")]
    assert main(given) == 1
    assert "qad check" in capsys.readouterr().err


def test_kept_codes_are_nothing_to_train_from(
    exported: Path, recipe: Path, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = tmp_path / "arm"
    given = ["import", str(exported / "export"), "--as", "ptq", "--source", str(tiny_llama_dir), "--out", str(arm)]
    assert main(given) == 0
    assert json.loads((arm / "arm.json").read_text())["rounding"] == KEPT
    train = ["train", str(recipe), "--ptq", str(arm), "--out", str(tmp_path / "qad")]
    assert "nothing to train from" in refused(train, capsys)
