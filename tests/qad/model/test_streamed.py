"""Models that hold no weights but those of the module that runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qad.model import streamed
from qad.model.experts import split_experts
from qad.model.loader import load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.model.streamed import streamed_model

IDS = torch.arange(40).reshape(2, 20)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits.contiguous().view(torch.uint8)  # type: ignore[no-any-return]


def require_equal(folder: Path, dtype: str) -> None:
    source = open_checkpoint(folder)
    model: Any = streamed_model(source, dtype)
    assert model is not None
    loaded = load_model(source, dtype, "cpu")
    split_experts(loaded)
    assert torch.equal(logits(model), logits(loaded))
    assert all(parameter.isnan().all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_streamed_model_computes_the_bits_of_the_loaded_one(tiny_llama_dir: Path, dtype: str) -> None:
    require_equal(tiny_llama_dir, dtype)


def test_one_with_a_head_of_its_own_does_too(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    require_equal(make_llama(tmp_path / "untied", tie_word_embeddings=False), "float32")


def test_experts_are_read_one_by_one(moe_dir: Path) -> None:
    require_equal(moe_dir, "float32")


SIZES = {
    "vocab_size": 512,
    "hidden_size": 72,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save(config: Any, folder: Path, dtype: torch.dtype, tokenizer: Path) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-1, 1)
    model.save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_router_has_its_stored_bias_in_full(tiny_llama_dir: Path, tmp_path: Path, dtype: str) -> None:
    from transformers import DeepseekV3Config

    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    heads = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = DeepseekV3Config(**SIZES, **experts, **heads)
    require_equal(save(config, tmp_path / "deepseek", torch.float32, tiny_llama_dir), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_computed_is_of_the_loaded_models_dtype(tiny_llama_dir: Path, tmp_path: Path, dtype: str) -> None:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(**SIZES, head_dim=18)  # embeddings times the square root of 72, which BF16 rounds
    require_equal(save(config, tmp_path / "gemma", torch.bfloat16, tiny_llama_dir), dtype)


def test_weights_are_read_only_while_their_module_runs(tiny_llama_dir: Path) -> None:
    model: Any = streamed_model(open_checkpoint(tiny_llama_dir), "float32")
    held: list[int] = []

    def count(module: nn.Module, args: Any) -> None:
        held.append(sum(not parameter.isnan().any() for parameter in model.parameters()))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(count)
    logits(model)
    assert set(held) == {1}


def test_a_parameter_that_is_stored_under_another_name_cannot_be_streamed(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(source: Any, dtype: str) -> Any:
        model = load_skeleton(source, dtype)
        model.model.layers[0].mlp.renamed = model.model.layers[0].mlp.up_proj
        del model.model.layers[0].mlp.up_proj
        return model

    monkeypatch.setattr(streamed, "load_skeleton", renamed)
    assert streamed_model(open_checkpoint(tiny_llama_dir), "float32") is None


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_module_that_computes_with_anothers_weights_cannot_be_streamed(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """tokens: from so many on; a decoder may take another way for one."""

    def reaching(source: Any, dtype: str) -> Any:
        model = load_skeleton(source, dtype)
        mlp = model.model.layers[0].mlp
        own = mlp.forward
        mlp.forward = lambda x: own(x) if x.shape[1] < tokens else x @ mlp.up_proj.weight.T @ mlp.down_proj.weight.T
        return model

    monkeypatch.setattr(streamed, "load_skeleton", reaching)
    assert streamed_model(open_checkpoint(tiny_llama_dir), "float32") is None
