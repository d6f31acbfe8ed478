"""Packing keeps documents apart and wastes nothing; blends keep their shares; what counts is what should be learned."""

from __future__ import annotations

import hashlib
import itertools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from packed import pack_in_memory
from padding import padded

from qad.errors import DataError
from qad.model.loader import load_model, load_tokenizer
from qad.model.source import open_checkpoint
from qad.text.documents import Document, Part
from qad.text.packing import encode, sequences
from qad.text.windows import NO_LABEL, Windows


@pytest.fixture(scope="session")
def tokenizer(tiny_llama_dir: Path) -> Any:
    return load_tokenizer(tiny_llama_dir)


def docs(count: int, length: int = 30, word: str = "heron") -> list[Document]:
    return [Document.of(f"document {i}: " + f"the {word} waits for a fish " * length) for i in range(count)]


def chats(count: int) -> list[Document]:
    return [
        Document.of_messages(
            [
                {"role": "user", "content": f"How many sacks of flour, said the miller {i} times, are there in the house?"},
                {"role": "assistant", "content": f"There are {i}."},
            ]
        )
        for i in range(count)
    ]


def part(documents: list[Document], weight: float = 1.0, name: str = "text") -> Part:
    return Part(name, weight, documents)


def test_packing_restarts_positions_at_documents_and_windows_and_uses_every_token(tokenizer: Any) -> None:
    texts = docs(6, 3)
    windows = pack_in_memory([part(texts)], tokenizer, 4, 32, seed=0, what="x")
    positions = windows.position_ids_ST
    assert (positions[:, 0] == 0).all()
    step = positions.flatten().diff()
    assert ((step == 1) | (positions.flatten()[1:] == 0)).all()
    starts = sum(len(encode(tokenizer, d)) for d in texts)
    assert windows.tokens == 128 <= starts
    packed = windows.input_ids_ST.flatten().tolist()
    streams = {tuple(encode(tokenizer, d)) for d in texts}
    first_document = next(s for s in streams if packed[: len(s)] == list(s))
    assert positions.flatten()[: min(32, len(first_document))].tolist() == list(range(min(32, len(first_document))))


def test_a_long_document_goes_on_in_the_next_windows(tokenizer: Any) -> None:
    windows = pack_in_memory([part([Document.of_ids(range(10)), Document.of_ids(range(100, 130))])], tokenizer, 4, 9, 1, "x")
    assert windows.input_ids_ST.flatten().tolist() in ([*range(10), *range(100, 126)], [*range(100, 130), *range(6)])
    first = 10 if windows.input_ids_ST[0, 0] == 0 else 30
    expected = [place % 9 if place < first else min(place % 9, place - first) for place in range(36)]
    assert windows.position_ids_ST.flatten().tolist() == expected


def test_the_bits_of_a_packing_are_those_of_earlier_runs() -> None:
    """Tokens, positions and order of a lone source: recorded before blends, epochs and chats were there."""

    class Letters:
        def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text]}

    windows = pack_in_memory([part(docs(12, 2))], Letters(), 6, 48, 3, "x")
    content = hashlib.sha256(windows.input_ids_ST.numpy().tobytes() + windows.position_ids_ST.numpy().tobytes())
    assert content.hexdigest()[:32] == "40e45b86d42d1af3f4ed190370ff88ea"
    assert windows.indices(2, 2, 3).tolist() == [2, 3]


def test_the_order_depends_on_the_seed_alone(tokenizer: Any) -> None:
    first, again, other = (pack_in_memory([part(docs(20))], tokenizer, 4, 64, seed, "x") for seed in (0, 0, 1))
    assert first.digest == again.digest != other.digest
    assert torch.equal(first.input_ids_ST, again.input_ids_ST)


def test_text_that_is_too_short_says_how_much_there_is(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"training needs 64,000 tokens .* but its text has [\d,]+"):
        pack_in_memory([part(docs(2))], tokenizer, 1000, 64, 0, "training")


# --- blends ---


def test_every_source_has_its_share_within_one_document_at_every_moment(tokenizer: Any) -> None:
    def of_length(first: int, length: int) -> list[Document]:
        return [Document.of_ids([first] * (length + i % 5)) for i in range(400)]

    parts = [part(of_length(1, 7), 3.0, "a"), part(of_length(2, 40), 1.0, "b"), part(of_length(3, 15), 0.5, "c")]
    for windows in (1, 4, 20, 60):
        packed = pack_in_memory(parts, tokenizer, windows, 64, 0, "x")
        counts = torch.bincount(packed.input_ids_ST.flatten(), minlength=4)[1:].tolist()
        assert packed.sources == dict(zip("abc", counts, strict=True))
        for p in parts:
            assert abs(packed.sources[p.name] - packed.tokens * p.weight / 4.5) <= 44


