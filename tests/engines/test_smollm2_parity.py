"""The real vLLM on a real model, SmolLM2-135M: 4 prompts, 32 tokens each. The PTQ folder is held in CI too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ptq_export import export_ptq

from qad.cli import main

pytestmark = pytest.mark.engine


def parity(model: Path, format: str, python: Path, scratch: Path) -> dict[str, Any]:
    """The record's data of a folder in this format whose parity holds."""
    folder, out = export_ptq(model, scratch / "export", format), scratch / "record.json"
    options = ["--python", str(python), "--out", str(out)]
    assert main(["measure", "parity", str(folder), *options]) == 0
    data: dict[str, Any] = json.loads(out.read_text())["data"]
    assert len(data["layers"]) == 7 * 30
    assert max(one["max_difference"] for one in data["layers"]) < 1e-4
    assert [one["output_tokens"] for one in data["prompts"]] == [32] * 4
    return data


def test_parity_of_the_ptq_folder_holds(smollm2: Path, vllm_python: Path, tmp_path: Path) -> None:
    parity(smollm2, "NVFP4", vllm_python, tmp_path)


@pytest.mark.slow
def test_parity_of_quantized_weights_holds(smollm2: Path, vllm_python: Path, tmp_path: Path) -> None:
    data = parity(smollm2, "W4A16_NVFP4", vllm_python, tmp_path)
    assert [one["tokens_equal"] for one in data["prompts"]] == [32] * 4
    assert max(one["max_difference"] for one in data["prompts"]) < 1e-3
