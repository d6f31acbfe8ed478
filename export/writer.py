"""Export an arm as a checkpoint folder: plan the shards, stream the bytes, place metadata and the source's own files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.card import model_card
from export.modelopt import excluded_modules, hf_quant_config, quantization_config
from export.safetensors_writer import write_file
from export.store import Unit, units
from qad.arm import Arm, open_arm
from qad.artifact import Artifact, open_artifact, run_stage
from qad.errors import SourceError, UsageError

KIND = "checkpoint"
LAYOUTS = ("modelopt",)
SHARD_SIZE = 5_000_000_000
# Copied as they are: tokenizer, templates, generation settings, licence, code that auto_map names. Never weights.
_COPIED = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja", "*.tiktoken",
           "*.model", "generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE*", "NOTICE*",
           "*.py", "additional_chat_templates/*")  # fmt: skip


def export_arm(
    arm: Path,
    out: Path,
    layout: str = "modelopt",
    shard_size: int = SHARD_SIZE,
    progress: Callable[[int], object] = lambda written: None,
    replace: bool = False,
) -> Artifact:
    """Write a PTQ or QAD arm as an NVFP4 checkpoint; a finished export of the same arm is reused.

    Peak memory is about one scale group. Raises UsageError for an unknown layout, SourceError for NaN or Inf (nothing is
    left under the final name), StorageError when writing fails.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is unknown: use one of {', '.join(LAYOUTS)}")
    opened = open_arm(arm)
    config = {"layout": layout, "shard_size": shard_size}
    inputs = {"arm": open_artifact(arm).digest}
    return run_stage(
        KIND, out, config, inputs, lambda folder: _write(opened, folder, shard_size, progress), replace=replace
    )


def _write(arm: Arm, folder: Path, shard_size: int, progress: Callable[[int], object]) -> None:
    shards = plan_shards(list(units(arm)), shard_size)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [entry for unit in shard for entry in unit.entries]
        write_file(folder / name, entries, _tensors(shard), progress)
        weight_map.update({entry.name: name for entry in entries})
    if len(shards) > 1:
        total = sum(unit.bytes for shard in shards for unit in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _json(folder / "model.safetensors.index.json", index)
    _metadata(arm, folder, set(weight_map))


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


def _tensors(shard: list[Unit]) -> Iterator[tuple[str, Tensor]]:
    for unit in shard:
        for name, tensor in unit.make().items():
            if tensor.dtype == torch.bfloat16 and not torch.isfinite(tensor.abs().amax()):
                index = (~torch.isfinite(tensor)).nonzero()[0].tolist()
                raise SourceError(f"{name} holds {tensor[tuple(index)].item()} at index {index}: nothing was exported")
            yield name, tensor


def _metadata(arm: Arm, folder: Path, stored: set[str]) -> None:
    assert arm.selection is not None
    excluded = excluded_modules(arm.selection, stored)
    config = {**arm.source.config, "quantization_config": quantization_config(arm.selection, excluded)}
    _json(folder / "config.json", config)
    _json(folder / "hf_quant_config.json", hf_quant_config(arm.selection, excluded))
    for pattern in _COPIED:
        for path in sorted(arm.source.folder.glob(pattern)):
            if path.is_file():
                target = folder / path.relative_to(arm.source.folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    (folder / "README.md").write_text(model_card(arm), encoding="utf-8")


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
