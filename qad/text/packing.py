"""Token windows: documents packed end to end, what counts in the loss, and the order in which steps see them.

Packing puts documents end to end into windows [S, T] without padding. `position_ids` restart at every document;
transformers derives from them an attention mask that keeps documents apart (attention_mask must be None). Padding, where
a caller adds it, is a document of its own: no real token attends to it.

Shape suffixes: S windows, T tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from qad.errors import DataError
from qad.text.chat import encode_chat, encode_supervised
from qad.text.documents import Document, Part, generator_of, shuffled

NO_LABEL = -100  # what torch's cross-entropy ignores
MINIMUM = 32  # tokens of a document that is worth evaluating on


@dataclasses.dataclass(frozen=True)
class Windows:
    """Packed token windows.

    input_ids_ST, position_ids_ST: int64 [S, T]. counted_ST: bool [S, T], True where the position's next-token distribution
    is in the loss; padding never is. labels_ST: int64 [S, T], the next token of the same document, NO_LABEL (-100) where
    there is none. sources: tokens by source, as packed. digest: identity of all of it.
    """

    input_ids_ST: Tensor
    position_ids_ST: Tensor
    counted_ST: Tensor
    labels_ST: Tensor
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, input_ids_ST: Tensor, position_ids_ST: Tensor, supervised_ST: Tensor | None = None) -> Windows:
        """Derive labels and counted positions. supervised_ST: bool [S, T], True for tokens to be learned: position t counts
        where token t+1 is in the same document and supervised. None: every position counts."""
        follows_ST = torch.zeros_like(input_ids_ST, dtype=torch.bool)
        follows_ST[:, :-1] = position_ids_ST[:, 1:] == position_ids_ST[:, :-1] + 1
        labels_ST = torch.where(follows_ST, input_ids_ST.roll(-1, dims=1), NO_LABEL)
        counted_ST = (
            torch.ones_like(follows_ST) if supervised_ST is None else follows_ST & supervised_ST.roll(-1, dims=1)
        )
        return cls(input_ids_ST, position_ids_ST, counted_ST, labels_ST)

    def __len__(self) -> int:
        return self.input_ids_ST.shape[0]

    @property
    def tokens(self) -> int:
        return self.input_ids_ST.numel()

    @property
    def counted(self) -> int:
        """How many positions are in the loss."""
        return int(self.counted_ST.sum())

    @property
    def digest(self) -> str:
        content = hashlib.sha256()
        for tensor in (self.input_ids_ST, self.position_ids_ST, self.counted_ST):
            content.update(tensor.contiguous().numpy().tobytes())
        return content.hexdigest()

    def facts(self) -> dict[str, Any]:
        """What a report says about them: tokens, positions in the loss, tokens by source."""
        return {"tokens": self.tokens, "counted": self.counted, "sources": dict(self.sources)}

    def indices(self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """Which windows step 1, 2, ... sees, int64: a pure function of its arguments, so that a resumed run needs no state.

        An epoch is len(self) // batch_size steps and sees no window twice. The first one takes the windows as they are
        packed; each later one in an order of its own, from (seed, epoch). `rank` of `ranks` gets its equal part of the step's
        batch_size windows; the parts of all ranks are the batch of one.
        """
        assert batch_size % ranks == 0, "every rank takes as many windows"
        epoch, place = divmod(step - 1, len(self) // batch_size)
        first = place * batch_size + rank * (batch_size // ranks)
        order = torch.arange(len(self)) if epoch == 0 else _order(len(self), seed, epoch)
        return order[first : first + batch_size // ranks]


def _order(windows: int, seed: int, epoch: int) -> Tensor:
    """A permutation of the windows, int64 [S], from (seed, epoch) alone."""
    return torch.randperm(windows, generator=generator_of(f"{seed} {epoch}"))


def encode(tokenizer: Any, doc: Document) -> list[int]:
    """Token ids: text as the tokenizer adds special tokens by default, conversations as the chat template writes them."""
    if doc.ids is not None:
        return list(doc.ids)
    if doc.messages is not None:
        return encode_chat(tokenizer, doc.messages, doc.where, doc.given)
    ids: list[int] = tokenizer(doc.text, verbose=False)["input_ids"]  # long texts do not warn
    return ids


def encode_answers(tokenizer: Any, doc: Document, what: str) -> tuple[list[int], list[bool]]:
    """Token ids, and for each whether the assistant (or the teacher, in its generations) says it.

    Raises DataError for a document without turns, where nothing could tell.
    """
    if doc.messages is not None:
        return encode_supervised(tokenizer, doc.messages, doc.where, doc.given)
    if doc.ids is not None and doc.prompt:
        return list(doc.ids), [i >= doc.prompt for i in range(len(doc.ids))]
    raise DataError(
        f"train.loss_on: assistant needs conversations, and {what} holds documents without turns ({doc.sample}): give "
        "chat messages (field: messages) or generations, or use train.loss_on: all"
    )


class Draw:
    """Documents of a blend, one after another: always the next one of the part that is furthest behind its share, so that
    after every document each part has its share of the tokens within one document. Each part's order depends on `seed`
    alone. Iterating ends where the part whose turn it is has no more; `taken` counts tokens by part."""

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self.parts = parts
        self.taken = [0] * len(parts)
        self._orders = [iter(shuffled(part.documents, seed)) for part in parts]

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        while True:
            part = self._turn()
            doc = next(self._orders[part], None)
            if doc is None:
                return
            yield part, doc

    def _turn(self) -> int:
        return min(range(len(self.parts)), key=lambda i: self.taken[i] / self.parts[i].weight)

    @property
    def sources(self) -> dict[str, int]:
        """Tokens taken by source."""
        return {part.name: tokens for part, tokens in zip(self.parts, self.taken, strict=True)}

    @property
    def exhausted(self) -> str:
        """Whose text ended, for the message."""
        if len(self.parts) == 1:
            return f"its text has {self.taken[0]:,}"
        part = self._turn()
        share = self.parts[part].weight / sum(p.weight for p in self.parts)
        return f"{self.parts[part].name}, with {share:.0%} of them, has {self.taken[part]:,}"


def pack(
    parts: Sequence[Part],
    tokenizer: Any,
    windows: int,
    seq_len: int,
    seed: int,
    what: str,
    loss_on: Literal["all", "assistant"] = "all",
) -> Windows:
    """Pack shuffled documents into `windows` windows of `seq_len` tokens; no token is used twice.

    A document that does not fit goes on in the next window as a new one. The order depends on `seed` alone.
    Raises DataError where the text is too short, saying how many tokens there are, and where nothing of it would count.
    """
    need = windows * seq_len
    ids: list[int] = []
    positions: list[int] = []
    supervised: list[bool] = []
    draw = Draw(parts, seed)
    for part, doc in draw:
        if loss_on == "assistant":
            new, answers = encode_answers(tokenizer, doc, parts[part].name)
            supervised += answers
        else:
            new = encode(tokenizer, doc)
        positions += _positions(len(new), len(ids), seq_len)
        ids += new
        draw.taken[part] += len(new) - max(0, len(ids) - need)
        if len(ids) >= need:
            break
    if len(ids) < need:
        raise DataError(
            f"{what} needs {need:,} tokens ({windows} windows of {seq_len}) but {draw.exhausted}: "
            "ask for fewer or give more text"
        )
    ids_ST, positions_ST = (torch.tensor(held[:need]).view(windows, seq_len) for held in (ids, positions))
    mask_ST = torch.tensor(supervised[:need]).view(windows, seq_len) if loss_on == "assistant" else None
    packed = dataclasses.replace(Windows.of(ids_ST, positions_ST, mask_ST), sources=draw.sources)
    if not packed.counted:
        raise DataError(
            f"{what} has no token that the assistant says: give conversations with answers, or use train.loss_on: all"
        )
    return packed


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Evaluation text: (document key, int64 [T]) pairs, the source of each, and the tokens of each source."""

    pairs: list[tuple[str, Tensor]]
    sources: dict[str, int]
    domains: list[str]


