"""Weight files of a folder that is being written, one whole file after the other, so that an interruption costs one file.

A file is written aside, hashed, renamed and recorded in shards.json. When the same stage starts again, recorded files that
still have their size and hash are kept; everything else in the folder is removed and made anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from qad import provenance
from qad.artifact import STAGE_FILE, sha256_file
from qad.place import write_whole_json
from qad.progress import Progress

RECORD = "shards.json"


class WholeFiles:
    """planned: names of all weight files the folder will have. whole: name -> {bytes, sha256} of those that are finished."""

    def __init__(self, folder: Path, planned: Collection[str]) -> None:
        self._folder = folder
        recorded = _recorded(folder)
        self.whole = {name: facts for name, facts in recorded.items() if name in planned and _same(folder / name, facts)}
        for path in folder.iterdir():
            if path.name not in (STAGE_FILE, *self.whole):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._record()

    @property
    def bytes(self) -> int:
        return sum(facts["bytes"] for facts in self.whole.values())

    def write(self, name: str, fill: Callable[[Path], str]) -> None:
        """`fill(path)` writes one file and returns its sha256; not called for one that is whole."""
        if name in self.whole:
            return
        aside, path = self._folder / f"{name}.tmp", self._folder / name
        digest = fill(aside)
        aside.replace(path)
        self.whole[name] = {"bytes": path.stat().st_size, "sha256": digest}
        self._record()

    def finish(self) -> dict[str, str]:
        """sha256 by name; the record, which only served to go on, is removed."""
        (self._folder / RECORD).unlink()
        return {name: facts["sha256"] for name, facts in self.whole.items()}

    def _record(self) -> None:
        write_whole_json(self._folder / RECORD, {"commit": provenance.producer()["commit"], "files": self.whole})


def _recorded(folder: Path) -> dict[str, Any]:
    """What an interrupted run of the same commit left; another commit may write other bytes."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return dict(record["files"]) if record["commit"] == provenance.producer()["commit"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _same(path: Path, facts: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == facts["bytes"] and sha256_file(path) == facts["sha256"]


def byte_progress(what: str, total: int, files: WholeFiles) -> Progress:
    """A bar of tensor bytes; those of files kept from an interrupted run count as written."""
    return Progress(what, total, "B", min(files.bytes, total))
