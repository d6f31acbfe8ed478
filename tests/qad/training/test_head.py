"""The output head, read off a model and verified against its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qad.errors import SourceError
from qad.model.loader import load_model
from qad.model.source import open_checkpoint
from qad.training.head import Head


@pytest.fixture
def model(tiny_llama_dir: Path) -> Any:
    return load_model(open_checkpoint(tiny_llama_dir), "float32", "cpu")


@torch.no_grad()
def test_the_head_reproduces_the_models_logits(model: Any) -> None:
    ids = torch.arange(16)[None]
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0]
    assert torch.equal(Head.of(model).logits(hidden), model(ids, use_cache=False).logits[0].float())


def test_a_scale_behind_the_head_that_is_not_known_is_refused(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: forward(hidden) * 0.5
    with pytest.raises(SourceError, match="a way this tool does not know"):
        Head.of(model)


def test_shared_ids_cut_both_weight_and_bias() -> None:
    head = Head(torch.nn.Linear(4, 8)).sharing(5)
    hidden = torch.randn(3, 4)
    assert torch.equal(head.logits(hidden), torch.nn.functional.linear(hidden, head.weight_VH[:5], head.bias_V[:5]))
    assert head.sharing(8) is head or head.sharing(8).size == 8
