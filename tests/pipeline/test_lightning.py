"""The mixed recipe of Nemotron 3.5 Lightning on a tiny hybrid of its shape, from recipe to report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_families import build

from export.check import check
from qad.command.run import run
from qad.recipes.load import load_recipe

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SMALL = [
    *(f"{key}.data=python-docs" for key in ("calibrate", "train", "measure.fidelity")),
    "calibrate.samples=8",
    "calibrate.seq_len=64",
    "train.tokens=3072",
    "train.seq_len=64",
    "train.batch_size=2",
    "train.lr=1e-4",
    "train.validation_tokens=256",
    "measure.fidelity.tokens=512",
    "measure.fidelity.seq_len=64",
    "dtype=float32",
]


def test_experts_and_head_in_4_bits_mamba_in_fp8_attention_as_it_was(
    make_tokenizer: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Experts, shared experts and head W4A16, Mamba's projections FP8, attention BF16, FP8 KV cache; QAD lowers the KL."""
    source = build("Nemotron-H MoE", tmp_path / "source")
    make_tokenizer(source)
    run(load_recipe("lightning-mamba-fp8-max", [f"model={source}", *SMALL]), tmp_path / "run", lambda line: None)
    out = tmp_path / "run" / "export" / "qad"
    assert [finding for finding in check(out) if finding.severity == "error"] == []
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    formats = {name: layer["quant_algo"] for name, layer in quantization["quantized_layers"].items()}
    by_kind: dict[str, set[str]] = {}
    for name, format in formats.items():
        kind = next(
            (part for part in ("shared_experts", "experts", "lm_head") if part in name.split(".")), name.rpartition(".")[2]
        )
        by_kind.setdefault(kind, set()).add(format)
    assert by_kind == {
        "in_proj": {"FP8"},
        "out_proj": {"FP8"},
        "experts": {"W4A16_NVFP4"},
        "shared_experts": {"W4A16_NVFP4"},
        "lm_head": {"W4A16_NVFP4"},
    }
    assert quantization["kv_cache_scheme"]["num_bits"] == 8
    arm = json.loads((tmp_path / "run" / "arms" / "qad" / "arm.json").read_text())["training"]
    assert arm["val_kl_best"] < arm["val_kl_start"]
    assert (tmp_path / "run" / "report" / "report.html").is_file()
