"""The real vLLM on a real model: 4 prompts, 32 tokens each. `make models/SmolLM2-135M-Instruct/config.json` brings it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ptq_export import export_ptq

from qad.cli import main

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(
    not (MODEL / "config.json").is_file(), reason=f"{MODEL} is not there: make models/{MODEL.name}/config.json"
)
@pytest.mark.parametrize("format", ["NVFP4", "W4A16_NVFP4"])
def test_parity_holds(format: str, vllm_python: Path, tmp_path: Path) -> None:
    folder = export_ptq(MODEL, tmp_path / "export", format)
    assert (
        main(["measure", "parity", str(folder), "--python", str(vllm_python), "--out", str(tmp_path / "record.json")])
        == 0
    )
    data = json.loads((tmp_path / "record.json").read_text())["data"]
    assert len(data["layers"]) == 7 * 30
    assert max(one["max_difference"] for one in data["layers"]) < 1e-4
    if format == "W4A16_NVFP4":
        assert [one["tokens_equal"] for one in data["prompts"]] == [32] * 4
        assert max(one["max_difference"] for one in data["prompts"]) < 1e-3
