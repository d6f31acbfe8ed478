"""What the models write themselves: where greedy decoding first differs, and how the student likes text the teacher wrote.

Both begin with the first `prompt_tokens` of each sequence. The teacher writes at temperature 1 from a generator seeded by (seed,
number of the prompt), so that the mean of log p_teacher - log p_student over what it wrote is an unbiased estimate of the KL of
whole continuations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.records.record import Continuation
from harness.serving.in_process import cache_argument
from qad.errors import DataError


def beginnings(sequences: Sequence[tuple[str, Tensor]], prompt_tokens: int) -> list[tuple[str, Tensor]]:
    """The prompts, of the sequences that are longer. Raises DataError where none is."""
    chosen = [(cluster, ids[:prompt_tokens]) for cluster, ids in sequences if len(ids) > prompt_tokens]
    if not chosen:
        raise DataError(f"no sequence of the test text is longer than a prompt of {prompt_tokens} tokens: ask for a shorter one")
    return chosen


def measure_continuations(
    students: Mapping[str, nn.Module],
    teacher: nn.Module,
    sequences: Sequence[tuple[str, Tensor]],
    *,
    prompt_tokens: int,
    new_tokens: int,
    seed: int = 0,
) -> dict[str, list[Continuation]]:
    """student -> one entry for each sequence, (cluster, int64 [T]), with more than `prompt_tokens` tokens.

    Raises DataError where there is none.
    """
    chosen = beginnings(sequences, prompt_tokens)
    found: dict[str, list[Continuation]] = {name: [] for name in students}
    for number, (cluster, prompt) in enumerate(chosen):
        greedy = _greedy(teacher, prompt, new_tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + number)
            written = _written(teacher, prompt, new_tokens)
        nll_teacher = _nll(teacher, prompt, written)
        for name, student in students.items():
            own = _greedy(student, prompt, new_tokens)
            equal = next((i for i, (a, b) in enumerate(zip(greedy, own, strict=False)) if a != b), min(len(greedy), len(own)))
            diverged = equal < max(len(greedy), len(own))
            nll = _nll(student, prompt, written)
            found[name].append(Continuation(cluster, equal, diverged, len(written), nll_teacher, nll))
    return found


def _greedy(model: nn.Module, prompt: Tensor, new_tokens: int) -> list[int]:
    """Ids that follow the prompt, ending with the end-of-text id where it comes up."""
    return _generated(model, prompt, lambda logits_V: int(logits_V.argmax()), new_tokens)


def _written(model: nn.Module, prompt: Tensor, new_tokens: int) -> list[int]:
    def draw(logits_V: Tensor) -> int:
        return int(torch.multinomial(logits_V.double().softmax(-1).cpu(), 1))

    return _generated(model, prompt, draw, new_tokens)


def _generated(model: nn.Module, prompt: Tensor, choose: Callable[[Tensor], int], new_tokens: int) -> list[int]:
    ends = _end_ids(model)
    device = next(model.parameters()).device
    name = cache_argument(model)
    held: dict[str, object] = {}
    ids = prompt[None].to(device)
    found: list[int] = []
    with torch.no_grad():
        while len(found) < new_tokens:
            out = model(input_ids=ids, use_cache=True, **held)
            found.append(choose(out.logits[0, -1]))
            if found[-1] in ends:
                break
            ids, held = torch.tensor([[found[-1]]], device=device), {name: getattr(out, name)}
    return found


def _nll(model: nn.Module, prompt: Tensor, written: list[int]) -> float:
    """Nats of the written ids after the prompt."""
    device = next(model.parameters()).device
    ids = torch.cat([prompt, torch.tensor(written)])[None].to(device)
    with torch.no_grad():
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_q = logits_TV.double().log_softmax(-1)
    return float(-log_q.gather(1, ids[0, len(prompt) :, None]).sum())


def _end_ids(model: nn.Module) -> set[int]:
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids: list[int | None] = named if isinstance(named, list) else [named]
    return {id for id in ids if id is not None}
