"""The law: the reloaded export is, to the bit, the student that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qad.hf
from export.writer import export_arm
from qad import nvfp4
from qad.arm import Arm, open_arm, write_arm
from qad.artifact import run_stage
from qad.calibrate import AmaxObserver, group_input_scales
from qad.linear import NVFP4Linear
from qad.loader import DTYPES, load_model, load_skeleton
from qad.selection import select
from qad.source import Checkpoint, open_checkpoint
from qad.student import Student

FORMATS = ["NVFP4", "W4A16_NVFP4"]


def trained_arm(source: Checkpoint, folder: Path, format: str) -> Arm:
    """An arm whose FP32 masters are not BF16 numbers, with outliers, tiny blocks, zero blocks and a zero tensor."""
    selection = select(load_skeleton(source), format)
    model = load_model(source, "float32", "cpu")
    with AmaxObserver(model, list(selection.modules)) as observer, torch.no_grad():
        model(torch.arange(64)[None])
    scales = group_input_scales(observer.amax, selection, 1.0) if selection.quantizes_activations else {}
    g = torch.Generator().manual_seed(3)
    masters = {n: p.detach() * (1 + 0.01 * torch.randn(p.shape, generator=g)) for n, p in model.named_parameters()}
    masters["model.layers.0.mlp.down_proj.weight"][5, 7] = 3.0
    masters["model.layers.0.mlp.up_proj.weight"][:, 16:32] *= 1e-7
    masters["model.layers.1.mlp.up_proj.weight"][:, :16] = 0.0
    masters["model.layers.1.self_attn.o_proj.weight"].zero_()
    run_stage("arm", folder, {}, {}, lambda f: write_arm(f, "qad", source, selection, scales, masters))
    return open_arm(folder)


@pytest.fixture(scope="module", params=FORMATS)
def exported(
    request: pytest.FixtureRequest, tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Arm, Path]:
    folder = tmp_path_factory.mktemp("law")
    arm = trained_arm(open_checkpoint(tiny_llama_dir), folder / "arm", request.param)
    export_arm(arm.folder, folder / "out")
    return arm, folder / "out"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def test_every_tensor_decodes_to_the_fake_quantized_master(exported: tuple[Arm, Path]) -> None:
    arm, out = exported
    stored = load_file(out / "model.safetensors")
    assert arm.selection is not None
    student = Student(arm, load_model(arm.source, "float32", "cpu"))
    parameters = dict(student.model.named_parameters())
    for module in arm.selection.modules:
        q = nvfp4.QuantizedTensor(
            *(stored[f"{module}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2"))
        )
        master = arm.weight(f"{module}.weight")
        assert torch.equal(bits(nvfp4.dequantize(q)), bits(nvfp4.fake_quantize(master, q.global_scale)))
        assert torch.equal(bits(nvfp4.dequantize(q)), bits(parameters[f"{module}.weight"].detach()))
    for name, parameter in parameters.items():
        if f"{name}_scale" not in stored:
            assert torch.equal(bits(stored[name].float()), bits(parameter.detach()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_the_reloaded_export_equal_the_students(exported: tuple[Arm, Path], dtype: str) -> None:
    arm, out = exported
    student = Student(arm, load_model(arm.source, dtype, "cpu")).model
    reloaded, report = AutoModelForCausalLM.from_pretrained(out, dtype=DTYPES[dtype], output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert reloaded.dtype == DTYPES[dtype]
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = student(ids).logits, reloaded(ids).logits
    assert torch.equal(bits(expected), bits(actual))
    assert expected.float().std() > 0


def test_generation_works_and_linears_compute_in_nvfp4(exported: tuple[Arm, Path]) -> None:
    arm, out = exported
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    quantized = {n for n, m in model.named_modules() if isinstance(m, NVFP4Linear)}
    assert arm.selection is not None
    assert quantized == set(arm.selection.modules)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_saving_a_decoded_model_is_refused(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported[1], dtype=torch.float32)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("leaf", ["weight", "weight_scale", "weight_scale_2"])
def test_a_missing_tensor_is_never_made_up(exported: tuple[Arm, Path], tmp_path: Path, leaf: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(exported[1], broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{leaf}"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match="up_proj"):
        AutoModelForCausalLM.from_pretrained(broken, dtype=torch.float32)


def test_an_unknown_algorithm_is_named(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(exported[1], broken)
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="NVFP4_AWQ"):
        AutoModelForCausalLM.from_pretrained(broken, dtype=torch.float32)


def test_importing_twice_is_harmless_and_a_taken_name_is_not() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    qad.hf._register()
    taken = AUTO_QUANTIZER_MAPPING[qad.hf.METHOD]
    try:
        AUTO_QUANTIZER_MAPPING[qad.hf.METHOD] = object
        with pytest.raises(RuntimeError, match="already has a quantizer named"):
            qad.hf._register()
    finally:
        AUTO_QUANTIZER_MAPPING[qad.hf.METHOD] = taken
