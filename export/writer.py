"""Export an arm as a checkpoint folder: plan the shards, stream the bytes, place metadata and the source's own files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from export.card import GIT_ATTRIBUTES, model_card
from export.config_files import write_config_files, write_index
from export.layout import LAYOUTS, Layout
from export.safetensors_writer import write_file
from export.scheme import scheme_of
from export.store import Unit, units
from qad.arm import Arm, open_arm
from qad.artifact import Artifact, open_artifact, run_stage
from qad.compiled import compilation
from qad.errors import SourceError, StorageError, UsageError
from qad.kv_cache import CAST

KIND = "checkpoint"
SHARD_SIZE = 5_000_000_000
# Copied as they are: tokenizer, templates, generation settings, licence, code that auto_map names. Never weights.
_COPIED = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja", "*.tiktoken",
           "*.model", "chat_template.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
           "video_preprocessor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*", "*.py",
           "additional_chat_templates/*")  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_SPARE = 64_000_000  # bytes beside the weights: tokenizer, metadata
_COMPILE_FROM = 1 << 30  # weights; a compiler that starts cold costs more than it saves below


def export_arm(
    arm: Path,
    out: Path,
    layout: str = "modelopt",
    shard_size: int = SHARD_SIZE,
    progress: Callable[[int], object] = lambda written: None,
    replace: bool = False,
) -> Artifact:
    """Write a PTQ or QAD arm as an NVFP4 checkpoint; a finished export of the same arm is reused.

    Peak memory is about one scale group. `progress` gets the bytes of each tensor written. Raises UsageError for an
    unknown layout or an `out` that would touch arm or source, SourceError for NaN or Inf (nothing is left under the
    final name), ArtifactError for an arm that does not fit its source, StorageError when writing fails.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is unknown: use one of {', '.join(LAYOUTS)}")
    if shard_size < 1:
        raise UsageError(f"shard_size is {shard_size} bytes: give a positive number, such as {SHARD_SIZE}")
    opened = open_arm(arm)
    require_apart(out, {"arm": opened.folder, "source model": opened.source.folder})
    shards = plan_shards(list(units(opened, LAYOUTS[layout])), shard_size)
    config = {"layout": layout, "shard_size": shard_size}
    if (
        opened.kv_cache == CAST
    ):  # nothing else of the folder tells scales that are lost from scales that were never made
        config["kv_cache"] = CAST
    inputs = {"arm": open_artifact(arm).digest}

    def work(folder: Path) -> None:
        require_room(folder, sum(unit.bytes for shard in shards for unit in shard))
        _metadata(opened, folder, shards, LAYOUTS[layout])
        _weights(opened, folder, shards, progress)

    return run_stage(KIND, out, config, inputs, work, replace=replace)


def plan_shards(all_units: list[Unit], shard_size: int) -> list[list[Unit]]:
    """Fill shards in order; a unit is never split, so all tensors of a module are in one shard."""
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in all_units:
        if shards[-1] and filled + unit.bytes > shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.bytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _weights(arm: Arm, folder: Path, shards: list[list[Unit]], progress: Callable[[int], object]) -> None:
    assert arm.selection is not None
    quantized = sum(n * k for n, k in arm.selection.modules.values())
    with compilation(True if quantized >= _COMPILE_FROM else None):
        for number, shard in enumerate(shards, 1):
            entries = [entry for unit in shard for entry in unit.entries]
            write_file(folder / _shard_name(number, len(shards)), entries, _tensors(shard), progress)


def _tensors(shard: list[Unit]) -> Iterator[tuple[str, Tensor]]:
    for unit in shard:
        for name, tensor in unit.make().items():
            if tensor.dtype == torch.bfloat16 and tensor.numel() and not torch.isfinite(tensor.abs().amax()):
                index = (~torch.isfinite(tensor)).nonzero()[0].tolist()
                raise SourceError(f"{name} holds {tensor[tuple(index)].item()} at index {index}: nothing was exported")
            yield name, tensor


def _metadata(arm: Arm, folder: Path, shards: list[list[Unit]], layout: Layout) -> None:
    assert arm.selection is not None
    entries = {
        entry: _shard_name(number, len(shards))
        for number, shard in enumerate(shards, 1)
        for unit in shard
        for entry in unit.entries
    }
    if len(shards) > 1:
        write_index(
            folder, {entry.name: file for entry, file in entries.items()}, sum(entry.bytes for entry in entries)
        )
    scheme = scheme_of(arm.selection, {entry.name for entry in entries}, arm.kv_cache)
    write_config_files(folder, arm.source.config, layout, scheme)
    for path in _own_files(arm.source.folder):
        target = folder / path.relative_to(arm.source.folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    (folder / "README.md").write_text(model_card(arm, layout, list(entries)), encoding="utf-8")
    (folder / ".gitattributes").write_text(GIT_ATTRIBUTES, encoding="utf-8")


def _own_files(source: Path) -> list[Path]:
    """The source's files that go along, without weights."""
    found = {path for pattern in _COPIED for path in source.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.suffix not in _WEIGHTS)


def require_apart(out: Path, inputs: dict[str, Path]) -> None:
    """Raises UsageError where `out` is, holds or lies inside a folder that is only read. inputs: what it is -> folder."""
    target = out.expanduser().resolve()
    for what, path in inputs.items():
        folder = path.expanduser().resolve()
        if target == folder or folder in target.parents or target in folder.parents:
            raise UsageError(f"{out} would overwrite or lie inside the {what} {folder}: choose another folder")


def require_room(folder: Path, weights: int) -> None:
    """Raises StorageError where the disk of `folder` has no room for `weights` bytes and what lies beside them."""
    free = shutil.disk_usage(folder).free
    if free < weights + _SPARE:
        raise StorageError(
            f"{folder.parent} has {free / 1e9:.2f} GB free, {(weights + _SPARE) / 1e9:.2f} GB are needed: make room and run "
            "the same command again"
        )
