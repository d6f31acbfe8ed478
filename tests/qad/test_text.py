"""Splits never overlap; packing keeps documents apart and wastes nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from qad.config import DataSource
from qad.errors import DataError
from qad.loader import load_model, load_tokenizer
from qad.packing import pack, sequences
from qad.source import open_checkpoint
from qad.text import ROLES, Document, documents, encode, require_disjoint, split_of


@pytest.fixture(scope="session")
def tokenizer(tiny_llama_dir: Path) -> object:
    return load_tokenizer(tiny_llama_dir)


def docs(count: int, length: int = 30) -> list[Document]:
    return [Document.of(f"document {i}: " + "the heron waits for a fish " * length) for i in range(count)]


def source(path: Path, **fields: str) -> DataSource:
    return DataSource.model_validate(
        {"source": "jsonl" if path.suffix == ".jsonl" else "text", "path": str(path), **fields}
    )


def test_the_python_docs_split_into_four_disjoint_roles() -> None:
    splits = {role: documents(DataSource.model_validate("python-docs"), role) for role in ROLES}
    require_disjoint(splits)
    sizes = {role: len(found) for role, found in splits.items()}
    assert sizes["train"] > 5 * sizes["test"] > 0
    assert min(sizes.values()) > 50


def test_a_document_lands_in_one_split_whatever_its_white_space_and_order() -> None:
    assert split_of(Document.of("a  b\nc")) == split_of(Document.of("a b c"))
    assert {split_of(d) for d in docs(200)} == set(ROLES)


def test_repeated_documents_count_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "the same words"}) + "\n" for _ in range(5)))
    assert len(documents(source(path, split="all"), "train")) == 1


def test_two_roles_that_share_a_document_are_refused() -> None:
    same = docs(3)
    with pytest.raises(DataError, match="train and test text share a document"):
        require_disjoint({"train": same, "test": same[1:]})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "holds no text"),
        ("blank.txt", "\n \n\n", "holds no text"),
        ("bad.jsonl", "{\n", "line 1"),
        ("field.jsonl", '{"body": "x"}\n', "text field 'text'"),
        ("type.jsonl", '{"text": 3}\n', "is int, expected text"),
    ],
)
def test_unusable_text_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        documents(source(path, split="all"), "train")


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        documents(source(tmp_path / "none.txt"), "train")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        documents(source(tmp_path / "x.txt"), "train")


def test_a_role_without_any_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("only one document here\n")
    empty = next(role for role in ROLES if role != split_of(Document.of("only one document here")))
    with pytest.raises(DataError, match=f"{empty} split"):
        documents(source(path), empty)


def test_packing_restarts_positions_at_documents_and_windows_and_uses_every_token(tokenizer: object) -> None:
    texts = docs(6, 3)
    windows = pack(texts, tokenizer, 4, 32, seed=0, what="x")
    positions = windows.position_ids_ST
    assert (positions[:, 0] == 0).all()
    step = positions.flatten().diff()
    assert ((step == 1) | (positions.flatten()[1:] == 0)).all()
    starts = sum(len(encode(tokenizer, d.text)) for d in texts)
    assert windows.tokens == 128 <= starts
    packed = windows.input_ids_ST.flatten().tolist()
    streams = {tuple(encode(tokenizer, d.text)) for d in texts}
    first_document = next(s for s in streams if packed[: len(s)] == list(s))
    assert positions.flatten()[: min(32, len(first_document))].tolist() == list(range(min(32, len(first_document))))


def test_the_order_depends_on_the_seed_alone(tokenizer: object) -> None:
    first, again, other = (pack(docs(20), tokenizer, 4, 64, seed, "x") for seed in (0, 0, 1))
    assert first.digest == again.digest != other.digest
    assert torch.equal(first.input_ids_ST, again.input_ids_ST)


def test_text_that_is_too_short_says_how_much_there_is(tokenizer: object) -> None:
    with pytest.raises(DataError, match=r"training needs 64,000 tokens .* but its text has [\d,]+"):
        pack(docs(2), tokenizer, 1000, 64, 0, "training")


def test_evaluation_sequences_are_whole_documents_cut_at_the_limit(tokenizer: object) -> None:
    chosen = sequences(docs(20), tokenizer, tokens=400, seq_len=50, seed=0)
    assert [len(ids) for _, ids in chosen] == [50] * 8
    assert len({key for key, _ in chosen}) == 8
    with pytest.raises(DataError, match="asked for"):
        sequences(docs(2), tokenizer, tokens=10_000, seq_len=50, seed=0)


def test_packed_documents_do_not_attend_to_each_other(tiny_llama_dir: Path, tokenizer: object) -> None:
    """Hidden states of a packed window equal those of its documents run alone."""
    windows = pack(docs(6, 1), tokenizer, 2, 48, seed=0, what="x")
    model = load_model(open_checkpoint(tiny_llama_dir), "float32", "cpu").base_model
    with torch.no_grad():
        packed = model(windows.input_ids_ST, position_ids=windows.position_ids_ST, use_cache=False).last_hidden_state
    pieces = 0
    for row, (ids, positions) in enumerate(zip(windows.input_ids_ST, windows.position_ids_ST, strict=True)):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, stop in itertools.pairwise(starts):
            with torch.no_grad():
                alone = model(ids[None, start:stop], use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(packed[row, start:stop], alone, rtol=1e-4, atol=1e-5)
            pieces += 1
    assert pieces > 2
