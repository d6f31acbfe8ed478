"""Mutation test of the checker: every kind of damage, at random places of valid checkpoints of both layouts, is found.

Each pair of a kind and a checkpoint is tried at several places, drawn from a generator seeded by their names. Found means
an error of the rule that is named with the kind, not of another one, and not a warning; what is untouched has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damaged_checkpoint import REFUSED, Checkpoint, Damage, Kind, pairs
from eight_bit_corruptions import EIGHT_BIT_KINDS, SILENT_EIGHT_BIT_KINDS
from metadata_corruptions import METADATA_KINDS
from safetensors.torch import load_file, save_file
from silent_corruptions import SILENT_KINDS
from tensor_corruptions import TENSOR_KINDS

from export.check import check
from export.layouts.config_files import write_config_files
from export.layouts.layout import LAYOUTS, Layout
from export.layouts.scheme import Scheme
from export.writer import export_arm
from qad.artifact import MANIFEST
from qad.errors import QadError

KINDS = {**TENSOR_KINDS, **METADATA_KINDS}
PLACES = 2
SHAPES = ("dense, one file, KV scales", "weight-only, shards, untied", "experts")
MIXED = "FP8 attention, NVFP4 MLP"


Valid = dict[tuple[str, str], tuple[Checkpoint, Path | None]]


def with_kv_scales(folder: Path, layout: Layout) -> None:
    file = folder / "model.safetensors"
    scales = {layout.kv_scale(f"model.layers.{i}.self_attn", c): torch.full(layout.scalar, 0.5) for i in (0, 1) for c in "kv"}
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    (folder / MANIFEST).unlink()  # as of another tool
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
) -> Valid:
    """(layout, shape) -> the checkpoint, and its arm where it has one."""
    root = tmp_path_factory.mktemp("valid")
    dense = build_arm(tiny_llama_dir, root / "dense")
    untied_source = make_llama(root / "source", seed=1, tie_word_embeddings=False)
    untied = build_arm(untied_source, root / "untied", "W4A16_NVFP4")
    experts = build_arm(make_qwen3(root / "experts source", "qwen3_moe"), root / "experts")
    mixed = build_arm(tiny_llama_dir, root / "mixed", formats={"*.self_attn.*": "FP8"})
    found: Valid = {}
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


def spoken(folder: Path, arm: Path | None = None) -> set[str]:
    """Rules that say an error."""
    try:
        return {finding.rule for finding in check(folder, source=arm) if finding.severity == "error"}
    except QadError:
        return {REFUSED}


def test_untouched_checkpoints_have_no_error(valid: Valid) -> None:
    assert len(valid) == 8
    for checkpoint, arm in valid.values():
        assert [f for f in check(checkpoint.folder, source=arm) if f.severity == "error"] == []


def test_there_are_kinds_enough() -> None:
    assert len(KINDS) >= 80
    assert len(SILENT_KINDS) >= 10
    assert len(EIGHT_BIT_KINDS) >= 30


@pytest.mark.parametrize(
    "nothing", [lambda c, r: None, lambda c, r: c.quantization, lambda c, r: c.put(c.names[0], c.get(c.names[0]))]
)
def test_a_damage_that_changes_nothing_is_a_fault_of_the_test(valid: Valid, nothing: Kind, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="changed nothing"):
        Damage("E3", nothing).at(valid["modelopt", MIXED][0], "seed", tmp_path / "x")


@pytest.mark.parametrize(("kind", "layout"), pairs(KINDS))
def test_damage_is_found(valid: Valid, kind: str, layout: str, tmp_path: Path) -> None:
    damage, told = KINDS[kind], {}
    for shape in (*SHAPES, MIXED) if kind in TENSOR_KINDS else SHAPES:
        original, _ = valid[layout, shape]
        for number in range(PLACES if damage.needs(original) else 0):
            seed = f"{kind} {layout} {shape} {number}"
            told[seed] = spoken(damage.at(original, seed, tmp_path / f"{shape} {number}"))
    assert told
    assert {seed: rules for seed, rules in told.items() if damage.rule not in rules} == {}


@pytest.mark.parametrize(("kind", "layout"), pairs(SILENT_KINDS))
def test_silent_damage_is_found_with_the_arm(valid: Valid, kind: str, layout: str, tmp_path: Path) -> None:
    damage, told = SILENT_KINDS[kind], {}
    for shape in SHAPES:
        original, arm = valid[layout, shape]
        if damage.needs(original):
            seed = f"{kind} {layout} {shape}"
            told[seed] = spoken(damage.at(original, seed, tmp_path / shape), arm)
    assert told
    assert {seed: rules for seed, rules in told.items() if damage.rule not in rules} == {}


@pytest.mark.parametrize(("kind", "layout"), pairs(EIGHT_BIT_KINDS))
def test_damage_to_a_mixed_folder_is_found(valid: Valid, kind: str, layout: str, tmp_path: Path) -> None:
    damage = EIGHT_BIT_KINDS[kind]
    for seed in (f"{kind} {layout} {number}" for number in range(PLACES)):
        assert damage.rule in spoken(damage.at(valid[layout, MIXED][0], seed, tmp_path / seed)), seed


@pytest.mark.parametrize(("kind", "layout"), pairs(SILENT_EIGHT_BIT_KINDS))
def test_silent_damage_to_fp8_is_found_with_the_arm(valid: Valid, kind: str, layout: str, tmp_path: Path) -> None:
    damage, (original, arm) = SILENT_EIGHT_BIT_KINDS[kind], valid[layout, MIXED]
    folder = damage.at(original, f"{kind} {layout}", tmp_path / "x")
    assert spoken(folder) == set()
    assert damage.rule in spoken(folder, arm)
