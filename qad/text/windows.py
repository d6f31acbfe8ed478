"""Token windows: what a step sees of packed text, in memory or on disk, and the order in which steps see it.

On disk, made once and memory-mapped by every process that reads it; 5 bytes a token:

    ids.int32        [S, T]  token ids
    marks.uint8      [S, T]  bit 0: a document begins here; bit 1: the assistant says it; bit 2: it is padding
    counts.int32     [S]     positions in the loss
    windows.json             shape, whether everything counts, tokens by source, digest
    shown.jsonl              where images are shown, a line a window: the rendered text and the images' paths and hashes, or null

A document that does not fit goes on in the next window as a new one, so positions follow from the marks of a window alone.

Shape suffixes: S windows, B windows of a batch, T tokens.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qad.artifact import digest_of
from qad.text.documents import generator_of
from qad.text.sight import Shown
from qad.untrusted import json_lines

NO_LABEL = -100  # what torch's cross-entropy ignores
_BEGINS, _SAID, _PADS = 1, 2, 4
_SHOWN = "shown.jsonl"

# What of some windows shows images, and their ids [B, T] -> the model's inputs beside the ids.
See = Callable[[Sequence[Shown | None], Tensor], Mapping[str, Tensor]]
_ROWS = 1 << 17  # tokens that are derived at one time


class WindowSet(abc.ABC):
    """Packed windows of seq_len tokens, wherever they are. sources: tokens by source. padding: tokens that are none."""

    sources: Mapping[str, int]
    padding: int

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    @abc.abstractmethod
    def seq_len(self) -> int:
        """Tokens of a window."""

    @property
    @abc.abstractmethod
    def counts(self) -> Tensor:
        """Integers [S], positions in the loss of each window."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """sha256 of ids (int64), positions (int64) and counted positions (bool), each [S, T] and one after the other."""

    @abc.abstractmethod
    def at(self, index_B: Tensor) -> Windows:
        """The windows of an index, in memory."""

    @property
    def tokens(self) -> int:
        return len(self) * self.seq_len

    @property
    def counted(self) -> int:
        """How many positions are in the loss."""
        return int(self.counts.sum())

    def facts(self) -> dict[str, object]:
        """What a report says about them: tokens, positions in the loss, tokens by source, and padding where there is any."""
        padding = {"padding": self.padding} if self.padding else {}
        return {"tokens": self.tokens, "counted": self.counted, "sources": dict(self.sources), **padding}

    def batches(self, size: int) -> Iterator[Windows]:
        """All windows in order, `size` at a time."""
        for index in torch.arange(len(self)).split(size):
            yield self.at(index)

    def first(self, count: int) -> Windows:
        """The first so many windows, in memory."""
        return self.at(torch.arange(count))

    def indices(self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """Which windows step 1, 2, ... sees, int64: a pure function of its arguments, so that a resumed run needs no state.

        An epoch is len(self) // batch_size steps and sees no window twice. The first one takes the windows as they are
        packed; each later one in an order of its own, from (seed, epoch). `rank` of `ranks` gets its equal part of the step's
        batch_size windows; the parts of all ranks are the batch of one.
        """
        assert batch_size % ranks == 0, "every rank takes as many windows"
        epoch, place = divmod(step - 1, len(self) // batch_size)
        first = place * batch_size + rank * (batch_size // ranks)
        if epoch == 0:
            return torch.arange(first, first + batch_size // ranks)
        return _order(len(self), seed, epoch)[first : first + batch_size // ranks]


@dataclasses.dataclass(frozen=True)
class Windows(WindowSet):
    """Windows in memory.

    input_ids_ST, position_ids_ST: int64 [S, T]. counted_ST: bool [S, T], True where the position's next-token distribution
    is in the loss; padding never is. labels_ST: int64 [S, T], the next token of the same document, NO_LABEL (-100) where
    there is none. sources: tokens by source, as packed. shown: of each window, where any of the set shows
    an image; see: what makes the model's other inputs of them, each time they are asked for.
    """

    input_ids_ST: Tensor
    position_ids_ST: Tensor
    counted_ST: Tensor
    labels_ST: Tensor
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)
    padding: int = 0
    shown: Sequence[Shown | None] = ()
    see: See | None = None

    def model_inputs(self, device: torch.device | str) -> dict[str, object]:
        """What a transformers model is called with. Beside images it counts positions itself, since some count them in three
        dimensions; a window is then one document."""
        ids_ST = self.input_ids_ST.to(device)
        if not self.shown:
            return {"input_ids": ids_ST, "position_ids": self.position_ids_ST.to(device), "use_cache": False}
        assert self.see is not None
        beside = {name: value.to(device) for name, value in self.see(self.shown, self.input_ids_ST).items()}
        return {"input_ids": ids_ST, "use_cache": False, **beside}

    @classmethod
    def of(
        cls, input_ids_ST: Tensor, position_ids_ST: Tensor, supervised_ST: Tensor | None = None, real_ST: Tensor | None = None
    ) -> Windows:
        """Derive labels and counted positions. supervised_ST: bool [S, T], True for tokens to be learned: position t counts
        where token t+1 is in the same document and supervised. None: every position counts. real_ST: bool [S, T], False for
        padding; None: there is none."""
        follows_ST = torch.zeros_like(input_ids_ST, dtype=torch.bool)
        follows_ST[:, :-1] = position_ids_ST[:, 1:] == position_ids_ST[:, :-1] + 1
        labels_ST = torch.where(follows_ST, input_ids_ST.roll(-1, dims=1), NO_LABEL)
        counted_ST = torch.ones_like(follows_ST) if supervised_ST is None else follows_ST & supervised_ST.roll(-1, dims=1)
        if real_ST is not None:
            counted_ST, labels_ST = counted_ST & real_ST, labels_ST.masked_fill(~real_ST, NO_LABEL)
        padding = 0 if real_ST is None else int((~real_ST).sum())
        return cls(input_ids_ST, position_ids_ST, counted_ST, labels_ST, padding=padding)

    def __len__(self) -> int:
        return self.input_ids_ST.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids_ST.shape[1]

    @property
    def counts(self) -> Tensor:
        return self.counted_ST.sum(-1)

    @property
    def digest(self) -> str:
        return _digest_of(self)

    def at(self, index_B: Tensor) -> Windows:
        shown = [self.shown[int(index)] for index in index_B] if self.shown else ()
        ids_ST, positions_ST = self.input_ids_ST, self.position_ids_ST
        found = Windows(ids_ST[index_B], positions_ST[index_B], self.counted_ST[index_B], self.labels_ST[index_B])
        return dataclasses.replace(found, shown=shown, see=self.see)


class StoredWindows(WindowSet):
    """Windows of a folder, memory-mapped: what is not looked at takes no memory. see: needed where a model is to be given windows
    that show images."""

    def __init__(self, folder: Path, see: See | None = None) -> None:
        self._folder, self._see = folder, see
        self._facts = json.loads((folder / "windows.json").read_text(encoding="utf-8"))
        self.sources = self._facts["sources"]
        self.padding = int(self._facts.get("padding", 0))
        self._ids_ST, self._marks_ST = self._map("ids.int32"), self._map("marks.uint8")

    def __reduce__(self) -> tuple[type[StoredWindows], tuple[Path]]:
        return StoredWindows, (self._folder,)  # another process maps the same files

    def __len__(self) -> int:
        return int(self._facts["windows"])

    @property
    def seq_len(self) -> int:
        return int(self._facts["seq_len"])

    @functools.cached_property
    def counts(self) -> Tensor:
        return self._map("counts.int32")[:, 0]

    @property
    def digest(self) -> str:
        return str(self._facts["digest"])

    def at(self, index_B: Tensor) -> Windows:
        marks_BT = self._marks_ST[index_B]
        begins_BT = (marks_BT & _BEGINS).bool()
        begins_BT[:, 0] = True
        place_T = torch.arange(self.seq_len)
        positions_BT = place_T - torch.where(begins_BT, place_T, 0).cummax(1).values
        said_BT = None if self._facts["all_count"] else (marks_BT & _SAID).bool()
        real_BT = (marks_BT & _PADS) == 0 if "padding" in self._facts else None
        found = Windows.of(self._ids_ST[index_B].long(), positions_BT, said_BT, real_BT)
        if not self._shown:
            return found
        return dataclasses.replace(found, shown=[self._shown[int(index)] for index in index_B], see=self._see)

    @functools.cached_property
    def _shown(self) -> list[Shown | None]:
        """By window; empty where none shows an image."""
        file = self._folder / _SHOWN
        rows = json_lines(file) if file.is_file() else ()
        return [Shown.from_json(row) if row else None for _, row in rows]

    def _map(self, name: str) -> Tensor:
        """Copy on write, which nobody does: torch warns of what cannot be written."""
        dtype = name.partition(".")[2]
        return torch.from_numpy(np.memmap(self._folder / name, dtype, "c").reshape(len(self), -1))


class WindowWriter:
    """Fills a folder with `windows` windows of `seq_len` tokens, document after document; memory does not grow with them.

    all_count: every position is in the loss, whoever says it.
    pad_id: what fills a window behind a document's end; None: the next document does.
    """

    def __init__(self, folder: Path, windows: int, seq_len: int, all_count: bool, pad_id: int | None = None) -> None:
        self.room = windows * seq_len
        self._folder, self._pad_id = folder, pad_id
        self._shown: list[Shown | None] = []
        self._facts = {"windows": windows, "seq_len": seq_len, "all_count": all_count}
        self._facts |= {} if pad_id is None else {"padding": 0}
        self._ids, self._marks = ((folder / name).open("wb") for name in ("ids.int32", "marks.uint8"))

    def add(self, ids: list[int], said: list[bool] | None, shown: Shown | None = None) -> int:
        """Append a document, or as much of it as there is room for; returns its tokens that were taken. shown: what the document
        shows, which then fits into a window and begins one."""
        first = self._facts["windows"] - self.room // self._facts["seq_len"]
        if shown:
            self._shown += [None] * (first - len(self._shown)) + [shown]
        taken = min(len(ids), self.room)
        if taken:
            marks = np.zeros(taken, np.uint8) if said is None else np.array(said[:taken], np.uint8) * np.uint8(_SAID)
            marks[0] |= _BEGINS
            self._write(np.array(ids[:taken], np.int32), marks)
            missing = self.room % self._facts["seq_len"]
            if self._pad_id is not None and missing:
                marks = np.full(missing, _PADS, np.uint8)
                marks[0] |= _BEGINS
                self._write(np.full(missing, self._pad_id, np.int32), marks)
                self._facts["padding"] += missing
        return taken

    def _write(self, ids: np.ndarray, marks: np.ndarray) -> None:
        self._ids.write(ids.data)
        self._marks.write(marks.data)
        self.room -= len(ids)

    def __enter__(self) -> WindowWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ids.close()
        self._marks.close()

    def finish(self, sources: Mapping[str, int], processor: str | None = None) -> StoredWindows:
        """The whole windows: count, digest and describe them. sources: tokens by source. processor: identity of what makes inputs
        of images."""
        assert self.room == 0
        self._ids.flush()
        self._marks.flush()
        file = self._folder / "windows.json"
        file.write_text(json.dumps({**self._facts, "sources": dict(sources)}), encoding="utf-8")
        found = StoredWindows(self._folder)
        with (self._folder / "counts.int32").open("wb") as counts:
            for part in found.batches(_rows(found)):
                counts.write(part.counts.int().numpy().data)
        facts = {**self._facts, "sources": dict(sources), "digest": _digest_of(found)}
        if self._shown:
            self._shown += [None] * (len(found) - len(self._shown))
            shown = [one and one.to_json() for one in self._shown]
            held = [one and [one.text, *(picture.sha256 for picture in one.pictures)] for one in self._shown]
            facts["digest"] = digest_of([facts["digest"], processor, held])
            lines = "".join(json.dumps(one) + "\n" for one in shown)
            (self._folder / _SHOWN).write_text(lines, encoding="utf-8")
        file.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return StoredWindows(self._folder)


def _digest_of(windows: WindowSet) -> str:
    content = hashlib.sha256()
    for name in ("input_ids_ST", "position_ids_ST", "counted_ST"):
        for part in windows.batches(_rows(windows)):
            content.update(getattr(part, name).contiguous().numpy().data)
    return content.hexdigest()


def _rows(windows: WindowSet) -> int:
    return max(1, _ROWS // windows.seq_len)


@functools.lru_cache(maxsize=1)
def _order(windows: int, seed: int, epoch: int) -> Tensor:
    """A permutation of the windows, int64 [S], from (seed, epoch) alone."""
    return torch.randperm(windows, generator=generator_of(f"{seed} {epoch}"))
