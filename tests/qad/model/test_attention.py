"""Kernels of training: documents stay apart whichever computes, values are near, and what cannot train here is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.utils
from transformers import LlamaConfig, LlamaForCausalLM

from qad.errors import UsageError
from qad.model.attention import train_with, training_attention


def model() -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag on create_block_mask")
@torch.no_grad()
def test_flex_keeps_documents_apart_and_is_near_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 64, (2, 300), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(130), torch.arange(170)]).expand(2, -1)

    def hidden(of: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = of.base_model(ids, position_ids=positions, use_cache=False)[0]
        return found

    monkeypatch.setattr("qad.model.attention.training_attention", lambda asked, device, model: "flex_attention")
    own, flex = model(), model()
    train_with("flex", "cuda", flex)
    torch.compiler.set_stance("force_eager")
    try:
        expected, found = hidden(own, ids, positions), hidden(flex, ids, positions)
        alone = hidden(flex, ids[:, 130:], positions[:, 130:])
        seen = hidden(flex, ids, torch.arange(300).expand(2, -1))
    finally:
        torch.compiler.set_stance("default")
    assert torch.allclose(found, expected, rtol=0, atol=2e-6)
    assert torch.allclose(found[:, 130:], alone, rtol=0, atol=2e-6)
    assert not torch.allclose(seen[:, 130:], alone, rtol=0, atol=1e-2)


def test_which_kernel_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = model()
    assert training_attention("auto", "cpu", llama) is None
    assert training_attention("sdpa", "cpu", llama) == "sdpa"
    assert training_attention("auto", "cuda", llama) == "flex_attention"
    monkeypatch.setattr(type(llama), "_supports_flex_attn", False)
    assert training_attention("auto", "cuda", llama) is None
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: True)
    assert training_attention("auto", "cuda:1", llama) == "flash_attention_2"
    llama.config._attn_implementation = "eager"
    assert training_attention("auto", "cuda", llama) is None


@pytest.mark.parametrize(
    ("asked", "device", "why"),
    [("flex", "cpu", "no backward pass on a CPU"), ("flash", "cuda", "pip install flash-attn"), ("flash", "cpu", "no backward")],
)
def test_a_kernel_that_cannot_train_is_refused(asked: str, device: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        training_attention(asked, device, model())
    other: Any = SimpleNamespace(config=None)
    with pytest.raises(UsageError, match="transformers has none for SimpleNamespace"):
        training_attention(asked, device, other)
