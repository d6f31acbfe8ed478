"""Mutation test of the checker: every kind of damage, at random places of valid checkpoints of both layouts, is found.

Each pair of a kind and a checkpoint is tried at several places, drawn from a generator seeded by their names. Found means
an error (or a refusal to read the folder at all), not a warning; what is untouched has none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damaged_checkpoint import Checkpoint, Kind
from eight_bit_corruptions import EIGHT_BIT_KINDS, SILENT_EIGHT_BIT_KINDS
from metadata_corruptions import METADATA_KINDS, NOT_IN
from safetensors.torch import load_file, save_file
from silent_corruptions import SILENT_KINDS
from tensor_corruptions import TENSOR_KINDS

from export.check import check
from export.layouts.config_files import write_config_files
from export.layouts.layout import LAYOUTS, Layout
from export.layouts.scheme import Scheme
from export.writer import export_arm
from qad.errors import QadError

KINDS = {**TENSOR_KINDS, **METADATA_KINDS}
PLACES = 2
SHAPES = ("dense, one file, KV scales", "weight-only, shards, untied", "experts")
MIXED = "FP8 attention, NVFP4 MLP"


def with_kv_scales(folder: Path, layout: Layout) -> None:
    file = folder / "model.safetensors"
    scales = {
        layout.kv_scale(f"model.layers.{i}.self_attn", c): torch.full(layout.scalar, 0.5) for i in (0, 1) for c in "kv"
    }
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = Scheme("NVFP4", tuple(config["quantization_config"]["ignore"]), "FP8")
    write_config_files(folder, config, layout, scheme)


@pytest.fixture(scope="module")
def valid(
    tiny_llama_dir: Path,
    make_llama: Callable[..., Path],
    make_qwen3: Callable[..., Path],
    build_arm: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], tuple[Checkpoint, Path | None]]:
    """(layout, shape) -> the checkpoint, and its arm where it has one."""
    root = tmp_path_factory.mktemp("valid")
    dense = build_arm(tiny_llama_dir, root / "dense")
    untied_source = make_llama(root / "source", seed=1, tie_word_embeddings=False)
    untied = build_arm(untied_source, root / "untied", "W4A16_NVFP4")
    experts = build_arm(make_qwen3(root / "experts source", "qwen3_moe"), root / "experts")
    mixed = build_arm(tiny_llama_dir, root / "mixed", formats={"*.self_attn.*": "FP8"})
    found: dict[tuple[str, str], tuple[Checkpoint, Path | None]] = {}
    for name, layout in LAYOUTS.items():
        folders = [root / f"{name} {number}" for number in range(3)]
        export_arm(dense, folders[0], layout=name)
        with_kv_scales(folders[0], layout)
        export_arm(untied, folders[1], layout=name, shard_size=60_000)
        export_arm(experts, folders[2], layout=name)
        export_arm(mixed, root / f"{name} mixed", layout=name)
        found[name, MIXED] = Checkpoint(root / f"{name} mixed"), mixed
        for shape, folder, arm in zip(SHAPES, folders, (dense, untied, experts), strict=True):
            found[name, shape] = Checkpoint(folder), arm
    return found


def damaged(original: Checkpoint, kind: Kind, seed: str, out: Path) -> Path | None:
    """A folder with the damage; None where the kind has no place in this checkpoint."""
    checkpoint = original.copy()
    kind(checkpoint, random.Random(seed))
    return checkpoint.write(out) if checkpoint.changed or checkpoint.raw else None


def is_found(folder: Path, arm: Path | None = None) -> bool:
    try:
        return any(finding.severity == "error" for finding in check(folder, source=arm))
    except QadError:
        return True


def test_untouched_checkpoints_have_no_error(valid: dict[tuple[str, str], tuple[Checkpoint, Path | None]]) -> None:
    assert len(valid) == 8
    for checkpoint, arm in valid.values():
        assert [f for f in check(checkpoint.folder, source=arm) if f.severity == "error"] == []


def test_there_are_kinds_enough() -> None:
    assert len(KINDS) >= 80
    assert len(SILENT_KINDS) >= 10
    assert len(EIGHT_BIT_KINDS) >= 30


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found(
    valid: dict[tuple[str, str], tuple[Checkpoint, Path | None]], kind: str, layout: str, tmp_path: Path
) -> None:
    missed, tried = [], 0
    for shape in (*SHAPES, MIXED) if kind in TENSOR_KINDS else SHAPES:
        for number in range(PLACES):
            seed = f"{kind} {layout} {shape} {number}"
            folder = damaged(valid[layout, shape][0], KINDS[kind], seed, tmp_path / f"{shape} {number}")
            tried += folder is not None
            if folder is not None and not is_found(folder):
                missed.append(seed)
    assert not missed
    assert tried or kind in NOT_IN[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SILENT_KINDS)
def test_silent_damage_is_found_with_the_arm(
    valid: dict[tuple[str, str], tuple[Checkpoint, Path | None]], kind: str, layout: str, tmp_path: Path
) -> None:
    missed, tried = [], 0
    for shape in SHAPES:
        original, arm = valid[layout, shape]
        seed = f"{kind} {layout} {shape}"
        folder = damaged(original, SILENT_KINDS[kind], seed, tmp_path / shape)
        tried += folder is not None
        if folder is not None and not is_found(folder, arm):
            missed.append(seed)
    assert not missed
    assert tried


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", EIGHT_BIT_KINDS)
def test_damage_to_a_mixed_folder_is_found(
    valid: dict[tuple[str, str], tuple[Checkpoint, Path | None]], kind: str, layout: str, tmp_path: Path
) -> None:
    seeds = [f"{kind} {layout} {number}" for number in range(PLACES)]
    folders = {seed: damaged(valid[layout, MIXED][0], EIGHT_BIT_KINDS[kind], seed, tmp_path / seed) for seed in seeds}
    assert [seed for seed, folder in folders.items() if folder is not None and not is_found(folder)] == []
    assert all(folders.values()) or layout == "compressed-tensors"  # which lists no modules


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SILENT_EIGHT_BIT_KINDS)
def test_silent_damage_to_fp8_is_found_with_the_arm(
    valid: dict[tuple[str, str], tuple[Checkpoint, Path | None]], kind: str, layout: str, tmp_path: Path
) -> None:
    original, arm = valid[layout, MIXED]
    folder = damaged(original, SILENT_EIGHT_BIT_KINDS[kind], f"{kind} {layout}", tmp_path / "x")
    assert folder is not None
    assert not is_found(folder)
    assert is_found(folder, arm)
