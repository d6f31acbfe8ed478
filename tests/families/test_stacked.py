"""Checkpoints that hold the experts of a layer in one tensor: named one by one, and stored as they were where they stay BF16."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qad.hf  # noqa: F401  (registers the loader)
from export.check import check
from export.writer import export_arm
from qad.arms.arm import open_arm, write_arm
from qad.arms.selection import describe, select
from qad.artifact import run_stage
from qad.errors import SourceError
from qad.model.loader import load_model, load_skeleton
from qad.model.names import Stack
from qad.model.source import open_checkpoint
from qad.model.stacked import Layout
from qad.model.streamed import streamed_model
from qad.numerics import mxfp4
from qad.numerics.groups import fake_quantize_group, fake_quantize_stack
from qad.numerics.scale_search import search_scales
from qad.training.student import Student, _stacked

FamilyDir = Callable[[str], Path]
STACKED = ("gpt-oss", "Granite-MoE", "Llama4 text")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def exported(folder: Path, out: Path, **choice: Any) -> Path:
    """With input scales made up; no forward pass."""
    source = open_checkpoint(folder)
    selection = select(load_skeleton(source), "NVFP4", **choice)
    scales = {module: torch.tensor(0.01) for module in selection.with_input_scale}
    run_stage("arm", out / "arm", {}, {}, lambda f: write_arm(f, "ptq", source, selection, scales))
    export_arm(out / "arm", out / "export")
    return out / "export"


@pytest.mark.parametrize("name", STACKED)
def test_an_expert_is_its_part_of_the_stored_tensor(family_dir: FamilyDir, name: str) -> None:
    """Gate, up and down as the family computes them: transposed for gpt-oss and Llama 4, columns taking turns for gpt-oss."""
    source = open_checkpoint(family_dir(name))
    stored = load_file(source.folder / "model.safetensors")
    (block,) = {name.rpartition(".experts.")[0] for name in source.tensors if ".experts.2." in name and ".1." in name}
    expert = {leaf: source.get(f"{block}.experts.2.{leaf}_proj.weight") for leaf in ("gate", "up", "down")}
    if name == "Granite-MoE":
        both, down = stored[f"{block}.input_linear.weight"][2], stored[f"{block}.output_linear.weight"][2]
        gate, up = both.chunk(2)
    else:
        both, down = stored[f"{block}.experts.gate_up_proj"][2].T, stored[f"{block}.experts.down_proj"][2].T
        gate, up = (both[::2], both[1::2]) if name == "gpt-oss" else both.chunk(2)
    assert torch.equal(expert["gate"], gate)
    assert torch.equal(expert["up"], up)
    assert torch.equal(expert["down"], down)
    if name == "gpt-oss":
        bias = stored[f"{block}.experts.gate_up_proj_bias"][2]
        assert torch.equal(source.get(f"{block}.experts.2.up_proj.bias"), bias[1::2])
        assert torch.equal(source.get(f"{block}.experts.2.down_proj.bias"), stored[f"{block}.experts.down_proj_bias"][2])


@pytest.mark.parametrize("name", STACKED)
def test_experts_that_stay_bf16_are_stored_as_they_were(family_dir: FamilyDir, tmp_path: Path, name: str) -> None:
    """As engines read unquantized experts of these families; loaded and checked without a word."""
    folder = family_dir(name)
    out = exported(folder, tmp_path, exclude=["*.experts.*"])
    before, after = (load_file(each / "model.safetensors") for each in (folder, out))
    whole = [key for key, tensor in before.items() if tensor.dim() == 3 or "experts" in key]
    assert whole
    assert all(torch.equal(bits(before[key]), bits(after[key])) for key in whole)
    assert not any(".experts.0." in key for key in after)
    assert [finding for finding in check(out, source=tmp_path / "arm") if finding.severity == "error"] == []
    arm = open_arm(tmp_path / "arm")
    student = Student(arm, load_model(arm.source, "float32", "cpu")).model
    reloaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.randint(3, 500, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(bits(student(ids).logits), bits(reloaded(ids).logits))


def test_what_no_engine_serves_is_said_before_and_by_the_checker(family_dir: FamilyDir, tmp_path: Path) -> None:
    folder = family_dir("gpt-oss")
    told = [line for line in describe(select(load_skeleton(open_checkpoint(folder)), "NVFP4")) if line.startswith("not served")]
    assert len(told) == 1
    assert "biases" in told[0]
    found = [f for f in check(exported(folder, tmp_path)) if "biases" in f.message]
    assert [(f.rule, f.severity, f.engine) for f in found] == [("W2", "warning", "vllm")]


@pytest.mark.parametrize("name", ["gpt-oss", "Granite-MoE"])
def test_calibration_reads_an_expert_at_a_time(family_dir: FamilyDir, name: str) -> None:
    source = open_checkpoint(family_dir(name))
    streamed, loaded = streamed_model(source, "float32"), load_model(source, "float32", "cpu")
    assert streamed is not None
    loaded.set_experts_implementation("eager")
    ids = torch.randint(3, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(streamed(ids).logits, loaded(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scales", ["dynamic", "mse"])
@pytest.mark.parametrize("layout", [Layout(transposed=True), Layout(transposed=True, interleaved=True), Layout(gated=False)])
def test_a_stack_in_any_layout_is_quantized_as_expert_by_expert(layout: Layout, scales: str) -> None:
    leaves = ("gate", "up", "down")[not layout.gated :]
    stack = Stack("experts", "experts", leaves, layout)
    first, down = torch.randn(3, 64, 48, generator=torch.Generator().manual_seed(4)), torch.randn(3, 48, 32)
    if layout.transposed:
        first, down = first.mT.contiguous(), down.mT.contiguous()
    for parameter, tensor in zip(layout.weights, (first, down), strict=True):
        parts = {name.removesuffix(".weight"): view for name, view in stack.parts(parameter, tensor).items()}
        groups = [{n: parts[n] for n in stack.modules(e) if n in parts} for e in range(3)]
        frozen = [search_scales(group, "mse") for group in groups] if scales == "mse" else [{} for _ in groups]
        expected = torch.zeros_like(tensor)
        for e, (group, found) in enumerate(zip(groups, frozen, strict=True)):
            for view, (_, value) in zip(layout.parts(parameter, expected[e]), fake_quantize_group(group, found), strict=True):
                view.copy_(value)
        actual = torch.empty_like(tensor)
        stacked = _stacked([s for found in frozen for s in found.values()], 3, layout)
        fake_quantize_stack(layout.rows(tensor), stacked, layout.rows(actual))
        assert torch.equal(bits(actual), bits(expected))


def test_what_is_stored_in_mxfp4_is_decoded_and_exported(family_dir: FamilyDir, tmp_path: Path) -> None:
    """The experts quantized, or in BF16 under the name that engines read; config.json no longer says MXFP4."""
    folder = family_dir("gpt-oss MXFP4")
    source, stored = open_checkpoint(folder), load_file(folder / "model.safetensors")
    before = "model.layers.1.mlp.experts.down_proj"
    decoded = mxfp4.decode(stored[f"{before}_blocks"], stored[f"{before}_scales"])
    assert torch.equal(source.get("model.layers.1.mlp.experts.3.down_proj.weight"), decoded[3])
    out = exported(folder, tmp_path / "kept", exclude=["*.experts.*"])
    assert torch.equal(bits(load_file(out / "model.safetensors")[before]), bits(decoded.mT))
    out = exported(folder, tmp_path / "quantized")
    assert [finding for finding in check(out, source=tmp_path / "quantized" / "arm") if finding.severity == "error"] == []
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "modelopt"


def test_mxfp4_without_scales_that_fit_is_refused(family_dir: FamilyDir, tmp_path: Path) -> None:
    shutil.copytree(family_dir("gpt-oss MXFP4"), tmp_path / "odd")
    tensors = load_file(tmp_path / "odd" / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    for damaged, told in ((tensors[name][:, :-2], r"gate_up_proj_scales is U8 \[4, 254, 4\]"), (None, "is missing")):
        left = {key: tensor for key, tensor in tensors.items() if key != name}
        left |= {} if damaged is None else {name: damaged.contiguous()}
        save_file(left, tmp_path / "odd" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SourceError, match=told):
            open_checkpoint(tmp_path / "odd")
