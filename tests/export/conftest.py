"""A tiny arm and its export, made once; corruptions work on copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from export.writer import export_arm
from qad.arms.arm import write_arm
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.model.experts import split_experts
from qad.model.loader import load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.training.calibrate import AmaxObserver, group_input_scales


def build_arm(source: Path, folder: Path, format: str = "NVFP4", **choice: Any) -> Path:
    """A PTQ arm of a source folder, calibrated on a few tokens. choice: further arguments of `select`."""
    checkpoint = open_checkpoint(source)
    selection = select(load_skeleton(checkpoint), format, **choice)
    scales: dict[str, torch.Tensor] = {}
    if selection.quantizes_activations:
        model = load_model(checkpoint, "float32", "cpu")
        split_experts(model)
        with AmaxObserver(model, list(selection.modules)) as observer, torch.no_grad():
            model(torch.arange(64)[None])
        scales = group_input_scales(observer.amax, selection, 1.0)
    run_stage("arm", folder, {}, {}, lambda f: write_arm(f, "ptq", checkpoint, selection, scales))
    return folder


@pytest.fixture(scope="session", name="build_arm")
def _build_arm() -> Callable[..., Path]:
    return build_arm


@pytest.fixture(scope="session")
def arm_dir(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_arm(tiny_llama_dir, tmp_path_factory.mktemp("arm") / "ptq")


@pytest.fixture(scope="session")
def exported_dir(arm_dir: Path) -> Path:
    out = arm_dir.parent / "export"
    export_arm(arm_dir, out)
    return out


@pytest.fixture
def exported(exported_dir: Path, tmp_path: Path) -> Path:
    """A copy to corrupt."""
    return Path(shutil.copytree(exported_dir, tmp_path / "copy"))
