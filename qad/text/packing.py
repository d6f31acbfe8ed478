"""Documents packed end to end into windows, and documents that are evaluated one by one.

Packing puts documents end to end into windows [S, T] without padding. `position_ids` restart at every document;
transformers derives from them an attention mask that keeps documents apart (attention_mask must be None). Where that does
not keep them apart (recurrent layers; qad.model.isolation), a window holds one document and padding behind it, which no
real token sees and no loss counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from qad.errors import DataError
from qad.text.chat import encode_chat, encode_supervised
from qad.text.documents import Document, Part, shuffled
from qad.text.sight import Seen, Shown, Sight
from qad.text.windows import StoredWindows, WindowWriter

MINIMUM = 32  # tokens of a document that is worth evaluating on


def encode(tokenizer: Any, doc: Document) -> list[int]:
    """Token ids: text as the tokenizer adds special tokens by default, conversations as the chat template writes them.

    Raises DataError for a conversation with images, which are not seen here.
    """
    if doc.pictures:
        raise DataError(f"{doc.where}: the conversation shows images, which are not read here: give text alone")
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
        self._orders = [shuffled(part.documents, seed) for part in parts]

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
    folder: Path,
    parts: Sequence[Part],
    tokenizer: Any,
    windows: int,
    seq_len: int,
    seed: int,
    what: str,
    loss_on: Literal["all", "text", "assistant"] = "all",
    rows: bool = False,
    sight: Sight | None = None,
) -> StoredWindows:
    """Pack shuffled documents into `windows` windows of `seq_len` tokens, into a folder; no token is used twice.

    A document that does not fit goes on in the next window as a new one. The order depends on `seed` alone.
    loss_on: text is all that is no image.
    rows: one document a window, padded; one with images is cut at the window's end.
    sight: what reads the images.
    Raises DataError where the text is too short, saying how many tokens there are, and where nothing of it would count.
    """
    draw = Draw(parts, seed)
    with WindowWriter(folder, windows, seq_len, loss_on == "all", _padding(tokenizer) if rows else None) as writer:
        for part, doc in draw:
            said: list[bool] | None = None
            shown: Shown | None = None
            if doc.pictures and sight:
                assert rows, "a document with images is a window of its own"
                ids, said, shown = sight.encode(tokenizer, doc, seq_len, "assistant" if loss_on == "assistant" else "text")
            elif loss_on == "assistant":
                ids, said = encode_answers(tokenizer, doc, parts[part].name)
            else:
                ids = encode(tokenizer, doc)
                said = [True] * len(ids) if loss_on == "text" else None
            draw.taken[part] += writer.add(ids, said, shown)
            if not writer.room:
                break
        else:
            raise DataError(
                f"{what} needs {windows * seq_len:,} tokens ({windows} windows of {seq_len}) but {draw.exhausted}: "
                "ask for fewer or give more text"
            )
        packed = writer.finish(draw.sources, sight.digest if sight else None)
    if not packed.counted:
        raise DataError(
            f"{what} has no token that the assistant says: give conversations with answers, or use train.loss_on: all"
        )
    return packed


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Evaluation text: (document key, int64 [T]) pairs, the source of each, the tokens of each source, and what the model is
    given beside the ids of those that show images."""

    pairs: list[tuple[str, Tensor]]
    sources: dict[str, int]
    domains: list[str]
    seen: list[Seen | None] = dataclasses.field(default_factory=list)

    @property
    def shows_images(self) -> bool:
        return any(self.seen)


def sequences(
    parts: Sequence[Part],
    tokenizer: Any,
    tokens: int,
    seq_len: int,
    seed: int,
    minimum: int = MINIMUM,
    sight: Sight | None = None,
) -> Sequences:
    """One sequence a document, cut at seq_len, none below `minimum` tokens, until `tokens` are reached. Documents are
    independent, so they are the clusters of intervals.

    Raises DataError where the text is too short.
    """
    chosen: list[tuple[str, Tensor]] = []
    domains: list[str] = []
    beside: list[Seen | None] = []
    draw = Draw(parts, seed)
    for part, doc in draw:
        seen: Seen | None = None
        if doc.pictures and sight:
            ids, seen = sight.sequence(tokenizer, doc, seq_len)
        else:
            ids = torch.tensor(encode(tokenizer, doc)[:seq_len])
        if len(ids) < minimum:
            continue
        chosen.append((doc.key[:16], ids))
        domains.append(parts[part].name)
        beside.append(seen)
        draw.taken[part] += len(ids)
        if sum(draw.taken) >= tokens:
            return Sequences(chosen, draw.sources, domains, beside)
    raise DataError(
        f"the test split needs {tokens:,} tokens in documents of {minimum} or more but {draw.exhausted}: "
        "ask for fewer or give more text"
    )


def _padding(tokenizer: Any) -> int:
    """An id that the model knows."""
    named = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((int(token) for token in named if token is not None), 0)
