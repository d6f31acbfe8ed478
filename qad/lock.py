"""One process at a time fills a folder. The lock dies with its process, kill -9 included."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qad.errors import ArtifactError
from qad.place import writing


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, a file beside it, until the block ends.

    Raises ArtifactError, naming the process, where another one holds it; StorageError where no file can be made.
    """
    path = folder.with_name(f".{folder.name}.lock")
    while True:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b", buffering=0)  # a buffer would be written again when it is closed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode().strip() or "another process"
            file.close()
            raise ArtifactError(
                f"{folder} is being filled by process {holder}: wait for it, end it, or choose another --out"
            ) from None
        if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            break
        file.close()  # its last holder removed it between the two calls
    with file:
        try:
            with writing(path):
                file.truncate(0)
                file.write(f"{os.getpid()}\n".encode())
            yield
        finally:
            path.unlink(missing_ok=True)
