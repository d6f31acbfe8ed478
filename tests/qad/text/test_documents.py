"""Splits never overlap, whatever the documents are made of."""

from __future__ import annotations

import pytest

from qad.errors import DataError
from qad.text.documents import ROLES, Document, Part, digest_documents, require_disjoint, split_of


def docs(count: int) -> list[Document]:
    return [Document.of(f"document {i}: the heron waits for a fish") for i in range(count)]


def test_a_document_lands_in_one_split_whatever_its_white_space() -> None:
    assert split_of(Document.of("a  b\nc")) == split_of(Document.of("a b c"))
    assert {split_of(d) for d in docs(200)} == set(ROLES)


def test_a_conversation_is_known_by_roles_words_and_whatever_else_it_holds() -> None:
    turn = {"role": "user", "content": "How  many\nsacks?"}
    same = Document.of_messages([{"role": "user", "content": "How many sacks?"}])
    assert Document.of_messages([turn]).key == same.key
    assert Document.of_messages([{**turn, "role": "system"}]).key != same.key
    assert Document.of_messages([{**turn, "tool_calls": [{"name": "count"}]}]).key != same.key


def test_token_documents_are_known_by_their_ids() -> None:
    assert Document.of_ids([1, 2, 3], prompt=1).key == Document.of_ids([1, 2, 3]).key != Document.of_ids([1, 23]).key


@pytest.mark.parametrize("same", [docs(3), [Document.of_ids([5, 6])]], ids=["text", "ids"])
def test_two_roles_that_share_a_document_are_refused(same: list[Document]) -> None:
    with pytest.raises(DataError, match="train and test text share a document"):
        require_disjoint({"train": [Part("a", 1.0, docs(9)[5:]), Part("b", 1.0, same)], "test": [Part("c", 1.0, same[-1:])]})


def test_the_identity_of_a_blend_holds_documents_order_and_weights() -> None:
    a, b = docs(2), docs(4)[2:]
    parts = [Part("x", 1.0, a), Part("y", 1.0, b)]
    renamed = [Part("z", 1.0, a), Part("y", 1.0, b)]
    others = [[Part("x", 2.0, a), Part("y", 1.0, b)], parts[::-1], parts[:1], [Part("x", 1.0, a + b)]]
    assert digest_documents(parts) == digest_documents(renamed)
    assert digest_documents(parts) not in map(digest_documents, others)
