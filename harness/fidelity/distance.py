"""Distance of students from their teacher on text: KL divergence, top-1 agreement, perplexity.

Every number is exact over the full vocabulary. Log-probabilities are FP64 from the model's own logits on, so the KL of
equal logits is exactly zero and a difference of 1e-9 nats is seen.

Shape suffixes: B sequences of equal length, T tokens, V vocabulary, N = B * (T - 1) predicted tokens, C a chunk of N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.fidelity.strata import by_domain, by_entropy, by_position
from harness.records.record import FidelityData, FidelitySequence
from qad.errors import BrokenCheckpointError, DataError
from qad.text.sight import Seen

TEACHER = "bf16"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}

# FP64 values of one log-softmax chunk: 2**22 is 32 MiB, of which a handful live at a time.
_CHUNK_ELEMENTS = 2**22


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Per predicted token [N]: kl, nll, the teacher's entropy in nats (FP64), agree (bool)."""

    kl: Tensor
    agree: Tensor
    nll_teacher: Tensor
    nll_student: Tensor
    entropy: Tensor


class _Collected:
    """What one student's sequences add up to."""

    def __init__(self) -> None:
        self.sequences: list[FidelitySequence] = []
        self.kl: list[Tensor] = []  # and the following: [T - 1] a sequence
        self.agree: list[Tensor] = []
        self.entropy: list[Tensor] = []

    def add(self, clusters: Sequence[str], tokens: _Tokens) -> None:
        """Split [N] tokens evenly over the batch's sequences."""
        n = tokens.kl.numel() // len(clusters)
        parts = (tokens.kl, tokens.agree, tokens.nll_teacher, tokens.nll_student)
        sums = [part.view(len(clusters), n).sum(dim=1).tolist() for part in parts]
        for cluster, kl, agree, teacher, student in zip(clusters, *sums, strict=True):
            self.sequences.append(FidelitySequence(cluster, n, kl, int(agree), teacher, student))
        self.kl += tokens.kl.view(len(clusters), n).unbind()
        self.agree += tokens.agree.view(len(clusters), n).unbind()
        self.entropy += tokens.entropy.view(len(clusters), n).unbind()

    def data(self, name: str, domains: Sequence[str] | None) -> FidelityData:
        kl = torch.cat(self.kl)
        return FidelityData(
            name,
            self.sequences,
            {**token_quantiles(kl), "max": float(kl.max())},
            by_position=by_position(self.kl, self.agree),
            by_entropy=by_entropy(self.kl, self.agree, self.entropy),
            by_domain=by_domain(self.kl, self.agree, domains) if domains and len(set(domains)) > 1 else None,
        )


def measure_fidelity(
    students: Mapping[str, nn.Module],
    teacher: nn.Module,
    sequences: Sequence[tuple[str, Tensor]],
    data_name: str,
    progress: Callable[[int], object] | None = None,
    *,
    batch_size: int = 1,
    teacher_name: str = TEACHER,
    domains: Sequence[str] | None = None,
    seen: Sequence[Seen | None] = (),
) -> dict[str, FidelityData]:
    """One pass over `sequences`, (cluster, int64 [T]) pairs: the teacher runs once for all students.

    The teacher itself is in the result under `teacher_name`: zero KL and full agreement by definition (its noise
    floor is not measured here), and the perplexity of the text. Consecutive sequences of equal length are batched up
    to `batch_size`; the logits of one batch under all models are held at a time. `progress` is called with the number
    of sequences just finished. domains: the source of each sequence, for the distance by source.
    seen: what goes with each sequence, where any shows images; predictions of text alone count then.

    Raises DataError for text that cannot be scored, BrokenCheckpointError where a model's logits are not numbers.
    """
    if teacher_name in students:
        raise DataError(f"{teacher_name!r} names the teacher and a student: rename the student")
    _check(sequences, teacher)
    models = {teacher_name: teacher, **students}
    collected = {name: _Collected() for name in models}
    device = next(teacher.parameters()).device
    with torch.no_grad():
        for clusters, input_ids_BT, beside in _batches(sequences, seen, batch_size):
            logits_NV = {name: _logits(model, input_ids_BT, device, beside) for name, model in models.items()}
            targets_N = input_ids_BT[:, 1:].reshape(-1).to(device)
            if beside:
                targets_N = targets_N[beside.text_T[1:].to(device)]
            for name, tokens in _compare(logits_NV, targets_N).items():
                collected[name].add(clusters, tokens)
            if progress:
                progress(len(clusters))
    return {name: entry.data(data_name, domains) for name, entry in collected.items()}


