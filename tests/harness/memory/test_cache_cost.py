"""What a sequence costs, counted by hand from published configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.memory.cache_cost import cache_cost
from harness.memory.files import measure_memory
from harness.records.record import smallest_gpu

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
}
WINDOWED = {  # every other layer sees 128 tokens
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 8,
    "hidden_size": 4480,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "hybrid_override_pattern": "M-M*M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32",
}


def save(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        (LLAMA_8B, 32 * 2 * 8 * 128),
        (DEEPSEEK_V3, 61 * (512 + 64)),  # once for all heads, not K and V
        (WINDOWED, 24 * 2 * 8 * 64),
        (QWEN3_NEXT, 12 * 2 * 2 * 256),
        (NEMOTRON_H, 1 * 2 * 8 * 128),
    ],
    ids=["GQA", "MLA", "sliding window", "gated delta rule", "Mamba-2"],
)
def test_bytes_per_token(config: dict[str, Any], elements: int, tmp_path: Path) -> None:
    cost = cache_cost(save(tmp_path, config), 0)
    assert cost is not None
    assert cost.kv_bytes_per_token == {"bf16": 2 * elements, "fp8": elements, "nvfp4": 0.5625 * elements}


def test_a_class_that_transformers_does_not_know_is_read_as_written(tmp_path: Path) -> None:
    cost = cache_cost(save(tmp_path, {**LLAMA_8B, "model_type": "of_tomorrow"}), 0)
    assert cost is not None
    assert cost.kv_bytes_per_token["bf16"] == 131_072


def test_the_least_memory_of_a_sequence(tmp_path: Path) -> None:
    """16.06 GB of weights and 128 KiB a token: 4K, 32K and 128K tokens."""
    cost = cache_cost(save(tmp_path, LLAMA_8B), 16_060_000_000)
    assert cost is not None
    assert [(s.tokens, s.kv_bytes) for s in cost.sequences] == [(n, n * 131_072) for n in (4096, 32_768, 131_072)]
    assert [s.bytes for s in cost.sequences] == [16_060_000_000 + n * 131_072 for n in (4096, 32_768, 131_072)]
    assert [smallest_gpu(s.bytes) for s in cost.sequences] == [24, 24, 48]


def test_kinds_as_transformers_5_saves_them(tmp_path: Path) -> None:
    """Nemotron-H: a list under a key of its own, without a number of layers."""
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    listed = [kinds[kind] for kind in NEMOTRON_H["hybrid_override_pattern"]]
    saved = {key: value for key, value in NEMOTRON_H.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    (tmp_path / "old").mkdir()
    expected = cache_cost(save(tmp_path / "old", NEMOTRON_H), 0)
    assert expected is not None
    assert cache_cost(save(tmp_path, {**saved, "layers_block_type": listed}), 0) == expected


def test_a_window_keeps_its_length_and_no_more(tmp_path: Path) -> None:
    cost = cache_cost(save(tmp_path, WINDOWED), 0)
    assert cost is not None
    assert cost.windowed_layers == 12
    assert cost.sequences[0].kv_bytes == 12 * 2 * 8 * 64 * 2 * (4096 + 128)


def test_states_count_once_a_sequence(tmp_path: Path) -> None:
    """Gated delta rule: the last 3 inputs of the convolution, and a matrix a value head, in 16 bits."""
    conv, matrix = (2 * 16 * 128 + 32 * 128) * 3, 32 * 128 * 128
    cost = cache_cost(save(tmp_path, QWEN3_NEXT), 0)
    assert cost is not None
    assert cost.state_bytes_per_sequence == 36 * 2 * (conv + matrix)
    assert cost.sequences[0].bytes == cost.sequences[0].kv_bytes + cost.state_bytes_per_sequence


def test_a_state_kept_in_fp32(tmp_path: Path) -> None:
    cost = cache_cost(save(tmp_path, NEMOTRON_H), 0)
    assert cost is not None
    inner = 128 * 80
    assert cost.state_bytes_per_sequence == 4 * (2 * (inner + 2 * 8 * 128) * 3 + 4 * inner * 128)


def test_beyond_the_context_is_not_counted(tmp_path: Path) -> None:
    cost = cache_cost(save(tmp_path, {**LLAMA_8B, "max_position_embeddings": 8192}), 0)
    assert cost is not None
    assert [s.tokens for s in cost.sequences] == [4096]


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_algo": "NVFP4", "kv_cache_scheme": None}, "bf16"),
    ],
)
def test_the_cache_counts_in_the_announced_type(quantization: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    cost = cache_cost(save(tmp_path, {**LLAMA_8B, "model_type": "x", "quantization_config": quantization}), 0)
    assert cost is not None
    assert cost.kv_dtype == dtype
    assert cost.sequences[0].kv_bytes == 4096 * cost.kv_bytes_per_token[dtype]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "x"},
        {**LLAMA_8B, "model_type": "x", "layer_types": ["full_attention", "of_tomorrow"]},
        {**LLAMA_8B, "model_type": "x", "layer_types": ["full_attention", "mamba"]},
    ],
    ids=["no layers", "unknown kind", "sizes missing"],
)
def test_what_is_not_known_is_none_and_not_zero(config: dict[str, Any], tmp_path: Path) -> None:
    assert cache_cost(save(tmp_path, config), 5) is None


def test_cards() -> None:
    assert [smallest_gpu(n) for n in (1, 24 * 10**9, 24 * 10**9 + 1, 192 * 10**9, 193 * 10**9)] == [24, 24, 32, 192, None]


def test_a_folder_is_measured_with_its_cost(tiny_llama_dir: Path) -> None:
    data = measure_memory(tiny_llama_dir)
    assert data.cache is not None
    assert data.cache.kv_bytes_per_token["bf16"] == 2 * 2 * 2 * 16 * 2  # 2 layers, K and V, 2 heads of 16
    assert data.cache.sequences == []  # 512 positions