def sequences(
    parts: Sequence[Part], tokenizer: Any, tokens: int, seq_len: int, seed: int, minimum: int = MINIMUM
) -> Sequences:
    """One sequence a document, cut at seq_len, none below `minimum` tokens, until `tokens` are reached. Documents are
    independent, so they are the clusters of intervals.

    Raises DataError where the text is too short.
    """
    chosen: list[tuple[str, Tensor]] = []
    domains: list[str] = []
    draw = Draw(parts, seed)
    for part, doc in draw:
        ids = encode(tokenizer, doc)[:seq_len]
        if len(ids) < minimum:
            continue
        chosen.append((doc.key[:16], torch.tensor(ids)))
        domains.append(parts[part].name)
        draw.taken[part] += len(ids)
        if sum(draw.taken) >= tokens:
            return Sequences(chosen, draw.sources, domains)
    raise DataError(
        f"the test split needs {tokens:,} tokens in documents of {minimum} or more but {draw.exhausted}: "
        "ask for fewer or give more text"
    )


def _positions(length: int, start: int, seq_len: int) -> Iterator[int]:
    """Positions of a document laid from offset `start`: they restart at each window boundary."""
    room = seq_len - start % seq_len
    yield from range(min(length, room))
    for i in range(max(0, length - room)):
        yield i % seq_len
