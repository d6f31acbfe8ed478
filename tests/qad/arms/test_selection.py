"""What is quantized is decided from names and shapes, with a reason for everything that is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from qad.arms.selection import Selection, describe, select
from qad.errors import UsageError
from qad.model.families import DEFAULT


def llama(**overrides: int | bool) -> nn.Module:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides}))


class Toy(nn.Module):
    """A vision-language and mixture-of-experts shape with routers, a tower and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "vision_tower": nn.ModuleDict({"fc1": nn.Linear(72, 40)}),
                "mlp": nn.ModuleDict({"gate": nn.Linear(32, 4), "gate_proj": nn.Linear(32, 48), "up_proj": nn.Linear(32, 48)}),
                "odd": nn.Linear(40, 32),
            }
        )
        self.lm_head = nn.Linear(32, 64)


def test_a_llama_is_quantized_but_for_head_and_embedding() -> None:
    selection = select(llama(), "NVFP4")
    assert len(selection.modules) == 12 * 7
    assert selection.excluded == {"model.embed_tokens": "embedding", "lm_head": "output head"}
    assert len(selection.groups) == 12 * 4
    assert "84 Linears" in describe(selection)[0]


def test_routers_towers_odd_k_and_heads_stay_bf16_with_their_reason() -> None:
    selection = select(Toy(), "NVFP4")
    assert set(selection.modules) == {"model.mlp.gate_proj", "model.mlp.up_proj"}
    assert selection.excluded["model.mlp.gate"] == "router"
    assert selection.excluded["model.vision_tower.fc1"] == "inside vision_tower"
    assert "40 is not divisible by 16" in selection.excluded["model.odd"]
    assert selection.excluded["lm_head"] == "output head"


def test_an_exclude_pattern_is_a_glob_on_the_full_name() -> None:
    selection = select(llama(), "NVFP4", exclude=["model.layers.1.*"])
    dropped = {name for name, reason in selection.excluded.items() if reason.startswith("excluded by")}
    assert len(dropped) == 7
    assert all(name.startswith("model.layers.1.") for name in dropped)  # and not layers 10, 11


def test_a_pattern_that_matches_nothing_names_the_nearest_module() -> None:
    with pytest.raises(
        UsageError, match=r"'model.layers.0.mlp.down_prj' matches no module; nearest is 'model.layers.\d+.mlp.down_proj'"
    ):
        select(llama(), "NVFP4", exclude=["model.layers.0.mlp.down_prj"])


@pytest.mark.parametrize("leaf", ["q_proj", "v_proj", "up_proj"])
def test_part_of_a_fused_group_is_refused(leaf: str) -> None:
    with pytest.raises(UsageError, match=f"{leaf} not .*include or exclude all of them"):
        select(llama(), "NVFP4", exclude=[f"*.{leaf}"])


def test_nothing_selected_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nothing would be quantized, .* \(84: excluded by '\*'; 1: output head\)"):
        select(llama(), "NVFP4", exclude=["*"])
    with pytest.raises(UsageError, match=r"\(84: in_features 24 is not divisible by 16; 1: output head\)"):
        select(llama(hidden_size=24, intermediate_size=24, head_dim=12), "NVFP4")


def test_a_selection_survives_json() -> None:
    selection = select(llama(), "W4A16_NVFP4", include=["*.mlp.*"])
    assert Selection.from_json(selection.to_json()) == selection
    assert not selection.quantizes_activations


def test_scale_groups_pair_siblings_of_one_parent_only() -> None:
    names = ["a.0.k_proj", "a.1.q_proj", "a.0.q_proj", "a.0.o_proj", "a.0.v_proj", "e.0.w1", "e.0.w2", "e.0.w3"]
    assert DEFAULT.scale_groups(names) == [
        ("a.0.k_proj", "a.0.q_proj", "a.0.v_proj"),
        ("a.1.q_proj",),
        ("a.0.o_proj",),
        ("e.0.w1", "e.0.w3"),
        ("e.0.w2",),
    ]
