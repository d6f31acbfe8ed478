"""FP8, several formats by module, and a quantized output head: selection, calibration, training, and the law for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import qad.hf  # noqa: F401
from export.writer import export_arm
from qad.arms.arm import Arm, open_arm, write_arm
from qad.arms.selection import Selection, describe, select
from qad.artifact import run_stage
from qad.errors import UsageError
from qad.model.loader import DTYPES, load_model, load_skeleton
from qad.model.source import Checkpoint, open_checkpoint
from qad.numerics import fp8, nvfp4
from qad.numerics.linear import QuantizedLinear
from qad.recipes.recipe import Quantize
from qad.text.windows import Windows
from qad.training.calibrate import calibrate
from qad.training.chunked import NoTeacher, chunked_loss
from qad.training.head import Head
from qad.training.losses import cross_entropy
from qad.training.student import Student

HEAD = ("*", "lm_head")
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"format": "FP8"},
    "mixed": {"format": "W4A16_NVFP4", "formats": {"*.self_attn.*": "FP8", "lm_head": "NVFP4"}, "include": HEAD},
    "fp8 head": {"format": "NVFP4", "formats": {"lm_head": "FP8"}, "include": HEAD},
}


@pytest.fixture(scope="module")
def source(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Untied."""
    return open_checkpoint(make_llama(tmp_path_factory.mktemp("schemes") / "llama", tie_word_embeddings=False))


def windows() -> Windows:
    ids = torch.randint(0, 512, (4, 24), generator=torch.Generator().manual_seed(2))
    return Windows.of(ids, torch.arange(24).expand(4, 24).contiguous())


def trained_arm(source: Checkpoint, folder: Path, scheme: dict[str, Any]) -> Arm:
    """An arm whose FP32 masters are no BF16 numbers, with an outlier and a zero tensor."""
    selection = select(load_skeleton(source), **scheme)
    model = load_model(source, "float32", "cpu")
    scales = calibrate(model, selection, windows()).input_scales
    g = torch.Generator().manual_seed(3)
    masters = {n: p.detach() * (1 + 0.01 * torch.randn(p.shape, generator=g)) for n, p in model.named_parameters()}
    masters["model.layers.0.mlp.down_proj.weight"][5, 7] = 3.0
    masters["model.layers.1.self_attn.o_proj.weight"].zero_()
    run_stage("arm", folder, {}, {}, lambda f: write_arm(f, "qad", source, selection, scales, masters))
    return open_arm(folder)


@pytest.fixture(scope="module", params=SCHEMES)
def exported(request: pytest.FixtureRequest, source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Arm, Path]:
    folder = tmp_path_factory.mktemp("law")
    arm = trained_arm(source, folder / "arm", SCHEMES[request.param])
    export_arm(arm.folder, folder / "out")
    return arm, folder / "out"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def selection_of(arm: Arm) -> Selection:
    assert arm.selection is not None
    return arm.selection


# --- the law ---


def test_every_tensor_decodes_to_the_fake_quantized_master(exported: tuple[Arm, Path]) -> None:
    arm, out = exported
    stored, selection = load_file(out / "model.safetensors"), selection_of(arm)
    parameters = dict(Student(arm, load_model(arm.source, "float32", "cpu")).model.named_parameters())
    for module in selection.modules:
        master, deployed = arm.weight(f"{module}.weight"), parameters[f"{module}.weight"]
        if selection.format_of(module) == "FP8":
            weight, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
            decoded, fake = fp8.dequantize(fp8.Fp8Tensor(weight, scale)), fp8.fake_quantize(master, scale)
        else:
            q = nvfp4.QuantizedTensor(*(stored[f"{module}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2")))
            decoded, fake = nvfp4.dequantize(q), nvfp4.fake_quantize(master, q.global_scale)
        assert torch.equal(bits(decoded), bits(fake))
        assert torch.equal(bits(decoded), bits(deployed))
    for name in parameters.keys() - {f"{module}.weight" for module in selection.modules}:
        assert torch.equal(bits(stored[name].float()), bits(parameters[name]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_the_reloaded_export_equal_the_students(exported: tuple[Arm, Path], dtype: str) -> None:
    arm, out = exported
    student = Student(arm, load_model(arm.source, dtype, "cpu")).model
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype=DTYPES[dtype])
    selection = selection_of(arm)
    found = {n: m.format for n, m in reloaded.named_modules() if isinstance(m, QuantizedLinear)}
    assert found == {module: selection.format_of(module) for module in selection.modules}
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = student(ids).logits, reloaded(ids).logits
    assert torch.equal(bits(expected), bits(actual))
    assert expected.float().std() > 0


def test_a_scale_group_shares_its_scales(exported: tuple[Arm, Path]) -> None:
    """Engines quantize FP8 members with unequal scales again."""
    arm, out = exported
    stored = load_file(out / "model.safetensors")
    for group in selection_of(arm).groups:
        for leaf in ("weight_scale", "weight_scale_2", "input_scale"):
            values = [stored[f"{module}.{leaf}"] for module in group if f"{module}.{leaf}" in stored]
            assert len({float(value) for value in values if value.numel() == 1}) <= 1


# --- training ---


def test_the_chunked_loss_of_a_quantized_head_is_the_models_own(exported: tuple[Arm, Path]) -> None:
    arm = exported[0]
    student = Student(arm, load_model(arm.source, "float32", "cpu"))
    model, batch = student.model, windows()
    head = Head.of(model)
    ids, labels = batch.input_ids_ST, batch.labels_ST.flatten()
    loss = chunked_loss(model.base_model(ids).last_hidden_state.flatten(0, 1), head, NoTeacher(), labels, cross_entropy, 7)
    loss.backward()
    ours = {name: master.grad.clone() for name, master in student.masters.items() if master.grad is not None}
    for master in student.masters.values():
        master.grad = None
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels, reduction="sum")
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert ours.keys() == student.masters.keys()
    for name, master in student.masters.items():
        assert torch.allclose(ours[name], master.grad, rtol=1e-3, atol=1e-4 * float(master.grad.abs().max())), name


