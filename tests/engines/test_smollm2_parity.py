"""The real vLLM on a real model, SmolLM2-135M: 4 prompts, 32 tokens each. The PTQ folder is held in CI too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ptq_export import export_ptq

from export.convert import convert
from qad.command.cli import main

pytestmark = pytest.mark.engine


def parity(model: Path, format: str, python: Path, scratch: Path, layout: str = "modelopt") -> dict[str, Any]:
    """The record's data of a folder in this format, whose parity holds to every log-probability."""
    folder, out = export_ptq(model, scratch / "export", format), scratch / "record.json"
    if layout != "modelopt":
        folder = convert(folder, layout, scratch / layout).path
    assert main(["measure", "parity", str(folder), "--python", str(python), "--out", str(out)]) == 0
    data: dict[str, Any] = json.loads(out.read_text())["data"]
    assert len(data["layers"]) == 7 * 30
    assert max(one["max_difference"] for one in data["layers"]) < 1e-4
    assert [one["tokens_equal"] for one in data["prompts"]] == [32] * 4
    assert max(one["max_difference"] for one in data["prompts"]) < 1e-3
    return data


def test_parity_of_the_ptq_folder_holds(smollm2: Path, vllm_python: Path, tmp_path: Path) -> None:
    data = parity(smollm2, "NVFP4", vllm_python, tmp_path)
    assert max(one.get("ties") or 0 for one in data["prompts"]) < 100  # of 340,000 blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "layout"), [("NVFP4", "compressed-tensors"), ("W4A16_NVFP4", "modelopt"), ("W4A16_NVFP4", "compressed-tensors")]
)
def test_parity_of_other_folders_holds(smollm2: Path, vllm_python: Path, tmp_path: Path, format: str, layout: str) -> None:
    parity(smollm2, format, vllm_python, tmp_path, layout)
