"""Export an arm as a checkpoint folder: plan the shards, stream the bytes, place metadata and the source's own files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from export.card import git_attributes, model_card
from export.check import errors_of, in_one_line
from export.files.safetensors_writer import write_file
from export.files.whole_files import WholeFiles, byte_progress
from export.layouts.config_files import CONFIG, NESTED, in_bfloat16, write_config_files, write_index
from export.layouts.layout import LAYOUTS, Layout, require_kv_form
from export.layouts.scheme import scheme_of
from export.stored_tensors import Unit, units
from qad.arms.arm import Arm, open_arm
from qad.arms.kv_cache import CAST
from qad.arms.origin import origin_of_arm
from qad.artifact import MANIFEST, STAGE_FILE, Artifact, digest_of, open_artifact, run_stage, sha256_file
from qad.errors import BrokenCheckpointError, SourceError, StorageError, UsageError
from qad.model.beside import Beside, beside
from qad.numerics.compiled import compilation
from qad.numerics.finite import first_not_finite
from qad.place import require_apart

KIND = "checkpoint"
SHARD_SIZE = 5_000_000_000
# Made anew, whatever the source has under that name.
_WRITTEN = (CONFIG, NESTED, "README.md", ".gitattributes", ".eval_results", MANIFEST, STAGE_FILE)
_SPARE = 16_000_000  # bytes of metadata and card
_COMPILE_FROM = 1 << 30  # weights; a compiler that starts cold costs more than it saves below


def export_arm(arm: Path, out: Path, layout: str = "modelopt", shard_size: int = SHARD_SIZE, replace: bool = False) -> Artifact:
    """Write a PTQ or QAD arm as an NVFP4 checkpoint; a finished export of the same arm is reused.

    An interrupted one goes on behind its last whole shard. Peak memory is below two scale groups.
    Raises UsageError for an unknown layout or an `out` that would touch arm or source, SourceError for NaN or Inf (nothing is
    left under the final name), BrokenCheckpointError where the checker refuses what came out, ArtifactError for an arm that
    does not fit its source, StorageError when writing fails.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is unknown: use one of {', '.join(LAYOUTS)}")
    if shard_size < 1:
        raise UsageError(f"shard_size is {shard_size} bytes: give a positive number, such as {SHARD_SIZE}")
    opened = open_arm(arm)
    require_apart(out, {"arm": opened.folder, "source model": opened.source.folder})
    require_kv_form(opened.kv_format, LAYOUTS[layout], str(arm))
    shards = plan_shards(list(units(opened, LAYOUTS[layout])), shard_size)
    config = {"layout": layout, "shard_size": shard_size}
    if opened.kv_cache == CAST:  # nothing else of the folder tells scales that are lost from scales that were never made
        config["kv_cache"] = CAST
    finished = open_artifact(arm)
    own = beside(opened.source.folder, _WRITTEN)
    hashes = {path.as_posix(): sha256_file(own.folder / path) for path in own.files}
    inputs = {"arm": finished.digest, "beside": digest_of(hashes)}

    def work(folder: Path) -> dict[str, str]:
        files = WholeFiles(folder, shards)
        require_room(folder, _bytes(shards) - files.bytes + sum(own.sizes.values()))
        _metadata(opened, own, folder, shards, LAYOUTS[layout])
        _weights(opened, files, shards)
        written = files.finish()
        _require_sound(folder)
        return written

    origin = origin_of_arm(finished, opened.source.folder)
    return run_stage(KIND, out, config, inputs, work, resumable=True, replace=replace, origin=origin)


def _require_sound(folder: Path) -> None:
    """Nothing is called finished that `qad check` would refuse. Raises BrokenCheckpointError."""
    if errors := errors_of(folder):
        raise BrokenCheckpointError(
            f"the export does not pass its own check: {in_one_line(errors)}. It stays unfinished in {folder}; report this, with "
            f"`qad check {folder}`"
        )


def plan_shards(all_units: list[Unit], shard_size: int) -> dict[str, list[Unit]]:
    """File name -> units. Shards are filled in order; a unit is never split, so all tensors of a module are in one shard."""
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in all_units:
        if shards[-1] and filled + unit.bytes > shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _bytes(shards: dict[str, list[Unit]]) -> int:
    return sum(unit.bytes for shard in shards.values() for unit in shard)


def _weights(arm: Arm, files: WholeFiles, shards: dict[str, list[Unit]]) -> None:
    assert arm.selection is not None
    quantized = sum(n * k for n, k in arm.selection.modules.values())
    with compilation(True if quantized >= _COMPILE_FROM else None), byte_progress("export", _bytes(shards), files) as bar:
        for name, shard in shards.items():
            entries = [entry for unit in shard for entry in unit.entries]
            files.write(name, lambda path, e=entries, s=shard: write_file(path, e, _tensors(s), bar.update))  # type: ignore[misc]


def _tensors(shard: list[Unit]) -> Iterator[tuple[str, Tensor]]:
    for unit in shard:
        made = unit.make()
        for name in list(made):
            tensor = made.pop(name)
            index = first_not_finite(tensor) if tensor.dtype == torch.bfloat16 else None
            if index is not None:
                raise SourceError(f"{name} holds {tensor[index].item()} at index {list(index)}: nothing was exported")
            yield name, tensor
            del tensor  # a group is gone before the next one is read


def _metadata(arm: Arm, own: Beside, folder: Path, shards: dict[str, list[Unit]], layout: Layout) -> None:
    """own: what lies beside the source's weights."""
    assert arm.selection is not None
    entries = {entry: file for file, shard in shards.items() for unit in shard for entry in unit.entries}
    if len(shards) > 1:
        write_index(folder, {entry.name: file for entry, file in entries.items()}, sum(entry.bytes for entry in entries))
    scheme = scheme_of(arm.selection, entries, arm.kv_format, arm.config)
    write_config_files(folder, in_bfloat16(arm.config), layout, scheme)
    own.copy(folder)
    (folder / "README.md").write_text(model_card(arm, layout, list(entries)), encoding="utf-8")
    (folder / ".gitattributes").write_text(git_attributes(own.sizes), encoding="utf-8")


def require_room(folder: Path, weights: int) -> None:
    """Raises StorageError where the disk of `folder` has no room for `weights` bytes and what lies beside them."""
    free = shutil.disk_usage(folder).free
    if free < weights + _SPARE:
        raise StorageError(
            f"{folder.parent} has {free / 1e9:.2f} GB free, {(weights + _SPARE) / 1e9:.2f} GB are needed: make room and run "
            "the same command again"
        )
