"""The KL that the top k of a served model leave: by hand, and never above the exact one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from harness.engines.transformers import LoadedModel
from harness.fidelity import topk
from harness.fidelity.distance import token_kl
from harness.fidelity.topk import measure_topk, topk_kl
from qad.errors import DataError


def test_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.4, 0.4, 0.1, 0.1]).double()
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4) + 0.2 * math.log(0.2 / 0.2)
    assert topk_kl(p.log(), torch.tensor([0, 1]), q[:2].log()) == pytest.approx(expected, rel=1e-6)
    assert topk_kl(p.log(), torch.arange(4), q.log()) == pytest.approx(float(token_kl(p.log(), q.log())), rel=1e-6)


@pytest.mark.parametrize("k", [1, 5, 20, 63])
def test_it_is_a_lower_bound_that_grows_with_k(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    for scale in (0.1, 1.0, 5.0):
        log_p = (scale * torch.randn(64, generator=generator).double()).log_softmax(-1)
        log_q = (log_p + 0.5 * torch.randn(64, generator=generator).double()).log_softmax(-1)
        order = log_q.argsort(descending=True)
        exact = float(token_kl(log_p, log_q))
        bound = topk_kl(log_p, order[:k], log_q[order[:k]])
        assert bound <= exact + 1e-9
        assert bound >= topk_kl(log_p, order[: k - 1], log_q[order[: k - 1]]) - 1e-9 if k > 1 else bound >= 0


def test_a_served_model(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model served: every term of the bound is zero, and the rest is what the model in this process says."""

    def ask_json(url: str, payload: Any, **_: Any) -> Any:
        ids = payload["prompt"]
        with torch.no_grad():
            log_probs = tiny.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        top = [None]
        for row in log_probs[:-1]:
            values, names = row.topk(payload["logprobs"])
            top.append({f"token_id:{n}": v for n, v in zip(names.tolist(), values.tolist(), strict=True)})
        own = [None, *(float(log_probs[i, ids[i + 1]]) for i in range(len(ids) - 1))]
        names = [f"token_id:{i}" for i in (ids if payload["logprobs"] else ids[::-1])]
        return {"choices": [{"logprobs": {"tokens": names, "token_logprobs": own, "top_logprobs": top}}]}

    monkeypatch.setattr(topk, "ask_json", ask_json)
    ids = torch.randint(512, (12,), generator=torch.Generator().manual_seed(0))
    data = measure_topk("http://h/v1", "m", tiny.model, [("a", ids)], "text", 20)
    (sequence,) = data.sequences
    assert (sequence.tokens, sequence.top1_agree) == (11, 11)
    assert sequence.kl_sum == pytest.approx(0.0, abs=1e-6)
    assert sequence.nll_student_sum == pytest.approx(sequence.nll_teacher_sum, rel=1e-9)
    assert data.bound == "top 20 tokens and a bucket of all others: a lower bound"
    with pytest.raises(DataError, match="it scored other tokens than it was sent"):
        measure_topk("http://h", "m", tiny.model, [("a", ids)], "text", 0)


TOP: list[Any] = [None, {"token_id:5": -0.1}, {"token_id:6": -0.1}]
NONSENSE: dict[str, Any] = {
    "an object": {},
    "a number": 7,
    "no choice": {"choices": []},
    "no log-probabilities": {"choices": [{"logprobs": None}]},
    "a positive one": {"token_logprobs": [None, 0.5, -1.0]},
    "a string": {"token_logprobs": [None, "x", -1.0]},
    "null": {"token_logprobs": [None, None, -1.0]},
    "too few": {"token_logprobs": [None, -1.0]},
    "a token beyond the vocabulary": {"top_logprobs": [None, {"token_id:99999": -0.1}, TOP[2]]},
    "a token below it": {"top_logprobs": [None, {"token_id:-1": -0.1}, TOP[2]]},
    "names for ids": {"top_logprobs": [None, {"word": -0.1}, TOP[2]]},
    "a number for a position": {"top_logprobs": [None, 3, TOP[2]]},
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_server_that_scores_nonsense_is_refused(name: str, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"tokens": ["token_id:4", "token_id:5", "token_id:6"], "token_logprobs": [None, -1.0, -1.0], "top_logprobs": TOP}
    change = NONSENSE[name]
    reply = {"choices": [{"logprobs": {**told, **change}}]} if isinstance(change, dict) and {*change} & {*told} else change
    monkeypatch.setattr(topk, "ask_json", lambda *_, **__: reply)
    with pytest.raises(DataError, match="does not score prompts by token id") as caught:
        measure_topk("http://h", "m", tiny.model, [("a", torch.tensor([4, 5, 6]))], "text", 1)
    assert "\n" not in str(caught.value)
