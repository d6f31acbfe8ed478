"""What vLLM's own process does that needs no vLLM."""

from __future__ import annotations

import torch

from harness.engines.vllm_child import keep


def test_inputs_are_kept_as_rows_whether_or_not_they_have_a_batch() -> None:
    """transformers' models in vLLM call their Linears with [1, rows, K]."""
    linear, seen = torch.nn.Linear(4, 2), dict[str, list[torch.Tensor]]()
    hook = keep("up", linear, seen)
    prompt, token = torch.randn(1, 3, 4), torch.randn(1, 1, 4)
    linear(prompt), linear(token), linear(token[0])
    hook.remove()
    assert torch.equal(torch.cat(seen["up"]), torch.cat([prompt[0], token[0], token[0]]))
