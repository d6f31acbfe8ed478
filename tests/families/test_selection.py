"""What a family's row keeps out of quantization, decided from the skeleton alone, and what the checker says where it was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from export.check import check
from export.writer import export_arm
from qad.arms.arm import write_arm
from qad.arms.selection import Selection, select
from qad.artifact import run_stage
from qad.errors import BrokenCheckpointError, UsageError
from qad.model.loader import load_skeleton
from qad.model.source import open_checkpoint

FamilyDir = Callable[[str], Path]


def selected(folder: Path, format: str = "NVFP4", **choice: object) -> Selection:
    return select(load_skeleton(open_checkpoint(folder)), format, **choice)  # type: ignore[arg-type]


def export(folder: Path, selection: Selection, out: Path) -> Path:
    """With input scales made up; no forward pass. The unfinished folder, where its own check refuses it."""
    source = open_checkpoint(folder)
    scales = {module: torch.tensor(0.01) for module in selection.with_input_scale}
    run_stage("arm", out / "arm", {}, {}, lambda f: write_arm(f, "ptq", source, selection, scales))
    try:
        export_arm(out / "arm", out / "export")
    except BrokenCheckpointError:
        return out / "export.partial"
    return out / "export"


def test_projections_of_the_gated_delta_rule_share_scales(family_dir: FamilyDir) -> None:
    selection = selected(family_dir("Qwen3.5 text"))
    linear = "model.layers.0.linear_attn"
    assert (f"{linear}.in_proj_qkv", f"{linear}.in_proj_z") in selection.groups
    assert {f"{linear}.in_proj_b", f"{linear}.in_proj_a"} & {*selection.modules, *selection.excluded}
    with pytest.raises(UsageError, match="engines fuse them"):
        selected(family_dir("Qwen3.5 text"), exclude=["*.in_proj_z"])


def test_unequal_scales_of_them_are_an_error(family_dir: FamilyDir, tmp_path: Path) -> None:
    """A checkpoint of a tool that does not know the groups: served wrong by vLLM without a word."""
    selection = selected(family_dir("Qwen3.5 text"))
    grouped = export(family_dir("Qwen3.5 text"), selection, tmp_path / "grouped")
    assert [f for f in check(grouped) if f.severity == "error"] == []
    apart = Selection(selection.format, selection.modules, selection.excluded)  # as if nobody knew the family
    loose = export(family_dir("Qwen3.5 text"), apart, tmp_path / "loose")
    errors = [f for f in check(loose) if f.severity == "error"]
    assert {f.rule for f in errors} == {"E6"}
    assert any("in_proj_qkv" in f.module and "in_proj_z" in f.module for f in errors)


@pytest.mark.parametrize("format", ["NVFP4", "W4A16_NVFP4", "FP8"])
def test_a_mamba_1_mixer_is_never_quantized(family_dir: FamilyDir, format: str) -> None:
    selection = selected(family_dir("Jamba"), format)
    assert not any(".mamba." in module for module in selection.modules)
    mixer = {leaf: selection.excluded[f"model.layers.0.mamba.{leaf}"] for leaf in ("in_proj", "x_proj", "dt_proj", "out_proj")}
    assert set(mixer.values()) == {"inside a Mamba-1 mixer, which engines build unquantized"}


def test_a_packed_mamba_1_mixer_is_an_error(family_dir: FamilyDir, tmp_path: Path) -> None:
    selection = selected(family_dir("Jamba"), "W4A16_NVFP4")
    mixer = "model.layers.0.mamba.in_proj"
    shape = open_checkpoint(family_dir("Jamba")).tensors[f"{mixer}.weight"].shape
    selection.modules[mixer] = (shape[0], shape[1])
    del selection.excluded[mixer]
    errors = [f for f in check(export(family_dir("Jamba"), selection, tmp_path)) if f.severity == "error"]
    assert [(f.rule, f.module, f.engine) for f in errors] == [("E7", mixer, "vllm")]


def test_what_mla_absorbs_keeps_its_inputs(family_dir: FamilyDir, tmp_path: Path) -> None:
    folder, absorbed = family_dir("DeepSeek-V3"), "model.layers.0.self_attn.kv_b_proj"
    for format in ("NVFP4", "FP8"):
        assert "identity" in selected(folder, format).excluded[absorbed]
    assert absorbed in selected(folder, "W4A16_NVFP4").modules
    assert selected(folder, formats={"*.kv_b_proj": "W4A16_NVFP4"}).format_of(absorbed) == "W4A16_NVFP4"

    selection = selected(folder)
    selection.modules[absorbed] = open_checkpoint(folder).tensors[f"{absorbed}.weight"].shape  # type: ignore[assignment]
    del selection.excluded[absorbed]
    found = check(export(folder, selection, tmp_path))
    # E3: the input scales here are one number.
    assert [(f.rule, f.severity, f.module) for f in found if f.rule not in ("W1", "E13", "E3")] == [("W2", "warning", absorbed)]


@pytest.mark.parametrize("name", ["Granite-hybrid dense", "Falcon-H1", "Bamba", "LFM2", "Nemotron-H dense"])
def test_mixers_of_hybrids_are_selected_but_for_what_is_no_linear(family_dir: FamilyDir, name: str) -> None:
    selection = selected(family_dir(name))
    assert any(module.endswith((".in_proj", ".out_proj")) for module in selection.modules)
    assert not any(module.endswith("conv1d") for module in selection.modules)
