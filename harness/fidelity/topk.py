"""Distance of a served model from its teacher, of which an API tells the top k log-probabilities only: a lower bound of the KL.

The vocabulary is cut into the k tokens that the server names and one bucket of all others. KL never grows when outcomes are
merged, so that of the k + 1 parts is at most that of the whole vocabulary. The teacher runs in this process: its side is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.engines.answers import ask_json
from harness.fidelity.distance import token_quantiles
from harness.records.record import FidelityData, FidelitySequence
from qad.errors import DataError
from qad.untrusted import is_number

# What is left of a served distribution, at least: FP32 log-probabilities add up to 1 within about this. Too large a bucket makes
# the bound lower, and a bound it stays.
_LEAST_TAIL = 1e-6


def topk_kl(log_p_V: Tensor, ids_k: Tensor, log_q_k: Tensor) -> float:
    """sum_k p (log p - log q) + P (log P - log Q), P and Q the probabilities of all other tokens, in nats.

    log_p_V: the teacher's log-probabilities, FP64 [V]; ids_k, log_q_k: the tokens the server named and their log-probabilities.
    """
    log_p_k, log_q_k = log_p_V[ids_k], log_q_k.double()
    p_k = log_p_k.exp()
    named = torch.where(p_k > 0, p_k * (log_p_k - log_q_k), 0.0).sum()
    p_tail = max(0.0, float(1 - p_k.sum()))
    q_tail = max(_LEAST_TAIL, float(1 - log_q_k.exp().sum()))
    tail = p_tail * (torch.tensor(p_tail).double().log() - torch.tensor(q_tail).double().log()) if p_tail > 0 else 0.0
    return max(0.0, float(named + tail))


def measure_topk(
    url: str, model: str, teacher: nn.Module, sequences: Sequence[tuple[str, Tensor]], data_name: str, k: int
) -> FidelityData:
    """sequences: (cluster, int64 [T]) pairs. The server has to score prompts and to name tokens by id, as vLLM does.

    Raises DataError for a server that does not.
    """
    kls: list[float] = []
    found: list[FidelitySequence] = []
    device = next(teacher.parameters()).device
    for cluster, ids_T in sequences:
        with torch.no_grad():
            logits_TV = teacher(input_ids=ids_T[None].to(device), use_cache=False).logits[0, :-1]
        served = _ask(url, model, ids_T.tolist(), k, logits_TV.shape[-1])
        log_p_TV = logits_TV.double().log_softmax(-1).cpu()
        own, agree, theirs = [], 0, 0.0
        for log_p_V, named, target in zip(log_p_TV, served, ids_T[1:].tolist(), strict=True):
            ids_k = torch.tensor(list(named))
            log_q_k = torch.tensor(list(named.values()), dtype=torch.float64)
            own.append(topk_kl(log_p_V, ids_k, log_q_k))
            agree += int(log_p_V.argmax()) == int(ids_k[log_q_k.argmax()])
            theirs -= named[target]
        nll = -float(log_p_TV.gather(1, ids_T[1:, None]).sum())
        found.append(FidelitySequence(cluster, len(own), sum(own), agree, nll, theirs))
        kls += own
    values = torch.tensor(kls, dtype=torch.float64)
    quantiles = {**token_quantiles(values), "max": float(values.max())}
    return FidelityData(data_name, found, quantiles, bound=f"top {k} tokens and a bucket of all others: a lower bound")


def _log_probability(value: object) -> float:
    """Raises ValueError for what is none; rounding may leave one slightly above 0."""
    if not is_number(value) or value > 1e-3:
        raise ValueError(f"{str(value)[:40]} is no log-probability")
    return float(value)


def _ask(url: str, model: str, ids: list[int], k: int, vocabulary: int) -> list[dict[int, float]]:
    """Of every token but the first: ids below `vocabulary` that the server names, the token itself among them, with their
    log-probabilities."""
    payload = {
        "model": model,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "logprobs": k,
        "return_tokens_as_token_ids": True,
    }
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/completions"
    try:
        told = ask_json(address, payload, timeout_s=600, proxied=True)["choices"][0]["logprobs"]
        top = told["top_logprobs"][1 : len(ids)]
        own = list(zip(told["tokens"][1 : len(ids)], told["token_logprobs"][1 : len(ids)], strict=True))
        found = [
            {int(name.removeprefix("token_id:")): _log_probability(logp) for name, logp in (entry | {token: value}).items()}
            for entry, (token, value) in zip(top, own, strict=True)
        ]
        if [int(token.removeprefix("token_id:")) for token, _ in own] != ids[1:]:
            raise ValueError("it scored other tokens than it was sent")
        if len(found) != len(ids) - 1 or not all(0 <= token < vocabulary for named in found for token in named):
            raise ValueError("it names tokens that the teacher has not, or leaves some out")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(
            f"{url} does not score prompts by token id ({error}): fidelity over an API needs a server that does, such as vLLM"
        ) from error
    return found
