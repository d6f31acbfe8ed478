"""What counts as parity, on made-up log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import parity, records
from harness.records import Engine, ParityData, ParityLayer, ParityPrompt, Record

VOCABULARY = 11


def log_probs(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double().log_softmax(-1)


def compared(
    off: torch.Tensor | float = 0.0, tokens: int = 3, swapped: torch.Tensor | None = None
) -> tuple[ParityPrompt, torch.Tensor]:
    """A prompt of 4 tokens and `tokens` new ones; the engine's values are the reference's plus `off`."""
    ours = log_probs(3 + tokens)
    greedy = ours[3:].argmax(-1)
    expected = parity.Reference(ours, swapped)
    return parity.compare_prompt([1, 2, 3, 4], greedy, (ours + off).float(), expected), greedy


def judged(prompts: list[ParityPrompt], layers: tuple[ParityLayer, ...] = (), **how: Any) -> ParityData:
    facts = {
        "dtype": "float32",
        "device": "cpu",
        "quantizes_activations": True,
        "reference_": "made up",
        "log": ["a line"],
    }
    return parity.judge(prompts, list(layers), **{**facts, **how})


def test_rounding_is_parity_and_more_is_not() -> None:
    near, _ = compared(9e-4)
    assert near.tokens_equal == 3
    assert judged([near]).holds
    far, _ = compared(2e-3)
    data = judged([near, far])
    assert not data.holds
    (line,) = data.failures
    assert line == "prompt 1 (4 + 3 tokens): log-probabilities 0.002 nats apart, 3 of 3 greedy tokens agree"


def test_one_log_probability_at_one_position_is_enough() -> None:
    off = torch.zeros(6, VOCABULARY)
    off[1, 7] = 0.01
    found, _ = compared(off)
    assert found.max_difference == pytest.approx(0.01, abs=1e-5)
    assert not judged([found]).holds


def test_generated_tokens_are_held_against_the_references_argmax() -> None:
    ours = log_probs(6)
    tokens = ours[3:].argmax(-1)
    tokens[1] = (tokens[1] + 1) % VOCABULARY
    found = parity.compare_prompt([1, 2, 3, 4], tokens, ours.float(), parity.Reference(ours, None))
    assert (found.tokens_equal, found.output_tokens) == (2, 3)


def test_not_a_number_is_none_and_never_parity() -> None:
    off = torch.zeros(6, VOCABULARY)
    off[0, 0] = float("nan")
    found, _ = compared(off)
    assert found.max_difference is None
    assert judged([found]).failures == ["prompt 0 (4 + 3 tokens): log-probabilities that are not numbers"]


def test_a_padded_vocabulary_is_compared_as_far_as_both_have_it() -> None:
    ours = log_probs(6)
    padded = torch.cat([ours.float(), torch.full((6, 5), -50.0)], dim=-1)
    found = parity.compare_prompt([1, 2, 3, 4], ours[3:].argmax(-1), padded, parity.Reference(ours, None))
    assert found.max_difference == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "device", "activations", "length", "exact"),
    [
        ("float32", "cpu", True, 48, True), ("float32", "cpu", True, 49, False), ("float32", "cpu", False, 4000, True),
        ("bfloat16", "cpu", False, 8, False), ("float32", "cuda", False, 8, False),
    ],
)  # fmt: skip
def test_where_every_log_probability_has_to_agree(
    dtype: str, device: str, activations: bool, length: int, exact: bool
) -> None:
    assert parity.is_exact(dtype, device, activations, length) is exact


def test_elsewhere_the_distance_is_held_against_the_references_own_swap_of_attention() -> None:
    swapped = log_probs(6, seed=1)
    floor = compared(swapped=swapped)[0].floor_kl
    assert floor is not None
    assert floor > 0.1
    off = (swapped - log_probs(6)).float()  # the engine is just as far away as the swap
    inside, _ = compared(off, swapped=swapped)
    assert judged([inside], device="cuda", dtype="bfloat16").holds
    further = (log_probs(6) + 4 * off).log_softmax(-1)
    outside, _ = compared(further - log_probs(6), swapped=swapped)
    (line,) = judged([outside], device="cuda", dtype="bfloat16").failures
    assert "between two attention implementations" in line


def test_without_any_floor_the_tolerance_bounds_the_distance() -> None:
    other = log_probs(6)
    other[:, 0] += 1.0
    found, _ = compared(other.log_softmax(-1) - log_probs(6), swapped=log_probs(6))
    assert found.floor_kl == 0
    assert not judged([found], device="cuda").holds


def test_a_layer_is_compared_relative_to_its_largest_output() -> None:
    expected = {"a": torch.tensor([[100.0, 1.0]]), "b": torch.tensor([[1.0, 2.0]]), "absent": torch.ones(1, 2)}
    found = {"a": torch.tensor([[100.05, 1.0]]), "b": torch.tensor([[1.0, 2.1, 7.0]])}
    layers = parity.compare_layers(found, expected)
    assert [layer.module for layer in layers] == ["a", "b"]
    assert layers[0].max_difference == pytest.approx(5e-4, rel=1e-2)
    (line,) = judged([], tuple(layers)).failures
    assert line == "b: 0.05 of its largest output apart, on the same input"


def test_what_else_is_wrong_with_the_folder_fails_it() -> None:
    near, _ = compared()
    assert judged([near], other=["a file changed"]).failures == ["a file changed"]


def test_prompts_leave_room_within_a_short_sequence() -> None:
    class Words:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text)))}

    short = parity.prompts(Words(), 32)
    assert len(short) == 4
    assert all(2 <= len(ids) <= parity.SHORT - 32 for ids in short)
    assert [len(ids) for ids in parity.prompts(Words(), 32, "x" * 500, 300)][-1] == 300


def test_a_record_is_written_and_read(tmp_path: Path) -> None:
    near, _ = compared(1e-4, swapped=log_probs(6))
    data = judged([near], (ParityLayer("a", None),), quantizes_activations=False)
    engine = Engine("vllm", "0.32.0", "float32", "cpu", "CpuNvFp4LinearKernel (FP4 emulated)", True)
    record = Record("ptq", "m", "c" * 64, engine, {"dtype": "float32"}, {}, "2025-01-01", 1.0, data)
    records.write(record, tmp_path / "parity.json")
    again = records.read(tmp_path / "parity.json")
    assert again == record
    assert again.kind == "parity"
    assert isinstance(again.data, ParityData)
    assert not again.data.holds
