"""Windows on disk: the same bits as in memory, few bytes, no memory, made once for as long as nothing changes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qad.recipes import job as job_module
from qad.recipes.job import prepare
from qad.recipes.recipe import Recipe
from qad.text.documents import Document, Part, shuffled
from qad.text.packing import pack
from qad.text.windows import StoredWindows, Windows


class Made(Sequence[Document]):
    """Documents that exist while somebody looks at them."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Document:
        return Document.of_ids(range(i, i + self.length), prompt=1 + i % 7)

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(self.count))


def stored(folder: Path, tokens: int, loss_on: Any = "all", seq_len: int = 96, length: int = 250) -> StoredWindows:
    folder.mkdir()
    part = Part("made", 1.0, Made(2 + tokens // length, length))
    return pack(folder, [part], None, tokens // seq_len, seq_len, 0, "x", loss_on)


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_windows_on_disk_are_those_in_memory_to_the_bit(tmp_path: Path, loss_on: str) -> None:
    found = stored(tmp_path / "w", 96 * 40, loss_on)
    stream, begins, said = [], [], []
    for doc in shuffled(Made(2 + 96 * 40 // 250, 250), 0):
        stream += doc.ids or ()
        begins += [True, *[False] * 249]
        said += [i >= doc.prompt for i in range(250)]
    positions = []
    for place, begin in enumerate(begins):
        positions.append(0 if begin or place % 96 == 0 else positions[-1] + 1)
    ids, pos, mask = (torch.tensor(held[: 96 * 40]).view(40, 96) for held in (stream, positions, said))
    expected = Windows.of(ids, pos, mask if loss_on == "assistant" else None)
    index = torch.tensor([39, 0, 7, 7])
    for name in ("input_ids_ST", "position_ids_ST", "counted_ST", "labels_ST"):
        assert getattr(found.at(index), name).dtype == getattr(expected, name).dtype
        assert torch.equal(getattr(found.at(index), name), getattr(expected, name)[index])
    assert found.digest == expected.digest
    assert torch.equal(found.counts, expected.counts)
    assert (found.counted, found.tokens, found.seq_len) == (expected.counted, expected.tokens, 96)


def test_a_token_takes_five_bytes_on_disk_and_none_in_memory(tmp_path: Path) -> None:
    peaks = []
    for tokens in (96 << 10, 96 << 13):
        tracemalloc.start()
        found = stored(tmp_path / str(tokens), tokens)
        found.at(torch.arange(4))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        size = sum(file.stat().st_size for file in (tmp_path / str(tokens)).iterdir())
        assert size <= 5.1 * tokens
    assert peaks[1] - peaks[0] < 0.05 * 96 * 7 * (1 << 10)


# --- made once ---


@pytest.fixture
def recipe(tiny_llama_dir: Path, tmp_path: Path) -> Recipe:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"A heron waits {i} times for a fish. " * 4}) + "\n" for i in range(200)))
    calibrate = {"data": str(text), "samples": 4, "seq_len": 32}
    train = {"data": str(text), "tokens": 1024, "seq_len": 32, "batch_size": 4, "validation_tokens": 128}
    return Recipe.model_validate({"model": str(tiny_llama_dir), "calibrate": calibrate, "train": train})


def digests(recipe: Recipe, folder: Path | None) -> list[str]:
    job = prepare(recipe, text_folder=folder)
    calibration = job.calibration_windows()
    assert calibration is not None
    return [windows.digest for windows in (calibration, job.train_windows(), job.validation_windows(), job.train_windows())]


def test_windows_are_made_once_and_again_where_anything_differs(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counting(folder: Path, *arguments: Any) -> Any:
        made.append(folder.name.removesuffix(".partial"))
        return pack(folder, *arguments)

    monkeypatch.setattr(job_module, "pack", counting)
    first = digests(recipe, tmp_path / "kept")
    assert sorted(made) == ["calibration", "train", "validation"]
    made.clear()
    assert digests(recipe, tmp_path / "kept") == first
    assert made == []
    assert recipe.train
    other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 1})})
    changed = digests(other, tmp_path / "kept")
    assert made == ["train"]
    assert [a == b for a, b in zip(first, changed, strict=True)] == [True, False, True, False]
    file = tmp_path / "text.jsonl"
    file.write_text(file.read_text().replace(" times", "  times"))  # documents are called the same, tokens are not
    spaced = digests(recipe, tmp_path / "kept")
    assert not set(spaced) & set(first)
    assert digests(recipe, None) == spaced  # in a folder that nobody keeps


def test_scratch_windows_go_with_their_job(recipe: Recipe) -> None:
    job = prepare(recipe)
    job.train_windows()
    scratch = job._scratch
    assert (scratch / "windows" / "train" / "ids.int32").is_file()
    del job
    assert not scratch.exists()
