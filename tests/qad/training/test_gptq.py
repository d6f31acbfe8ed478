"""`quantize.rounding: gptq` from the recipe to the reloaded export: decided once, kept in the arm, exported as decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import qad.hf  # noqa: F401  (registers the loader)
from export.check import check
from export.writer import export_arm
from qad.arms.arm import GPTQ, NEAREST, Arm, open_arm
from qad.artifact import differences
from qad.errors import ArtifactError
from qad.model.loader import load_model
from qad.model.streamed import streamed_model
from qad.numerics.formats import FORMATS
from qad.numerics.linear import QuantizedLinear, wrap_linears
from qad.recipes.job import Job, prepare
from qad.recipes.recipe import Recipe
from qad.training.gptq_pass import decided_codes
from qad.training.stages import _ptq_key, ptq_arm, trained_arm
from qad.training.student import Student

DOWN = "model.layers.0.mlp.down_proj"

pytestmark = pytest.mark.usefixtures("one_eager_thread")


def job(model: Path, text: Path, lr: float = 1e-4, **quantize: object) -> Job:
    return prepare(
        Recipe.model_validate(
            {
                "model": str(model),
                "dtype": "float32",
                "quantize": {"scales": "mse", "rounding": "gptq", **quantize},
                "calibrate": {"data": str(text), "samples": 16, "seq_len": 32},
                "train": {
                    "tokens": 6 * 128,
                    "seq_len": 32,
                    "batch_size": 4,
                    "lr": lr,
                    "validate_every": 3,
                    "save_every": 3,
                    "validation_tokens": 128,
                    "chunk": 64,
                    "data": str(text),
                },
            }
        )
    )


@pytest.fixture(scope="module")
def ptq(tiny_llama_dir: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gptq") / "ptq"
    ptq_arm(job(tiny_llama_dir, text_file), out)
    return out


def deployed(arm: Arm) -> torch.nn.Module:
    """The arm's model, put together without an export."""
    assert arm.selection is not None
    model = load_model(arm.source, "float32", "cpu")
    for tensors in arm.quantized():
        for name, q in tensors.items():
            model.get_submodule(name).weight.copy_(q.dequantize())
    wrap_linears(model, {n: (arm.input_scales.get(n), arm.selection.format_of(n)) for n in arm.selection.modules})
    return model


