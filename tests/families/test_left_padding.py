"""Prompts of unequal length written on together, as the teacher's generations and lm-eval do, against each alone: padding at the
left leaks into no state of a recurrence or convolution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import config_of

from qad.model.loader import auto_class
from qad.text.data import Generations
from qad.text.generate import TeacherText

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
HYBRIDS = ["Nemotron-H dense", "Granite-hybrid dense", "Falcon-H1", "Bamba", "LFM2", "Jamba", "Qwen3-Next", "Qwen3.5 text"]


def model_of(name: str) -> Any:
    """Biases are at random as well: those of a convolution would fill a state that padding reaches."""
    torch.manual_seed(0)
    model = auto_class(config_of(name)).from_config(config_of(name)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() >= 2 else parameter.add_(0.5 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_batch_writes_what_each_prompt_alone_does(name: str) -> None:
    teacher = TeacherText(None, None, 0, Path(), lambda: model_of(name), "float32")  # type: ignore[arg-type]
    settings = Generations(source="teacher", length=8)
    drawn = torch.randint(3, 500, (17,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts, seeds = [drawn[:2], drawn], ["a", "b"]
    together = teacher._write(settings, prompts, seeds)
    assert together == [teacher._write(settings, [prompt], [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]


@pytest.mark.parametrize("name", HYBRIDS)
def test_padding_at_the_left_changes_no_logit(name: str) -> None:
    model, ids = model_of(name), torch.randint(3, 500, (1, 3), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([torch.zeros(1, 14, dtype=torch.int64), ids], 1)
    positions = (padded > 0).long().cumsum(1).sub(1).clamp_min(0)
    with torch.no_grad():
        alone = model(ids).logits
        found = model(padded, attention_mask=(padded > 0).long(), position_ids=positions).logits[:, 14:]
    assert float((found - alone).abs().max() / alone.abs().max()) < 1e-5
