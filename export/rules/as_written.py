"""E12: files of weights are those that were written, where the folder's own manifest says which."""

from __future__ import annotations

from collections.abc import Iterator

from export.files.json_files import read_json
from export.folder import Folder
from export.rules.findings import Finding, error
from qad.artifact import MANIFEST, sha256_file
from qad.untrusted import mapping


def e12_as_written(folder: Folder) -> Iterator[Finding]:
    """Reads every file of weights that a manifest lists, whole. Assumes a folder without errors: a flipped bit of a code
    is one that no other rule can see."""
    written = mapping((read_json(folder.path / MANIFEST) or {}).get("files"))
    for name in folder.files:
        wanted = mapping(written.get(name)).get("sha256")
        if isinstance(wanted, str) and sha256_file(folder.path / name) != wanted:
            yield error("E12", name, f"is not the file that {MANIFEST} lists: its sha256 differs", "copy or export it again")