def test_arm_export_and_reload_hold_the_same_bits(ptq: Path, tmp_path: Path) -> None:
    arm = open_arm(ptq)
    assert arm.rounding == GPTQ
    assert arm.selection is not None
    decided = load_file(ptq / "frozen.safetensors")
    assert len(decided) == 4 * len(arm.selection.modules), "codes, two scales, and where training begins"
    export_arm(ptq, tmp_path / "out")
    assert check(tmp_path / "out", source=ptq) == []
    assert "(GPTQ)" in (tmp_path / "out" / "README.md").read_text()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for module in arm.selection.modules:
        assert torch.equal(stored[f"{module}.weight"], decided[f"{module}.codes"])
        scales = (stored[f"{module}.weight_scale"], decided[f"{module}.block_scale"])
        assert torch.equal(*(scale.view(torch.uint8) for scale in scales))
        assert torch.equal(stored[f"{module}.weight_scale_2"], decided[f"{module}.global_scale"])
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(40).view(2, 20) + 5
    with torch.no_grad():
        ours, theirs = deployed(arm)(ids).logits, reloaded(ids).logits
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_a_second_making_has_the_same_bytes(ptq: Path, tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    ptq_arm(job(tiny_llama_dir, text_file), tmp_path / "ptq")
    assert (tmp_path / "ptq" / "frozen.safetensors").read_bytes() == (ptq / "frozen.safetensors").read_bytes()


def outputs_of(model: torch.nn.Module, modules: list[str], prepared: Job) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in modules:
        model.get_submodule(name).register_forward_hook(lambda m, args, out, name=name: found.update({name: out}))
    windows = prepared.calibration_windows()
    assert windows is not None
    (batch,) = windows.batches(len(windows))
    with torch.no_grad():
        model(batch.input_ids_ST, position_ids=batch.position_ids_ST, use_cache=False)
    return found


def test_outputs_are_nearer_to_the_original_than_by_rounding_to_nearest(
    ptq: Path, tiny_llama_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    prepared = job(tiny_llama_dir, text_file)
    ptq_arm(job(tiny_llama_dir, text_file, rounding="nearest"), tmp_path / "nearest")
    arms = {"gptq": open_arm(ptq), "nearest": open_arm(tmp_path / "nearest")}
    assert arms["nearest"].rounding == NEAREST
    assert arms["nearest"].selection is not None
    modules = [name for name in arms["nearest"].selection.modules if name.endswith("down_proj")]
    original = outputs_of(load_model(prepared.source, "float32", "cpu"), modules, prepared)
    lost = {}
    for name, arm in arms.items():
        model = deployed(arm)
        for module in model.modules():  # weights alone: activations of a random model drown them
            if isinstance(module, QuantizedLinear):
                module.quantizes_input = False
        outputs = outputs_of(model, modules, prepared)
        lost[name] = sum(float((outputs[m] - original[m]).square().sum()) for m in modules)
    assert lost["gptq"] < 0.9 * lost["nearest"]


def test_streamed_and_loaded_models_decide_alike(ptq: Path, tiny_llama_dir: Path, text_file: Path) -> None:
    prepared, arm = job(tiny_llama_dir, text_file), open_arm(ptq)
    windows = prepared.calibration_windows()
    assert windows is not None
    start = {m: s.global_scale for group in prepared.selection.groups for m, s in arm.frozen_scales(group).items()}
    found = []
    for model in (streamed_model(prepared.source, "float32"), load_model(prepared.source, "float32", "cpu")):
        assert model is not None
        found.append(
            decided_codes(
                model, prepared.selection, windows, lambda m: prepared.source.get(f"{m}.weight"), arm.input_scales, start, "mse"
            )
        )
    for module, scales in found[0].items():
        other = found[1][module]
        assert scales.decided is not None
        assert other.decided is not None
        assert torch.equal(scales.decided.packed, other.decided.packed)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the second training is meant to fail
def test_training_begins_at_the_codes_and_goes_on_by_rounding_to_nearest(
    ptq: Path, tiny_llama_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    prepared, start = job(tiny_llama_dir, text_file), open_arm(ptq)
    student = Student(start, load_model(prepared.source, "float32", "cpu"))
    parameters = dict(student.model.named_parameters())
    for group in start.quantized():
        for module, q in group.items():
            assert torch.equal(parameters[f"{module}.weight"], q.dequantize()), "the first forward pass is that of the export"
    moved = student.weights[f"{DOWN}.weight"] - start.weight(f"{DOWN}.weight").float()
    assert moved.abs().max() > 0, "it does not begin at the original"
    assert student.moved() == {"masters": 0.0, "deployed": 0.0}
    trained_arm(prepared, "qad", ptq, tmp_path / "qad")
    arm = open_arm(tmp_path / "qad")
    assert arm.trained
    assert arm.rounding == NEAREST
    kept, found = (load_file(folder / "frozen.safetensors") for folder in (ptq, tmp_path / "qad"))
    assert set(found) == {name for name in kept if not name.endswith((".codes", ".start"))}
    for name, scale in found.items():
        assert torch.equal(kept[name].reshape(-1).view(torch.uint8), scale.reshape(-1).view(torch.uint8))
    export_arm(tmp_path / "qad", tmp_path / "out")
    assert check(tmp_path / "out", source=tmp_path / "qad") == []
    assert "(GPTQ)" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.filterwarnings("ignore::UserWarning")  # the training is meant to fail
def test_a_training_that_found_nothing_keeps_the_codes(ptq: Path, tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    trained_arm(job(tiny_llama_dir, text_file, lr=10.0), "qad", ptq, tmp_path / "worse")
    arm = open_arm(tmp_path / "worse")
    assert not arm.trained
    kept = {name: tensor for name, tensor in load_file(ptq / "frozen.safetensors").items() if not name.endswith(".start")}
    found = load_file(tmp_path / "worse" / "frozen.safetensors")
    assert found.keys() == kept.keys()
    assert all(torch.equal(kept[n].reshape(-1).view(torch.uint8), found[n].reshape(-1).view(torch.uint8)) for n in kept)
    module = next(iter(arm.selection.modules)) if arm.selection else ""
    assert torch.equal(arm.start(f"{module}.weight"), arm.quantize([module])[module].dequantize()), "no start: the codes' values"


def test_codes_that_were_decided_without_training_have_no_start(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    prepared = job(tiny_llama_dir, text_file)
    alone = dataclasses.replace(prepared, recipe=prepared.recipe.model_copy(update={"train": None}))
    ptq_arm(alone, tmp_path / "ptq")
    assert not any(name.endswith(".start") for name in load_file(tmp_path / "ptq" / "frozen.safetensors"))
    with pytest.raises(ArtifactError, match="without a start for training"):
        trained_arm(prepared, "qad", tmp_path / "ptq", tmp_path / "qad")
    assert differences(tmp_path / "ptq", *_ptq_key(prepared)), "a run that trains makes it again"


def test_experts_by_name_and_mixed_formats(make_qwen3: Callable[..., Path], text_file: Path, tmp_path: Path) -> None:
    model = make_qwen3(tmp_path / "moe", "mixtral")
    prepared = job(
        model,
        text_file,
        formats={
            "*.self_attn.o_proj": "FP8",
            "*.self_attn.q_proj": "W4A16_NVFP4",
            "*.self_attn.k_proj": "W4A16_NVFP4",
            "*.self_attn.v_proj": "W4A16_NVFP4",
        },
    )
    ptq_arm(prepared, tmp_path / "ptq")
    arm = open_arm(tmp_path / "ptq")
    assert arm.selection is not None
    stored = load_file(tmp_path / "ptq" / "frozen.safetensors")
    four_bits = {m for m in arm.selection.modules if FORMATS[arm.selection.format_of(m)].nvfp4_weights}
    assert {name.removesuffix(".codes") for name in stored if name.endswith(".codes")} == four_bits
    assert any("experts" in module for module in four_bits)
    export_arm(tmp_path / "ptq", tmp_path / "out")
    assert check(tmp_path / "out", source=tmp_path / "ptq") == []


def test_codes_that_are_missing_are_refused(ptq: Path, tmp_path: Path) -> None:
    arm = open_arm(ptq)
    facts = {**arm.facts, "rounding": GPTQ}
    stored = load_file(ptq / "frozen.safetensors")
    del stored[f"{DOWN}.codes"]
    (tmp_path / "arm").mkdir()
    save_file(stored, tmp_path / "arm" / "frozen.safetensors")
    broken = Arm(tmp_path / "arm", "ptq", arm.source, arm.selection, arm.input_scales, facts)
    with pytest.raises(ArtifactError, match=DOWN):
        broken.frozen_scales([DOWN])


@pytest.mark.parametrize("quantize", [{"scales": "dynamic"}, {}])
def test_codes_need_frozen_scales_and_text(tiny_llama_dir: Path, text_file: Path, quantize: dict[str, str]) -> None:
    calibrate = {"calibrate": {"data": str(text_file)}} if quantize else {}
    with pytest.raises(ValidationError, match="gptq decides codes beside frozen scales, on text"):
        Recipe.model_validate(
            {
                "model": str(tiny_llama_dir),
                "quantize": {"format": "W4A16_NVFP4", "scales": "mse", "rounding": "gptq", **quantize},
                **calibrate,
            }
        )
