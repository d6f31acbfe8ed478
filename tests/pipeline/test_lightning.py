"""A mixture like Nemotron 3.5 Lightning (Mamba-2, attention, experts beside a shared one) by the recipe of that name, from recipe
to report: each part in its own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from tiny_families import build

from qad.command.cli import main

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
SENTENCES = ["The river runs past the mill {0}.", "A heron waits {0} for fish.", "He counts {0} sacks of flour and {0} more."]


@pytest.fixture(scope="module")
def run(make_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    source = build("Nemotron-H MoE", folder / "source")
    make_tokenizer(source)
    text = folder / "text.jsonl"
    lines = [{"text": " ".join(s.format(i * 7 + j) for j, s in enumerate(SENTENCES * 3))} for i in range(400)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "base": "lightning-mamba-fp8-max",
        "model": str(source),
        "dtype": "float32",
        "quantize": {"kv_cache": "calibrated"},
        "calibrate": {"data": str(text), "samples": 8, "seq_len": 32},
        "train": {
            "data": str(text),
            "tokens": 12 * 128,
            "seq_len": 32,
            "batch_size": 4,
            "micro_batch_size": None,
            "activation_checkpointing": False,
            "lr": 1e-4,
            "validate_every": 4,
            "validation_tokens": 256,
        },
        "measure": {"engine": "transformers", "fidelity": {"data": str(text), "tokens": 256, "seq_len": 64}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QAD_COMPILE", "0")
        assert main(["run", str(folder / "recipe.yaml"), "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.mark.filterwarnings("ignore")
def test_every_part_has_the_format_of_the_released_checkpoint(run: Path) -> None:
    """Routed and shared experts and head in W4A16, projections of Mamba in FP8, attention and router in BF16, FP8 KV cache."""
    for arm in ("ptq", "qad"):
        folder = run / "export" / arm
        assert main(["check", str(folder), "--source", str(run / "arms" / arm)]) == 0
        nested = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
        assert nested["quant_algo"] == "MIXED_PRECISION"
        assert nested["kv_cache_quant_algo"] == "FP8"
        formats = {name: layer["quant_algo"] for name, layer in nested["quantized_layers"].items()}
        expected = {"backbone.layers.0.mixer.in_proj": "FP8", "backbone.layers.0.mixer.out_proj": "FP8", "lm_head": "W4A16_NVFP4"}
        for layer in (1, 3):
            experts = (f"experts.{number}" for number in range(4))
            expected |= {
                f"backbone.layers.{layer}.mixer.{block}.{leaf}": "W4A16_NVFP4"
                for block in (*experts, "shared_experts")
                for leaf in ("up_proj", "down_proj")
            }
        assert formats == expected
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            names = [*file.keys()]
            plain = ("mixer.q_proj.weight", "mixer.o_proj.weight", "mixer.gate.weight", "conv1d.weight")
            assert {str(file.get_tensor(name).dtype) for name in names if name.endswith(plain)} == {"torch.bfloat16"}
        assert sum(name.endswith((".k_scale", ".v_scale")) for name in names) == 2


def test_training_brings_the_student_nearer_and_states_are_in_the_memory_record(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kl = [row["val_kl"] for row in rows if row.get("val_kl") is not None]
    assert kl[-1] < kl[0]
    assert (run / "report" / "report.html").is_file()
    cache = json.loads((run / "measure" / "qad" / "memory.json").read_text())["data"]["cache"]
    inner, groups, state = 8 * 32, 1, 16  # heads by width; convolution over 3 inputs in BF16, state in FP32 as config.json says
    assert cache["state_bytes_per_sequence"] == 2 * 3 * (inner + 2 * groups * state) + 4 * inner * state
    assert cache["kv_dtype"] == "fp8"
