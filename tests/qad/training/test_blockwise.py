"""`quantize.rounding: blockwise`: what it trains, and from the recipe to the reloaded export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import qad.hf  # noqa: F401  (registers the loader)
from export.check import check
from export.writer import export_arm
from qad.arms.arm import BLOCKWISE, NEAREST, Arm, open_arm
from qad.errors import SourceError
from qad.model.loader import load_model
from qad.model.streamed import streamed_model
from qad.numerics.formats import FORMATS
from qad.numerics.linear import wrap_linears
from qad.recipes.job import Job, prepare
from qad.recipes.recipe import Recipe
from qad.training.blockwise import trained_codes
from qad.training.stages import _frozen_scales, ptq_arm, trained_arm
from qad.training.student import Student

pytestmark = pytest.mark.usefixtures("one_eager_thread")


def recipe(model: Path, text: Path, lr: float = 1e-4, **quantize: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "quantize": {"scales": "mse", "rounding": "blockwise", **quantize},
            "calibrate": {"data": str(text), "samples": 48, "seq_len": 32},
            "train": {
                "tokens": 6 * 128,
                "seq_len": 32,
                "batch_size": 4,
                "lr": lr,
                "validate_every": 3,
                "validation_tokens": 128,
                "chunk": 64,
                "data": str(text),
            },
        }
    )


@pytest.fixture(scope="module")
def ptq(tiny_llama_dir: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("blockwise") / "ptq"
    ptq_arm(prepare(recipe(tiny_llama_dir, text_file)), out)
    return out


def deployed(arm: Arm) -> nn.Module:
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
    assert arm.rounding == BLOCKWISE
    assert arm.selection is not None
    decided = load_file(ptq / "frozen.safetensors")
    assert len(decided) == 4 * len(arm.selection.modules), "codes, two scales, and where training begins"
    export_arm(ptq, tmp_path / "out")
    assert check(tmp_path / "out", source=ptq) == []
    assert "one layer after another" in (tmp_path / "out" / "README.md").read_text()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for module in arm.selection.modules:
        assert torch.equal(stored[f"{module}.weight"], decided[f"{module}.codes"])
        scales = (stored[f"{module}.weight_scale"], decided[f"{module}.block_scale"])
        assert torch.equal(*(scale.view(torch.uint8) for scale in scales))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(40).view(2, 20) + 5
    with torch.no_grad():
        ours, theirs = deployed(arm)(ids).logits, reloaded(ids).logits
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def global_scales(prepared: Job) -> dict[str, Tensor]:
    return {module: scales.global_scale for module, scales in _frozen_scales(prepared).items()}


def hidden(model: nn.Module, prepared: Job) -> Tensor:
    windows = prepared.calibration_windows()
    assert windows is not None
    (batch,) = windows.batches(len(windows))
    with torch.no_grad():
        states: Tensor = model.base_model(**batch.model_inputs("cpu"))[0]  # type: ignore[operator]
    return states


def test_hidden_states_are_nearer_to_the_original_than_by_rounding_to_nearest(
    ptq: Path, tiny_llama_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    prepared = prepare(recipe(tiny_llama_dir, text_file))
    ptq_arm(prepare(recipe(tiny_llama_dir, text_file, rounding="nearest")), tmp_path / "nearest")
    original = hidden(load_model(prepared.source, "float32", "cpu"), prepared)
    lost = [(hidden(deployed(open_arm(arm)), prepared) - original).square().mean() for arm in (ptq, tmp_path / "nearest")]
    assert lost[0] < 0.9 * lost[1]


def test_streamed_and_loaded_models_decide_alike(ptq: Path, tiny_llama_dir: Path, text_file: Path) -> None:
    prepared, arm = prepare(recipe(tiny_llama_dir, text_file)), open_arm(ptq)
    windows = prepared.calibration_windows()
    assert windows is not None
    start = {m: s.global_scale for group in prepared.selection.groups for m, s in arm.frozen_scales(group).items()}
    for model in (streamed_model(prepared.source, "float32"), load_model(prepared.source, "float32", "cpu")):
        assert model is not None
        found = trained_codes(
            model, prepared.selection, windows, lambda m: prepared.source.get(f"{m}.weight"), arm.input_scales, start, "mse"
        )
        for group in prepared.selection.groups:
            for module, scales in arm.frozen_scales(group).items():
                assert scales.decided is not None
                assert found[module].decided is not None
                assert torch.equal(scales.decided.packed, found[module].decided.packed)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:validation KL never fell")  # so few steps need not find better codes
def test_training_goes_on_from_the_codes(ptq: Path, tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    start, prepared = open_arm(ptq), prepare(recipe(tiny_llama_dir, text_file, lr=1e-5))
    student = Student(start, load_model(start.source, "float32", "cpu"))
    parameters = dict(student.model.named_parameters())
    for group in start.quantized():
        for module, q in group.items():
            assert torch.equal(parameters[f"{module}.weight"], q.dequantize()), "the first forward pass is that of the export"
    trained_arm(prepared, "qad", ptq, tmp_path / "qad")
    arm = open_arm(tmp_path / "qad")
    assert arm.rounding == (NEAREST if arm.trained else BLOCKWISE)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the training is meant to fail
def test_a_training_that_found_nothing_keeps_the_codes(ptq: Path, tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    trained_arm(prepare(recipe(tiny_llama_dir, text_file, lr=10.0)), "qad", ptq, tmp_path / "worse")
    arm = open_arm(tmp_path / "worse")
    assert not arm.trained
    assert arm.rounding == BLOCKWISE


def test_experts_by_name_and_mixed_formats(make_qwen3: Callable[..., Path], text_file: Path, tmp_path: Path) -> None:
    alone = dict.fromkeys(("*.self_attn.q_proj", "*.self_attn.k_proj", "*.self_attn.v_proj"), "W4A16_NVFP4")
    formats = {"*.self_attn.o_proj": "FP8", **alone}
    ptq_arm(prepare(recipe(make_qwen3(tmp_path / "moe", "mixtral"), text_file, formats=formats)), tmp_path / "ptq")
    arm = open_arm(tmp_path / "ptq")
    assert arm.selection is not None
    stored = load_file(tmp_path / "ptq" / "frozen.safetensors")
    four_bits = {m for m in arm.selection.modules if FORMATS[arm.selection.format_of(m)].nvfp4_weights}
    assert {name.removesuffix(".codes") for name in stored if name.endswith(".codes")} == four_bits
    assert any("experts" in module for module in four_bits)
    export_arm(tmp_path / "ptq", tmp_path / "out")
    assert check(tmp_path / "out", source=tmp_path / "ptq") == []


def test_one_layer_is_held_at_a_time(tiny_llama_dir: Path, text_file: Path) -> None:
    prepared = prepare(recipe(tiny_llama_dir, text_file))
    windows, model = prepared.calibration_windows(), streamed_model(prepared.source, "float32")
    assert windows is not None
    held: list[int] = []

    def weight_of(module: str) -> Tensor:
        held.append(sum(p.untyped_storage().nbytes() for p in model.parameters()))  # type: ignore[union-attr]
        return prepared.source.get(f"{module}.weight")

    trained_codes(model, prepared.selection, windows, weight_of, {}, global_scales(prepared), "mse")
    layer = max(sum(4 * p.numel() for p in m.parameters()) for m in load_model(prepared.source, "float32", "cpu").model.layers)
    assert max(held) < layer


def test_layers_with_something_between_them_are_refused(tiny_llama_dir: Path, text_file: Path) -> None:
    prepared = prepare(recipe(tiny_llama_dir, text_file))
    windows, model = prepared.calibration_windows(), load_model(prepared.source, "float32", "cpu")
    assert windows is not None
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    with pytest.raises(SourceError, match="computes something between them"):
        trained_codes(
            model, prepared.selection, windows, lambda m: prepared.source.get(f"{m}.weight"), {}, global_scales(prepared), "mse"
        )


@pytest.mark.parametrize("quantize", [{"scales": "dynamic"}, {}])
def test_codes_need_frozen_scales_and_text(tiny_llama_dir: Path, text_file: Path, quantize: dict[str, str]) -> None:
    calibrate = {"calibrate": {"data": str(text_file)}} if quantize else {}
    given = {"format": "W4A16_NVFP4", "scales": "mse", "rounding": "blockwise", **quantize}
    with pytest.raises(ValidationError, match="blockwise decides codes beside frozen scales, on text"):
        Recipe.model_validate({"model": str(tiny_llama_dir), "quantize": given, **calibrate})
