"""Where results go: a place of their own that can be written, files that are there whole or not at all, and one message for
a disk that is full.

Every command decides about its --out here, before it works; every file that is not part of a stage is written here.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from qad.errors import StorageError, UsageError

# What a disk answers rather than a mistake in a path.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def place_of(out: Path) -> Path:
    """The place itself: a path that is a symbolic link is followed once, here, so that what is aside, finished or stale lies in
    one folder; so is one without a name of its own, such as `.`.

    Raises UsageError for a link, anywhere in the path, that leads in a circle or to what is not there, and for a path that the
    system refuses.
    """
    try:
        for path in (out, *out.parents):
            if path.is_symlink() and not path.exists():
                raise UsageError(
                    f"{out} cannot be used: {path} is a symbolic link to {os.readlink(path)}, which leads nowhere; name a folder "
                    "that is there, or make it"
                )
        out.exists()
        return out.resolve() if out.is_symlink() or out.name in ("", "..") else out
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{str(out)[:200]} cannot be used ({reason}): choose another --out") from error


def require_apart(out: Path, inputs: Mapping[str, Path]) -> None:
    """Raises UsageError where `out` is, holds or lies inside a folder that is only read. inputs: what it is -> folder."""
    target = place_of(out).absolute().resolve()
    for what, path in inputs.items():
        folder = path.expanduser().resolve()
        if target == folder or folder in target.parents or target in folder.parents:
            raise UsageError(f"{out} would overwrite or lie inside the {what} {folder}: choose another folder")


def require_writable(out: Path) -> None:
    """Raises StorageError where `out` cannot be made, its missing parents included. Nothing is left behind."""
    try:
        out.with_name(f".{out.name}.partial.tmp").exists()  # what lies beside it has a longer name
        place = next(place for place in out.absolute().parents if place.exists())
        if not place.is_dir():
            raise StorageError(f"{out} cannot be written: {place} is a file; choose another --out")
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise StorageError(f"{out} cannot be written ({error.strerror or error}): choose another --out") from error


def not_written(path: Path | str, error: Exception) -> StorageError:
    """What a user is told of a failed write."""
    reason = getattr(error, "strerror", None) or error
    return StorageError(
        f"cannot write {path}: {reason}. Nothing unfinished is left under its final name; make room, or choose a place that can "
        "be written, and run the same command again"
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises StorageError, with the path, for an OSError inside the block."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """A file that is there whole or not at all: written aside, flushed to disk, renamed; its folder is made where it is missing.
    Raises StorageError."""
    aside = path.with_name(path.name + ".tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def write_whole_json(path: Path, value: object, *, indent: int = 1) -> None:
    """The same of a value, as JSON with a line end."""
    write_whole(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
