"""Ids without a row and positions that a model does not have are refused exactly where the model would fail."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from qad.errors import SourceError, UsageError
from qad.model.limits import require_ids, require_layers, require_positions
from qad.model.loader import load_tokenizer

P = 24
BASE = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **BASE,
    "max_position_embeddings": P,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
GPT = {**BASE, "n_embd": P, "n_layer": 1, "n_head": 4, "n_positions": P, "rotary_dim": 4}  # matrices as large as positions
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({**LLAMA, "head_dim": P}, "rotary"),  # projections of 4 P
    "gpt_neox": ({**LLAMA, "hidden_size": 4 * P}, "rotary"),
    "bloom": ({**BASE, "hidden_size": 32, "n_layer": 1, "n_head": 4}, "none"),
    "opt": ({**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32}, "table"),
    "gpt2": (GPT, "table"),
    "gptj": ({**GPT, "n_embd": 32}, "table"),  # rotary, from a buffer
    "ctrl": ({**GPT, "dff": 48}, "table"),  # sines, from a buffer
    "mpt": ({**BASE, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": P}, "table"),  # ALiBi of a fixed length
}


def build(family: str, device: str = "cpu") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family][0])).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_of_positions_ends_and_computed_ones_are_warned_of(family: str, tmp_path: Path) -> None:
    kind, skeleton = FAMILIES[family][1], build(family, "meta")
    ids = torch.randint(3, 60, (1, P + 1))
    with torch.no_grad():
        build(family)(ids[:, :P], use_cache=False)
        if kind == "table":
            with pytest.raises((IndexError, RuntimeError)):
                build(family)(ids, use_cache=False)
        else:
            build(family)(ids, use_cache=False)
    require_positions(skeleton, tmp_path, {"calibrate.seq_len": P})
    told = f"train.seq_len {P + 1} is more than the {P} positions"
    if kind == "table":
        with pytest.raises(UsageError, match=f"{told} that .* it has no others: set it to {P} or less"):
            require_positions(skeleton, tmp_path, {"calibrate.seq_len": P, "train.seq_len": P + 1})
    elif kind == "rotary":
        with pytest.warns(UserWarning, match=told):
            require_positions(skeleton, tmp_path, {"train.seq_len": P + 1})
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            require_positions(skeleton, tmp_path, {"train.seq_len": 10**6})


def test_a_token_without_a_row_is_named_with_its_id(tiny_llama_dir: Path) -> None:
    tokenizer, skeleton = load_tokenizer(tiny_llama_dir), build("llama", "meta")
    rows = len(tokenizer)
    skeleton.resize_token_embeddings(rows, mean_resizing=False)
    require_ids(skeleton, tokenizer, tiny_llama_dir)
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
    with pytest.raises(
        SourceError, match=rf"id {rows} of the tokenizer, '<\|tool\|>', has no row in the embedding, which has {rows}:"
    ):
        require_ids(skeleton, tokenizer, tiny_llama_dir)
    tokenizer.add_tokens(["more"])
    with pytest.raises(SourceError, match=r"\(2 such tokens\)"):
        require_ids(skeleton, tokenizer, tiny_llama_dir)


def test_layers_that_the_config_does_not_count_are_refused_but_for_heads_that_draft() -> None:
    tensors = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(3)]
    with pytest.raises(SourceError, match=r"tensors of 3 layers, num_hidden_layers of its config\.json is 2"):
        require_layers({"num_hidden_layers": 2}, tensors, Path("m"))
    require_layers({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, tensors, Path("m"))
    require_layers({"text_config": {"num_hidden_layers": 3}}, tensors, Path("m"))
