"""`quantize.rounding: blockwise` in families whose layers differ from Llama's: biases, experts, latent attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qad.arms.arm import BLOCKWISE, open_arm
from qad.recipes.job import prepare
from qad.recipes.recipe import Recipe
from qad.training.stages import ptq_arm


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["GPT-NeoX", "DeepSeek-V3", "gpt-oss"])
def test_every_module_is_decided(family_dir: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"the cat {i} sat on {i * 7} mats and saw {i * i} dogs"}) + "\n" for i in range(200))
    )
    recipe = {
        "model": str(family_dir(name)),
        "dtype": "float32",
        "quantize": {"scales": "mse", "rounding": "blockwise"},
        "calibrate": {"data": str(text), "samples": 8, "seq_len": 32},
    }
    ptq_arm(prepare(Recipe.model_validate(recipe)), tmp_path / "ptq")
    arm = open_arm(tmp_path / "ptq")
    assert arm.rounding == BLOCKWISE
    assert arm.selection is not None
    for group in arm.selection.groups:
        for module, quantized in arm.quantize(group).items():
            decoded, original = quantized.dequantize(), arm.source.get(f"{module}.weight").float()
            assert torch.nn.functional.cosine_similarity(decoded.flatten(), original.flatten(), dim=0) > 0.98
