from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engines.transformers import LoadedModel
from harness.serving.in_process import measure_throughput
from qad.errors import UsageError

SHAPE = {"vocab_size": 7, "batch": 2, "input_tokens": 5, "output_tokens": 4, "repeats": 3, "seed": 0}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class SlowModel(torch.nn.Module):
    """Takes `per_token` seconds of the fake clock per position. Counts, and checks that the cache is handed on."""

    def __init__(self, clock: Clock, per_token: float, journal: list[str], name: str) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(()))
        self.clock, self.per_token, self.journal, self.name = clock, per_token, journal, name
        self.prompts: list[Tensor] = []
        self.steps: list[tuple[int, ...]] = []
        self.cached = 0

    def forward(self, input_ids: Tensor, use_cache: bool, past_key_values: Any = None, logits_to_keep: int = 0) -> Any:
        assert use_cache
        assert logits_to_keep == 1
        if past_key_values is None:
            self.prompts.append(input_ids)
            self.journal.append(self.name)
            self.cached = 0
        else:
            assert past_key_values == self.cached, "the KV cache of the step before was not used"
            self.steps.append(tuple(input_ids.shape))
        self.cached += input_ids.shape[1]
        self.clock.now += input_ids.shape[1] * self.per_token
        return SimpleNamespace(logits=torch.zeros(input_ids.shape[0], 1, 7), past_key_values=self.cached)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("harness.serving.in_process.time", clock)
    return clock


def test_tokens_are_counted_and_phases_kept_apart(clock: Clock) -> None:
    model = SlowModel(clock, 0.5, [], "m")
    prefill, decode = measure_throughput({"m": model}, **SHAPE)["m"].points
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.batch, prefill.input_tokens, prefill.output_tokens) == (2, 5, 4)
    assert prefill.tokens_per_s == pytest.approx([2 * 5 / 2.5] * 3)
    assert decode.tokens_per_s == pytest.approx([2 * 3 / 1.5] * 3)
    assert len(model.prompts) == 1 + 3, "one warm-up and three repeats"
    assert model.steps == [(2, 1)] * (2 + 3 * 3), "warm-up decodes two tokens, each repeat three"


def test_prompts_differ_between_repeats_and_from_the_warm_up(clock: Clock) -> None:
    model = SlowModel(clock, 0.5, [], "m")
    measure_throughput({"m": model}, **{**SHAPE, "vocab_size": 50_000})
    prompts = [tuple(p.flatten().tolist()) for p in model.prompts]
    assert len(set(prompts)) == len(prompts) == 4
    again = SlowModel(clock, 0.5, [], "m")
    measure_throughput({"m": again}, **{**SHAPE, "vocab_size": 50_000})
    assert all(torch.equal(a, b) for a, b in zip(model.prompts, again.prompts, strict=True))


def test_arms_are_interleaved_on_the_same_prompts(clock: Clock) -> None:
    journal: list[str] = []
    models = {name: SlowModel(clock, speed, journal, name) for name, speed in (("a", 1.0), ("b", 0.5), ("c", 0.25))}
    ticks: list[int] = []
    measured = measure_throughput(models, **{**SHAPE, "repeats": 2}, progress=ticks.append)
    assert journal == ["a", "b", "c", "a", "b", "c", "c", "b", "a"]
    assert ticks == [1] * 6
    for i in range(3):
        assert torch.equal(models["a"].prompts[i], models["c"].prompts[i])
    assert {n: d.points[0].tokens_per_s for n, d in measured.items()} == {"a": [2.0] * 2, "b": [4.0] * 2, "c": [8.0] * 2}


def test_a_real_model_decodes_what_generate_decodes(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy with the KV cache, past an end token: the tokens of generate() without its end token."""
    fed: list[Tensor] = []
    forward = tiny.model.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        fed.append(kwargs["input_ids"])
        return forward(*args, **kwargs)

    spy.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(tiny.model, "forward", spy)
    shape = {**SHAPE, "vocab_size": 512, "batch": 2, "input_tokens": 6, "output_tokens": 9, "repeats": 1, "seed": 3}
    points = measure_throughput({"m": tiny.model}, **shape)["m"]
    monkeypatch.undo()
    assert all(rate > 0 for point in points.points for rate in point.tokens_per_s)
    prompt, *steps = fed[3:]  # a prefill and two steps of warm-up come before
    expected = tiny.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert len(steps) == 8
    assert torch.equal(torch.cat(steps, dim=1), expected[:, 6:14])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_tokens": 1}, "needs at least 2"),
        ({"batch": 0}, "at least 1"),
        ({"repeats": 0}, "at least 1"),
        ({"input_tokens": 510}, "exceed the context of model, 512"),
    ],
)
def test_shapes_that_cannot_be_measured(tiny: LoadedModel, change: dict[str, int], message: str) -> None:
    measure: Callable[..., Any] = measure_throughput
    with pytest.raises(UsageError, match=message):
        measure({"model": tiny.model}, **{**SHAPE, **change})