def test_a_source_of_a_blend_that_runs_out_is_named(tokenizer: Any) -> None:
    parts = [part(docs(200), 1.0, "long.txt"), part(docs(1, 1, "duck"), 1.0, "short.txt")]
    with pytest.raises(DataError, match=r"but short.txt, with 50% of them, has \d+: ask"):
        pack_in_memory(parts, tokenizer, 20, 64, 0, "training")


# --- what counts ---


def test_labels_are_the_next_token_of_the_same_document_and_everything_counts(tokenizer: Any) -> None:
    windows = pack_in_memory([part([Document.of_ids([1, 2, 3]), Document.of_ids([4, 5, 6])])], tokenizer, 1, 6, 0, "x")
    first, second = ([1, 2, 3], [4, 5, 6]) if windows.input_ids_ST[0, 0] == 1 else ([4, 5, 6], [1, 2, 3])
    assert windows.labels_ST.tolist() == [[*first[1:], NO_LABEL, *second[1:], NO_LABEL]]
    assert windows.counted_ST.all()


def test_with_the_assistant_alone_a_position_counts_where_it_predicts_the_answer(tokenizer: Any) -> None:
    windows = pack_in_memory([part(chats(40))], tokenizer, 8, 64, 0, "x", "assistant")
    learned = windows.labels_ST[windows.counted_ST]
    words = tokenizer.decode(learned).split("<|im_end|>")
    assert 0 < windows.counted < windows.tokens / 2
    assert len(words) > 4
    assert all(word == "" or word.startswith("There are ") for word in words[1:-1])
    assert (learned != NO_LABEL).all()
    every = pack_in_memory([part(chats(40))], tokenizer, 8, 64, 0, "x")
    assert torch.equal(every.input_ids_ST, windows.input_ids_ST)
    assert every.digest != windows.digest


def test_of_a_generation_what_the_teacher_wrote_counts(tokenizer: Any) -> None:
    made = [Document.of_ids([i, 100, 101, 102, 103], prompt=2) for i in range(4)]
    windows = pack_in_memory([part(made)], tokenizer, 2, 10, 0, "x", "assistant")
    assert windows.counted_ST.tolist() == [[False, True, True, True, False] * 2] * 2


def test_text_without_turns_is_refused_where_the_assistant_alone_counts(tokenizer: Any) -> None:
    for doc in (docs(1)[0], Document.of_ids(range(40))):
        with pytest.raises(DataError, match=r"loss_on: assistant needs conversations, and notes.txt holds documents"):
            pack_in_memory([part([doc], name="notes.txt")], tokenizer, 1, 32, 0, "x", "assistant")


def test_conversations_without_any_answer_are_refused(tokenizer: Any) -> None:
    unanswered = [Document.of_messages([{"role": "user", "content": f"Who counts {i} sacks of flour?"}]) for i in range(40)]
    with pytest.raises(DataError, match="training has no token that the assistant says"):
        pack_in_memory([part(unanswered)], tokenizer, 4, 32, 0, "training", "assistant")


def test_padding_counts_nowhere_and_no_real_token_attends_to_it(tiny_llama_dir: Path, tokenizer: Any) -> None:
    windows = pack_in_memory([part(chats(20))], tokenizer, 3, 48, 0, "x", "assistant")
    model = load_model(open_checkpoint(tiny_llama_dir), "float32", "cpu").base_model
    with torch.no_grad():
        alone = model(windows.input_ids_ST, position_ids=windows.position_ids_ST, use_cache=False).last_hidden_state
    for left, right in ((0, 0), (64, 0), (0, 64), (1, 1)):
        wider = padded(windows, left, right, 0)
        inside = slice(left, left + 48)
        assert wider.input_ids_ST.shape == (3, left + 48 + right)
        assert torch.equal(wider.counted_ST[:, inside], windows.counted_ST)
        assert torch.equal(wider.labels_ST[:, inside], windows.labels_ST)
        assert wider.counted == windows.counted
        assert (wider.labels_ST != NO_LABEL).sum() == (windows.labels_ST != NO_LABEL).sum()
        with torch.no_grad():
            hidden = model(wider.input_ids_ST, position_ids=wider.position_ids_ST, use_cache=False).last_hidden_state
        torch.testing.assert_close(hidden[:, inside], alone, rtol=1e-4, atol=1e-5)