def token_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P || Q) = sum_v p (log p - log q) along the last dimension, in nats, of log-probabilities.

    A term with p = 0 is zero, also where log p is -inf (a token both models mask). KL is never negative; its sum of
    rounded terms can be, by some 1e-16, and is then set to 0. NaN stays NaN.
    """
    p = log_p.exp()
    kl: Tensor = torch.linalg.vecdot(p, log_p - log_q)
    if kl.isnan().any():
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
        kl = torch.where(log_p.isnan().any(-1) | log_q.isnan().any(-1), torch.nan, terms)
    return kl.clamp(min=0.0)


def token_quantiles(values: Tensor) -> dict[str, float]:
    """QUANTILES of a 1-D tensor, linear between neighbours. (torch.quantile refuses more than 16M values.)"""
    ordered = values.double().sort().values
    result = {}
    for name, share in QUANTILES.items():
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        result[name] = float(ordered[low] + (place - low) * (ordered[high] - ordered[low]))
    return result


def _compare(logits_NV: Mapping[str, Tensor], targets_N: Tensor) -> dict[str, _Tokens]:
    """All models against the first, chunked over tokens. The first, the teacher, is at distance zero from itself."""
    teacher, *students = logits_NV
    vocabulary = logits_NV[teacher].shape[-1]
    for name in students:
        if logits_NV[name].shape[-1] != vocabulary:
            raise DataError(
                f"{name} has a vocabulary of {logits_NV[name].shape[-1]}, its teacher one of {vocabulary}: "
                "fidelity needs the same tokenizer"
            )
    chunks: dict[str, list[_Tokens]] = {name: [] for name in logits_NV}
    rows = max(1, _CHUNK_ELEMENTS // vocabulary)
    for start in range(0, len(targets_N), rows):
        target_C1 = targets_N[start : start + rows, None]
        log_p_CV = logits_NV[teacher][start : start + rows].double().log_softmax(-1)
        top_C = log_p_CV.argmax(-1)
        nll_p = -log_p_CV.gather(1, target_C1).squeeze(1)
        zero = torch.zeros_like(nll_p)
        entropy = torch.special.entr(log_p_CV.exp()).sum(-1)
        chunks[teacher].append(_Tokens(zero, zero == 0, nll_p, nll_p, entropy))
        for name in students:
            log_q_CV = logits_NV[name][start : start + rows].double().log_softmax(-1)
            nll_q = -log_q_CV.gather(1, target_C1).squeeze(1)
            kl = token_kl(log_p_CV, log_q_CV)
            chunks[name].append(_Tokens(kl, top_C == log_q_CV.argmax(-1), nll_p, nll_q, entropy))
    return {name: _joined(name, parts) for name, parts in chunks.items()}


def _joined(name: str, parts: list[_Tokens]) -> _Tokens:
    tokens = _Tokens(*(torch.cat([getattr(p, f.name) for p in parts]).cpu() for f in dataclasses.fields(_Tokens)))
    if not (tokens.kl.isfinite().all() and tokens.nll_student.isfinite().all()):
        raise BrokenCheckpointError(f"the logits of {name} are NaN or infinite on the test text: check its weights")
    return tokens


def _logits(model: nn.Module, input_ids_BT: Tensor, device: torch.device, beside: Seen | None) -> Tensor:
    """Logits of every token whose successor is text, [N, V], in the model's dtype, moved to `device`."""
    own = next(model.parameters()).device
    held = {name: value.to(own) for name, value in beside.inputs().items()} if beside else {}
    logits_BTV: Tensor = model(input_ids=input_ids_BT.to(own), use_cache=False, **held).logits
    logits_NV = logits_BTV[:, :-1].flatten(0, 1)
    return (logits_NV[beside.text_T[1:].to(own)] if beside else logits_NV).to(device)


def _batches(
    sequences: Sequence[tuple[str, Tensor]], seen: Sequence[Seen | None], size: int
) -> Iterator[tuple[list[str], Tensor, Seen | None]]:
    """Consecutive sequences of equal length, at most `size` together, stacked to int64 [B, T]; one that shows images alone."""
    held: list[tuple[str, Tensor]] = []
    for number, entry in enumerate(sequences):
        beside = seen[number] if seen else None
        if held and (beside or len(held) == size or len(held[0][1]) != len(entry[1])):
            yield [cluster for cluster, _ in held], torch.stack([ids for _, ids in held]), None
            held = []
        if beside:
            yield [entry[0]], entry[1][None], beside
        else:
            held.append(entry)
    if held:
        yield [cluster for cluster, _ in held], torch.stack([ids for _, ids in held]), None


def _check(sequences: Sequence[tuple[str, Tensor]], teacher: nn.Module) -> None:
    if not sequences:
        raise DataError("no sequences to measure fidelity on: give a longer test text")
    for cluster, ids in sequences:
        if ids.dim() != 1 or len(ids) < 2:
            raise DataError(f"sequence {cluster!r} has shape {list(ids.shape)}: it takes two tokens to predict one")
    vocabulary = getattr(getattr(teacher, "config", None), "vocab_size", None)
    largest = max(int(ids.max()) for _, ids in sequences)
    if vocabulary is not None and largest >= vocabulary:
        raise DataError(f"token id {largest} is beyond the vocabulary of {vocabulary}: use the model's own tokenizer")
