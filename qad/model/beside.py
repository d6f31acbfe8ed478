"""What lies beside a model's weights and goes along with everything made from it: tokenizer, templates, system prompts, code,
licences and notices, in folders too. Serving may need any of it, and nobody can list what it is called.

Weights stay, in whatever form, and so do folders that hold some (original/, onnx/, checkpoint-500/): they are the model once
more. What else stays is named.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path

WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".npz",
    ".npy",
    ".ot",
    ".tflite",
    ".mlmodel",
    ".llamafile",
    ".engine",
    ".distcp",
)
_INDEX = ".index.json"  # of sharded weights
_TOOLS = (".git", ".cache", ".huggingface", "__pycache__", ".DS_Store", ".ipynb_checkpoints")  # what tools keep for themselves
_LARGEST = 100_000_000  # bytes of a file that is no weights
_MOST = 1_000  # files of a folder


@dataclasses.dataclass(frozen=True)
class Beside:
    """files: relative to the folder, sorted. left: what stays, but for weights themselves, and why."""

    folder: Path
    files: tuple[Path, ...]
    left: dict[str, str]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by path."""
        return {path.as_posix(): (self.folder / path).stat().st_size for path in self.files}

    def copy(self, out: Path) -> None:
        """Copy the files, and warn of what stays."""
        for path in self.files:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / path, out / path)
        if self.left:
            told = "; ".join(f"{name} ({why})" for name, why in itertools.islice(self.left.items(), 8))
            warnings.warn(f"left behind in {self.folder}: {told}: copy what serving needs", stacklevel=2)


def beside(folder: Path, written: Collection[str] = ()) -> Beside:
    """written: names of files that are made anew."""
    files: list[Path] = []
    left: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.name in _TOOLS or path.name in written or _is_weights(path):
            continue
        found = [path] if path.is_file() else _inside(path)
        why = _why_left(path, found)
        if why:
            left[path.name + "/" * path.is_dir()] = why
        files += [] if why else [each.relative_to(folder) for each in found]
    return Beside(folder, tuple(sorted(files)), left)


def _inside(folder: Path) -> list[Path]:
    """The files of a folder and those below it, as many as are allowed and one more; none of what is no folder of its own."""
    if not folder.is_dir() or folder.is_symlink():
        return []
    every = (path for path in folder.rglob("*") if not {*path.relative_to(folder).parts} & {*_TOOLS})
    return list(itertools.islice((path for path in every if path.is_file()), _MOST + 1))


def _why_left(path: Path, files: list[Path]) -> str | None:
    if path.is_dir() and path.is_symlink():
        return "a link to a folder"
    if any(map(_is_weights, files)):
        return "it holds weights"
    if len(files) > _MOST:
        return f"more than {_MOST:,} files"
    large = next((file for file in files if file.stat().st_size > _LARGEST), None)
    if large is not None:
        return f"{large.name} has {large.stat().st_size:,} bytes, more than what lies beside weights"
    if not path.exists() or not (path.is_file() or path.is_dir()):
        return "no regular file"
    return None


def _is_weights(path: Path) -> bool:
    return path.suffix.lower() in WEIGHTS or path.name.endswith(_INDEX)