def test_without_input_quantization_the_head_sees_its_input_as_it_is(exported: tuple[Arm, Path]) -> None:
    arm = exported[0]
    student = Student(arm, load_model(arm.source, "float32", "cpu"))
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    quantized = "lm_head" in selection_of(arm).modules
    assert torch.equal(Head.of(student.model).quantize_input(hidden), hidden) != quantized
    student.quantize_inputs(False)
    assert torch.equal(Head.of(student.model).quantize_input(hidden), hidden)


@pytest.mark.filterwarnings("ignore:.*inputs lie above what was calibrated:UserWarning")
def test_saturated_inputs_are_counted_for_every_format(exported: tuple[Arm, Path]) -> None:
    arm = exported[0]
    student = Student(arm, load_model(arm.source, "float32", "cpu"))
    shares = []
    for factor in (2.0, 0.5):  # of the calibrated scale: nothing saturates, some of everything does
        for module in student.model.modules():
            if isinstance(module, QuantizedLinear) and module.input_scale is not None:
                module.input_scale.mul_(factor if factor == 2.0 else 0.25)
        with student.saturation.counting(), torch.no_grad():
            student.model(windows().input_ids_ST)
        shares.append(student.saturation.shares["saturated_input_share"])
    assert shares[0] is not None
    assert shares[1] is not None
    assert shares[0] < 0.02 < shares[1] < 1


# --- calibration ---


def test_the_heads_input_is_calibrated_without_whole_logits(source: Checkpoint) -> None:
    selection = select(load_skeleton(source), "NVFP4", include=HEAD)
    model = load_model(source, "float32", "cpu")
    shapes: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    scales = calibrate(model, selection, windows()).input_scales
    with torch.no_grad():
        hidden = model.base_model(windows().input_ids_ST, position_ids=windows().position_ids_ST).last_hidden_state
    assert torch.equal(scales["lm_head"], hidden.abs().amax() / 2688)
    assert shapes == [torch.Size((4, 1, 512))]
    assert scales.keys() == selection.modules.keys()


def test_input_scales_follow_the_format_and_weight_only_modules_have_none(source: Checkpoint) -> None:
    skeleton, model = load_skeleton(source), load_model(source, "float32", "cpu")
    four, eight = (calibrate(model, select(skeleton, format), windows()).input_scales for format in ("NVFP4", "FP8"))
    assert all(torch.allclose(eight[module], four[module] * 6) for module in four)
    mixed = calibrate(model, select(skeleton, "W4A16_NVFP4", formats={"*.mlp.*": "FP8"}), windows(), headroom=2.0)
    assert mixed.input_scales == {m: scale * 2 for m, scale in eight.items() if ".mlp." in m}


# --- selection ---


