"""What counts as parity, on made-up log-probabilities."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.parity import rules as parity
from harness.records import record as records
from harness.records.record import Engine, ParityData, ParityLayer, ParityPrompt, Record

VOCABULARY = 11


def log_probs(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double().log_softmax(-1)


def compared(off: torch.Tensor | float = 0.0, tokens: int = 3, floor: float | None = None) -> ParityPrompt:
    """A prompt of 4 tokens and `tokens` new ones; the engine's values are the reference's plus `off`."""
    ours = log_probs(3 + tokens)
    found = parity.compare_prompt([1, 2, 3, 4], ours[3:].argmax(-1), (ours + off).float(), ours)
    return dataclasses.replace(found, floor_kl=floor)


def towards(seed: int) -> torch.Tensor:
    """What turns the reference's log-probabilities into others."""
    return log_probs(6, seed) - log_probs(6)


def judged(prompts: list[ParityPrompt], layers: tuple[ParityLayer, ...] = (), **how: Any) -> ParityData:
    facts = {"dtype": "float32", "device": "cpu", "hides_inputs": False, "reference_": "made up", "log": ["a line"]}
    return parity.judge(prompts, list(layers), **{**facts, **how})


def test_rounding_is_parity_and_more_is_not() -> None:
    assert judged([compared(9e-4)]).holds
    data = judged([compared(9e-4), compared(2e-3)])
    assert data.failures == ["prompt 1 (4 + 3 tokens): log-probabilities 0.002 nats apart, 3 of 3 greedy tokens agree"]
    assert not data.holds


def test_one_log_probability_at_one_position_is_enough() -> None:
    off = torch.zeros(6, VOCABULARY)
    off[1, 7] = 0.01
    assert compared(off).max_difference == pytest.approx(0.01, abs=1e-5)
    assert not judged([compared(off)]).holds


def test_generated_tokens_are_held_against_the_references_argmax() -> None:
    ours = log_probs(6)
    tokens = ours[3:].argmax(-1)
    tokens[1] = (tokens[1] + 1) % VOCABULARY
    found = parity.compare_prompt([1, 2, 3, 4], tokens, ours.float(), ours)
    assert (found.tokens_equal, found.output_tokens) == (2, 3)


def test_not_a_number_is_none_and_never_parity() -> None:
    off = torch.zeros(6, VOCABULARY)
    off[0, 0] = float("nan")
    assert compared(off).max_difference is None
    for hidden in (False, True):
        data = judged([compared(off)], hides_inputs=hidden)
        assert data.failures == ["prompt 0 (4 + 3 tokens): log-probabilities that are not numbers"]


def test_a_padded_vocabulary_is_compared_as_far_as_both_have_it() -> None:
    ours = log_probs(6)
    padded = torch.cat([ours.float(), torch.full((6, 5), -50.0)], dim=-1)
    found = parity.compare_prompt([1, 2, 3, 4], ours[3:].argmax(-1), padded, ours)
    assert found.max_difference == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "device", "hidden", "strict"),
    [
        ("float32", "cpu", False, True),
        ("float32", "cpu", True, False),
        ("bfloat16", "cpu", False, False),
        ("float32", "cuda", False, False),
    ],
)
def test_where_every_log_probability_has_to_agree(dtype: str, device: str, hidden: bool, strict: bool) -> None:
    assert parity.must_agree(dtype, device, hidden) is strict
    far = [compared(towards(1), floor=10.0)]
    assert judged(far, dtype=dtype, device=device, hides_inputs=hidden).holds is not strict


def test_where_inputs_part_is_named() -> None:
    (line,) = judged([dataclasses.replace(compared(2e-3), parts_at="layers.3.o_proj")]).failures
    assert line.endswith("; its inputs part from the reference's at layers.3.o_proj")


def test_hidden_activations_are_held_by_the_references_own_rounding() -> None:
    distance = compared(towards(1)).mean_kl
    assert distance is not None
    inside, outside = (compared(towards(1), floor=distance / share) for share in (2.9, 3.1))
    assert judged([compared(), inside], hides_inputs=True).holds
    (line,) = judged([outside], hides_inputs=True).failures
    assert line.startswith("1 prompts: mean KL ")
    assert line.endswith("0 of 3 greedy tokens agree") or "3 greedy tokens agree" in line


def test_prompts_are_held_together_because_where_a_code_flips_first_is_chance() -> None:
    distance = compared(towards(1)).mean_kl or 0.0
    early, late = compared(towards(1), floor=0.0), compared(towards(1), floor=distance)
    assert judged([early, late], hides_inputs=True).holds
    assert not judged([early, early, early, late], hides_inputs=True).holds


def test_without_any_floor_the_tolerance_bounds_the_distance() -> None:
    assert not judged([compared(towards(1), floor=0.0)], hides_inputs=True).holds


def test_a_finer_dtype_has_the_same_values_and_leaves_no_trace() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).eval()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = model(x)
    with parity.finer(model):
        assert all(t.dtype in (torch.float64, torch.int64) for t in model.state_dict().values())
        assert torch.allclose(model(x.double()).float(), plain, atol=1e-6)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in before)
    assert torch.equal(model(x), plain)


def test_a_layer_is_compared_relative_to_its_largest_output() -> None:
    expected = {"a": torch.tensor([[100.0, 1.0]]), "b": torch.tensor([[1.0, 2.0]]), "absent": torch.ones(1, 2)}
    found = {"a": torch.tensor([[100.05, 1.0]]), "b": torch.tensor([[1.0, 2.1, 7.0]])}
    layers = parity.compare_layers(found, expected)
    assert [layer.module for layer in layers] == ["a", "b"]
    assert layers[0].max_difference == pytest.approx(5e-4, rel=1e-2)
    (line,) = judged([], tuple(layers)).failures
    assert line == "b: 0.05 of its largest output apart, on the same input"


def test_what_else_is_wrong_with_the_folder_fails_it() -> None:
    assert judged([compared()], other=["a file changed"]).failures == ["a file changed"]


def test_prompts_leave_room_within_a_short_sequence() -> None:
    class Words:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text)))}

    short = parity.prompts(Words(), 32)
    assert len(short) == 4
    assert all(2 <= len(ids) <= parity.SHORT - 32 for ids in short)
    assert [len(ids) for ids in parity.prompts(Words(), 32, "x" * 500, 300)][-1] == 300


def test_a_record_is_written_and_read(tmp_path: Path) -> None:
    data = judged([compared(1e-4, floor=0.5)], (ParityLayer("a", None),), hides_inputs=False)
    engine = Engine("vllm", "0.32.0", "float32", "cpu", "CpuNvFp4LinearKernel (FP4 emulated)", True)
    record = Record("ptq", "m", "c" * 64, engine, {"dtype": "float32"}, {}, "2025-01-01", 1.0, data)
    records.write(record, tmp_path / "parity.json")
    again = records.read(tmp_path / "parity.json")
    assert again == record
    assert again.kind == "parity"
    assert isinstance(again.data, ParityData)
    assert not again.data.holds