def test_packed_documents_do_not_attend_to_each_other(tiny_llama_dir: Path, tokenizer: Any) -> None:
    """Hidden states of a packed window equal those of its documents run alone."""
    windows = pack_in_memory([part(docs(6, 1))], tokenizer, 2, 48, seed=0, what="x")
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


# --- the order of steps ---


def numbered(count: int) -> Windows:
    return Windows.of(torch.arange(count)[:, None].repeat(1, 4), torch.arange(4).repeat(count, 1))


def test_the_first_epoch_is_as_packed_and_later_ones_repeat_nothing_within() -> None:
    windows, epochs = numbered(12), []
    for epoch in range(3):
        seen = torch.cat([windows.indices(epoch * 4 + step, 3, seed=7) for step in (1, 2, 3, 4)]).tolist()
        assert sorted(seen) == list(range(12))
        epochs.append(seen)
    assert epochs[0] == list(range(12))
    assert len({tuple(e) for e in epochs}) == 3
    assert epochs[1] != [windows.indices(5 + step, 3, seed=8).tolist() for step in range(4)]
    assert windows.indices(9, 3, seed=7).tolist() == epochs[2][:3]  # of (seed, step) alone


def test_the_ranks_of_a_step_share_its_windows_in_order() -> None:
    windows = numbered(12)
    for step in (1, 5, 8):
        whole = windows.indices(step, 4, seed=1)
        assert torch.equal(torch.cat([windows.indices(step, 4, 1, rank, 2) for rank in (0, 1)]), whole)


# --- evaluation ---


def test_evaluation_sequences_are_whole_documents_cut_at_the_limit(tokenizer: Any) -> None:
    chosen = sequences([part(docs(20))], tokenizer, tokens=400, seq_len=50, seed=0)
    assert [len(ids) for _, ids in chosen.pairs] == [50] * 8
    assert len({key for key, _ in chosen.pairs}) == 8
    assert chosen.sources == {"text": 400}
    with pytest.raises(DataError, match="test split needs 10,000 tokens"):
        sequences([part(docs(2))], tokenizer, tokens=10_000, seq_len=50, seed=0)


def test_evaluation_keeps_the_shares_of_a_blend_and_leaves_short_documents_out(tokenizer: Any) -> None:
    short = [Document.of_ids([i] * 31) for i in range(9)]
    parts = [part([*docs(20), *short], 1.0, "a"), part(docs(20, 30, "duck"), 3.0, "b")]
    chosen = sequences(parts, tokenizer, tokens=800, seq_len=50, seed=0)
    assert chosen.sources == {"a": 200, "b": 600}
    assert {len(ids) for _, ids in chosen.pairs} == {50}


def test_conversations_are_evaluated_as_the_template_writes_them(tokenizer: Any) -> None:
    chosen = sequences([part(chats(9))], tokenizer, tokens=100, seq_len=200, seed=0)
    assert all(tokenizer.decode(ids).startswith("<|im_start|>user\n") for _, ids in chosen.pairs)


def test_one_document_a_row_is_padded_and_counts_what_is_real() -> None:
    docs_ = [Document.of_ids(range(10, 10 + n)) for n in (5, 9, 3)]
    none = types.SimpleNamespace(pad_token_id=0)
    windows = pack_in_memory([part(docs_)], none, 5, 4, 0, "x", rows=True)
    assert windows.input_ids_ST.shape == (5, 4)
    starts = [row[0] for row in windows.input_ids_ST.tolist()]
    real = windows.input_ids_ST != 0
    assert windows.padding == int((~real).sum()) > 0
    assert torch.equal(windows.counted_ST, real)
    assert windows.counted == sum(windows.sources.values())
    for row, ids in enumerate(windows.input_ids_ST.tolist()):
        n = int(real[row].sum())
        assert real[row, :n].all()  # padding behind, never in between
        assert windows.position_ids_ST[row].tolist() == [*range(n), *range(4 - n)]
        assert windows.labels_ST[row].tolist() == [*ids[1:n], *[NO_LABEL] * (4 - n + 1)]
    assert starts[0] in (10, 14, 18)
    assert windows.facts()["padding"] == windows.padding
    packed = pack_in_memory([part(docs_)], none, 4, 4, 0, "x")
    assert packed.padding == 0
    assert "padding" not in packed.facts()


def test_what_the_assistant_says_is_learned_in_rows_as_in_packed_windows(tokenizer: Any) -> None:
    windows = pack_in_memory([part(chats(40))], tokenizer, 8, 64, 0, "x", "assistant", rows=True)
    assert windows.padding > 0
    assert (windows.labels_ST[windows.counted_ST] != NO_LABEL).all()
    assert 0 < windows.counted < windows.tokens - windows.padding
