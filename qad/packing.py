"""Token windows: documents packed end to end, what counts in the loss, and the order in which steps see them.

Packing puts documents end to end into windows [S, T] without padding. `position_ids` restart at every document;
transformers derives from them an attention mask that keeps documents apart (attention_mask must be None). Padding, where
a caller adds it, is a document of its own: no real token attends to it.

Shape suffixes: S windows, T tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qad.errors import DataError
from qad.text import Document, encode, shuffled

NO_LABEL = -100  # what torch's cross-entropy ignores


@dataclasses.dataclass(frozen=True)
class Windows:
    """Packed token windows.

    input_ids_ST, position_ids_ST: int64 [S, T]. counted_ST: bool [S, T], True where the position's next-token distribution
    is in the loss; padding never is. labels_ST: int64 [S, T], the next token of the same document, NO_LABEL (-100) where
    there is none. digest: identity of all of it.
    """

    input_ids_ST: Tensor
    position_ids_ST: Tensor
    counted_ST: Tensor
    labels_ST: Tensor

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

    def rows(self, index: slice | Tensor) -> Windows:
        """Some of the windows, in the order of `index`."""
        return Windows(
            self.input_ids_ST[index], self.position_ids_ST[index], self.counted_ST[index], self.labels_ST[index]
        )

    def split(self, size: int) -> Iterator[Windows]:
        """Consecutive groups of at most `size` windows: micro-batches."""
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

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

    def batch(self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> Windows:
        """The windows of a step; see `indices`."""
        return self.rows(self.indices(step, batch_size, seed, rank, ranks))

    def padded(self, left: int, right: int, pad_id: int) -> Windows:
        """The same windows with `left` and `right` padding tokens at their sides. Each side is a document of its own (its
        positions restart) and counts nowhere."""

        def around(tensor_ST: Tensor, before_T: Tensor, after_T: Tensor) -> Tensor:
            sides = [side.to(tensor_ST.dtype).expand(len(self), -1) for side in (before_T, after_T)]
            return torch.cat([sides[0], tensor_ST, sides[1]], dim=1)

        def constant(value: int) -> tuple[Tensor, Tensor]:
            return torch.full((left,), value), torch.full((right,), value)

        return Windows(
            around(self.input_ids_ST, *constant(pad_id)),
            around(self.position_ids_ST, torch.arange(left), torch.arange(right)),
            around(self.counted_ST, *constant(0)),
            around(self.labels_ST, *constant(NO_LABEL)),
        )


def _order(windows: int, seed: int, epoch: int) -> Tensor:
    """A permutation of the windows, int64 [S], from (seed, epoch) alone."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7])
    return torch.randperm(windows, generator=torch.Generator().manual_seed(mixed))


def pack(docs: Sequence[Document], tokenizer: Any, windows: int, seq_len: int, seed: int, what: str) -> Windows:
    """Pack shuffled documents into `windows` windows of `seq_len` tokens; no token is used twice.

    A document that does not fit goes on in the next window as a new one. The order depends on `seed` alone.
    Raises DataError where the text is too short, saying how many tokens there are.
    """
    need = windows * seq_len
    ids: list[int] = []
    positions: list[int] = []
    for doc in shuffled(docs, seed):
        for token, position in _segments(encode(tokenizer, doc.text), len(ids), seq_len):
            ids.append(token)
            positions.append(position)
        if len(ids) >= need:
            break
    if len(ids) < need:
        raise DataError(
            f"{what} needs {need:,} tokens ({windows} windows of {seq_len}) but its text has {len(ids):,}: "
            "ask for fewer or give more text"
        )
    return Windows.of(
        torch.tensor(ids[:need]).view(windows, seq_len), torch.tensor(positions[:need]).view(windows, seq_len)
    )


def sequences(
    docs: Sequence[Document], tokenizer: Any, tokens: int, seq_len: int, seed: int, minimum: int = 32
) -> list[tuple[str, Tensor]]:
    """(document key, int64 [T]) pairs for evaluation: one sequence a document, cut at seq_len, none below `minimum`
    tokens, until `tokens` are reached. Documents are independent, so they are the clusters of intervals.

    Raises DataError where the text is too short.
    """
    chosen: list[tuple[str, Tensor]] = []
    total = 0
    for doc in shuffled(docs, seed):
        ids = encode(tokenizer, doc.text)[:seq_len]
        if len(ids) < minimum:
            continue
        chosen.append((doc.key[:16], torch.tensor(ids)))
        total += len(ids)
        if total >= tokens:
            return chosen
    raise DataError(f"the test split has {total:,} tokens in documents of {minimum} or more, {tokens:,} asked for")


def _segments(ids: list[int], start: int, seq_len: int) -> Iterator[tuple[int, int]]:
    """(token, position) of a document laid from offset `start`: positions restart at each window boundary."""
    position = 0
    for i, token in enumerate(ids):
        if (start + i) % seq_len == 0:
            position = 0
        yield token, position
        position += 1
