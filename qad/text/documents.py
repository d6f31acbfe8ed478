"""Documents and their disjoint splits.

Splits are decided per document from the hash of its content, so the same document lands in the same split whatever
file or order it comes in, and a document can never be in two.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from qad.artifact import canonical, digest_of
from qad.errors import DataError
from qad.text.pictures import Picture

ROLES = ("calibration", "train", "validation", "test")
_SHARES = {"calibration": 10, "train": 70, "validation": 10, "test": 10}

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Document:
    """One text, one conversation, or token ids.

    key: sha256 of the words, so that a difference in white space is no difference; of the ids where there are any.
    messages: a conversation, `text` is then its plain rendering. ids: tokens, the first `prompt` of them given, the rest
    written by a model. where: file and line, for messages to the user. given: what else the chat template gets, such as tools.
    pictures: what the image parts of the messages show, in order.
    """

    text: str
    key: str
    messages: tuple[Message, ...] | None = None
    ids: tuple[int, ...] | None = None
    prompt: int = 0
    where: str = ""
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()

    @classmethod
    def of(cls, text: str, where: str = "") -> Document:
        return cls(text, _words_hash(text), where=where)

    @classmethod
    def of_messages(
        cls,
        messages: Iterable[Message],
        where: str = "",
        given: Mapping[str, Any] | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Document:
        """Messages have `role` and `content`; whatever else they hold, what the template is given and what the images hold is
        part of the key."""
        held = tuple(messages)
        plain = [canonical(given)] if given else []
        for message in held:
            rest = {name: value for name, value in message.items() if name not in ("role", "content")}
            content = message.get("content") or ""
            said = content if isinstance(content, str) else canonical(content)
            plain.append(f"{message['role']}: {said}{canonical(rest) if rest else ''}")
        text = "\n".join(plain)
        key = _words_hash(" ".join([text, *(picture.sha256 for picture in pictures)]))
        return cls(text, key, messages=held, where=where, given=given or {}, pictures=pictures)

    @classmethod
    def of_ids(cls, ids: Iterable[int], prompt: int = 0) -> Document:
        held = tuple(ids)
        return cls("", hashlib.sha256(array("q", held).tobytes()).hexdigest(), ids=held, prompt=prompt)

    @property
    def sample(self) -> str:
        """Its beginning, to find it by."""
        return f"{self.text[:40]!r}..." if self.ids is None else f"tokens {list(self.ids[:8])}..."


@dataclasses.dataclass(frozen=True)
class Part:
    """What one source gives a role: its documents and its share of the role's tokens, relative to the other parts."""

    name: str
    weight: float
    documents: Sequence[Document]


def split_of(document: Document) -> str:
    """calibration 10 %, train 70 %, validation 10 %, test 10 %, by the document's hash."""
    place = int(document.key[:8], 16) % 100
    for role in ROLES:
        place -= _SHARES[role]
        if place < 0:
            return role
    raise AssertionError("shares sum to 100")


def require_disjoint(splits: Mapping[str, Sequence[Part]]) -> None:
    """Raises DataError where two roles share a document: what is reported must not have been trained on."""
    seen: dict[str, str] = {}
    for role, parts in splits.items():
        for doc in (doc for part in parts for doc in part.documents):
            other = seen.setdefault(doc.key, role)
            if other != role:
                raise DataError(
                    f"the {other} and {role} text share a document ({doc.sample}): give each its own file, or use split: auto"
                )


def digest_documents(parts: Sequence[Part]) -> str:
    """Identity of a role's documents and of how they are blended."""
    return digest_of([[part.weight, [doc.key for doc in part.documents]] for part in parts])


def digest_contents(parts: Sequence[Part]) -> str:
    """Identity of everything that rendering and tokenizing a role's documents depends on, white space included."""
    content = hashlib.sha256()
    for part in parts:
        content.update(canonical([part.name, part.weight, len(part.documents)]).encode())
        for doc in part.documents:
            told = [doc.text, doc.messages, doc.prompt, doc.given, *(picture.sha256 for picture in doc.pictures)]
            content.update(canonical(told).encode() if doc.ids is None else array("q", (doc.prompt, *doc.ids)).tobytes())
    return content.hexdigest()


def shuffled(docs: Sequence[Document], seed: int) -> Iterator[Document]:
    """The documents in an order that depends on `seed` alone."""
    order = torch.randperm(len(docs), generator=torch.Generator().manual_seed(seed))
    return (docs[int(i)] for i in order.numpy())


def generator_of(seed: str, device: str = "cpu") -> torch.Generator:
    """A generator whose state is a function of the words of `seed`."""
    mixed = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
    return torch.Generator(device).manual_seed(mixed)


def _words_hash(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