def test_the_first_matching_pattern_decides_and_json_keeps_it(source: Checkpoint) -> None:
    patterns = {"*.0.self_attn.*": "W4A16_NVFP4", "*.self_attn.*": "FP8"}
    selection = select(load_skeleton(source), "NVFP4", formats=patterns)
    layers = {name: selection.format_of(name) for name in selection.modules}
    assert {layers[f"model.layers.{i}.self_attn.{p}_proj"] for i, p in ((0, "q"), (0, "o"))} == {"W4A16_NVFP4"}
    assert {layers[f"model.layers.1.self_attn.{p}_proj"] for p in "qkvo"} == {"FP8"}
    assert layers["model.layers.0.mlp.up_proj"] == "NVFP4"
    assert selection.algorithm == "MIXED_PRECISION"
    assert Selection.from_json(json.loads(json.dumps(selection.to_json()))) == selection
    assert [line.split(":")[0] for line in describe(selection)][:3] == ["W4A16_NVFP4", "NVFP4", "FP8"]
    assert select(load_skeleton(source), "NVFP4", formats={"*": "FP8"}).algorithm == "FP8"


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"*.q_proj": "FP8"}, "give all of them one format"),
        ({"*.gate_prj": "FP8"}, "matches no module; nearest"),
        ({"lm_head": "FP8"}, "matches no module"),
    ],
    ids=["part of a group", "misspelt", "excluded"],
)
def test_formats_that_no_engine_could_load_are_refused(source: Checkpoint, formats: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select(load_skeleton(source), "NVFP4", formats=formats)


def test_the_experts_of_a_layer_have_one_format(make_qwen3: Callable[..., Path], tmp_path: Path) -> None:
    skeleton = load_skeleton(open_checkpoint(make_qwen3(tmp_path / "moe", "qwen3_moe")))
    with pytest.raises(UsageError, match="give all of them one format"):
        select(skeleton, "NVFP4", formats={"*.experts.*.down_proj": "FP8"})
    assert select(skeleton, "NVFP4", formats={"*.0.mlp.experts.*": "FP8"}).algorithm == "MIXED_PRECISION"


def test_the_head_is_quantized_only_by_its_full_name(source: Checkpoint, tiny_llama_dir: Path) -> None:
    skeleton = load_skeleton(source)
    for include in (("*",), ("*head", "*")):
        assert select(skeleton, "NVFP4", include=include).excluded["lm_head"] == "output head"
    assert "lm_head" in select(skeleton, "NVFP4", include=HEAD).modules
    assert select(skeleton, "NVFP4", include=HEAD, exclude=["lm_head"]).excluded["lm_head"] == "excluded by 'lm_head'"
    tied = load_skeleton(open_checkpoint(tiny_llama_dir))
    with pytest.raises(UsageError, match="shares the embedding's weight"):
        select(tied, "NVFP4", include=HEAD)


def test_a_recipe_says_all_of_it() -> None:
    section = Quantize.model_validate({"format": "W4A16_NVFP4", "formats": {"*.self_attn.*": "FP8"}})
    assert section.formats == {"*.self_attn.*": "FP8"}
    with pytest.raises(ValueError, match="FP8"):
        Quantize.model_validate({"formats": {"*": "INT8"}})


# --- the loader ---


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    change(config["quantization_config"])
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("how", ["null", "absent"])
def test_nvfp4_without_input_activations_is_weight_only(source: Checkpoint, tmp_path: Path, how: str) -> None:
    selection = select(load_skeleton(source), "W4A16_NVFP4")
    run_stage("arm", tmp_path / "arm", {}, {}, lambda f: write_arm(f, "ptq", source, selection, {}))
    export_arm(tmp_path / "arm", tmp_path / "out")

    def variant(quantization: dict[str, Any]) -> None:
        quantization["quant_algo"] = "NVFP4"
        if how == "null":
            quantization["config_groups"]["group_0"]["input_activations"] = None

    model, expected = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (changed(tmp_path / "out", tmp_path / "variant", variant), tmp_path / "out")
    )
    with torch.no_grad():
        assert torch.equal(model(windows().input_ids_ST).logits, expected(windows().input_ids_ST).logits)


@pytest.mark.parametrize("exported", ["mixed"], indirect=True)
def test_a_module_that_is_not_listed_or_listed_as_something_else_is_refused(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    _, out = exported
    module = "model.layers.1.self_attn.q_proj"
    unlisted = changed(out, tmp_path / "unlisted", lambda q: q["quantized_layers"].pop(module))
    other = changed(out, tmp_path / "other", lambda q: q["quantized_layers"].update({module: {"quant_algo": "W4A16_NVFP4"}}))
    empty = changed(out, tmp_path / "empty", lambda q: q.update(quantized_layers={}))
    unknown = changed(out, tmp_path / "unknown", lambda q: q["quantized_layers"].update({"a": {"quant_algo": "INT8"}}))
    for folder, message in (
        (unlisted, rf"{module} is ignored by config.json or not listed"),
        (other, rf"{module}\.\w+ is|{module}\.input_scale is in"),
        (empty, "says nothing about any module"),
        (unknown, "INT8"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
