"""The compressed-tensors layout: the same codes and scales as ModelOpt's, in a form that the library itself opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from export.check import check
from export.layouts.layout import COMPRESSED_TENSORS, MODELOPT
from export.writer import export_arm
from qad.arms.arm import open_arm
from qad.arms.selection import Selection
from qad.numerics import nvfp4

FORMATS = ["NVFP4", "W4A16_NVFP4"]
Exports = tuple[Path, Path, Path]


@pytest.fixture(scope="module", params=FORMATS)
def exports(
    request: pytest.FixtureRequest, tiny_llama_dir: Path, build_arm: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Exports:
    """The arm, its ModelOpt export, its compressed-tensors export."""
    root = tmp_path_factory.mktemp("layouts")
    arm = build_arm(tiny_llama_dir, root / "arm", request.param)
    for layout in ("modelopt", "compressed-tensors"):
        export_arm(arm, root / layout, layout=layout)
    return arm, root / "modelopt", root / "compressed-tensors"


def selection_of(arm: Path) -> Selection:
    selection = open_arm(arm).selection
    assert selection is not None
    return selection


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    return abs(int(a.reshape(()).view(torch.int32)) - int(b.reshape(()).view(torch.int32)))


def test_codes_and_block_scales_are_the_modelopt_layouts_bytes(exports: Exports) -> None:
    arm, modelopt, compressed = exports
    theirs, ours = load_file(modelopt / "model.safetensors"), load_file(compressed / "model.safetensors")
    selection = selection_of(arm)
    assert len(selection.modules) == 14
    for module in selection.modules:
        assert as_bytes(ours.pop(f"{module}.weight_packed")) == as_bytes(theirs.pop(f"{module}.weight"))
        assert as_bytes(ours.pop(f"{module}.weight_scale")) == as_bytes(theirs.pop(f"{module}.weight_scale"))
        pairs = [("weight_global_scale", "weight_scale_2")]
        pairs += [("input_global_scale", "input_scale")] if selection.quantizes_activations else []
        for own, other in pairs:
            stored, scale = ours.pop(f"{module}.{own}"), theirs.pop(f"{module}.{other}")
            assert (stored.dtype, stored.shape) == (torch.float32, (1,))
            assert as_bytes(stored.reshape(())) == as_bytes(1.0 / scale)
            assert ulps(1.0 / stored, scale) <= 1
    assert {n: as_bytes(t) for n, t in ours.items()} == {n: as_bytes(t) for n, t in theirs.items()}


def test_fused_groups_share_their_global_and_input_scales(exports: Exports) -> None:
    arm, _, compressed = exports
    stored, selection = load_file(compressed / "model.safetensors"), selection_of(arm)
    assert sum(len(group) > 1 for group in selection.groups) == 4
    for group in selection.groups:
        assert len({as_bytes(stored[f"{module}.weight_global_scale"]) for module in group}) == 1
        if selection.quantizes_activations:
            assert len({as_bytes(stored[f"{module}.input_global_scale"]) for module in group}) == 1


def test_config_json_alone_says_how_it_is_quantized(exports: Exports) -> None:
    arm, _, compressed = exports
    selection = selection_of(arm)
    config = json.loads((compressed / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == open_arm(arm).source.config
    assert not (compressed / "hf_quant_config.json").exists()
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "nvfp4-pack-quantized"
    assert quantization["quantization_status"] == "compressed"
    assert quantization["ignore"] == ["lm_head", "model.embed_tokens"]
    group = quantization["config_groups"]["group_0"]
    assert (group["input_activations"] is not None) == selection.quantizes_activations


def test_the_librarys_data_classes_read_the_preset_scheme(exports: Exports) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    arm, _, compressed = exports
    quantization = json.loads((compressed / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(quantization).config_groups["group_0"]
    preset = preset_name_to_scheme("NVFP4" if selection_of(arm).quantizes_activations else "NVFP4A16", ["Linear"])
    assert scheme.targets == preset.targets
    for what in ("weights", "input_activations"):
        read, wanted = getattr(scheme, what), getattr(preset, what)
        assert (read is None) == (wanted is None)
        if read is not None:
            for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic"):
                assert getattr(read, key) == getattr(wanted, key)


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_same_codes_and_scales_and_decompresses_to_the_same_values(exports: Exports) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    arm, modelopt, compressed = exports
    selection, stored = selection_of(arm), load_file(modelopt / "model.safetensors")
    ours = load_file(compressed / "model.safetensors")
    packed, report = AutoModelForCausalLM.from_pretrained(compressed, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = packed.state_dict()
    for module in selection.modules:
        for leaf in COMPRESSED_TENSORS.leaves_of()[: 4 if selection.quantizes_activations else 3]:
            loaded = state[f"{module}.{leaf}"]
            assert loaded.dtype == ours[f"{module}.{leaf}"].dtype
            assert as_bytes(loaded) == as_bytes(ours[f"{module}.{leaf}"])
    decompress = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(compressed, dtype=torch.bfloat16, quantization_config=decompress)
    different = 0
    for module in selection.modules:
        q = nvfp4.QuantizedTensor(*(stored[f"{module}.{leaf}"] for leaf in MODELOPT.leaves_of()[:3]))
        expected, weight = nvfp4.dequantize(q, torch.bfloat16), model.get_parameter(f"{module}.weight").detach()
        steps = (expected.view(torch.int16).int() - weight.view(torch.int16).int()).abs()
        assert int(steps[expected != 0].max()) <= 1  # the library divides by the reciprocal: the last FP32 bit may differ
        assert torch.equal(expected == 0, weight == 0)
        different += int((expected != weight).sum())
    assert different <= 0.001 * sum(n * k for n, k in selection.modules.values())


@pytest.mark.filterwarnings("ignore")
def test_the_library_computes_the_logits_of_our_own_loader(exports: Exports) -> None:
    """BF16 is all the library decompresses to. There it rounds activations in BF16, so W4A4 agrees only within the noise
    of quantizing them; in FP32 they are equal, see below."""
    from transformers import AutoModelForCausalLM

    import qad.hf  # noqa: F401

    arm, modelopt, compressed = exports
    ids = torch.randint(0, 512, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs, original = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids).logits.float().log_softmax(-1)
            for folder in (modelopt, compressed, open_arm(arm).source.folder)
        )
    noise = float((ours - original).abs().mean())
    assert noise > 0.01
    assert float((ours - theirs).abs().mean()) < (1.0 if selection_of(arm).quantizes_activations else 0.01) * noise


def test_the_library_quantizes_activations_with_the_stored_scale_as_an_engine_does(exports: Exports) -> None:
    from compressed_tensors.quantization import QuantizationStatus, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    arm, _, compressed = exports
    scales = open_arm(arm).input_scales
    stored = load_file(compressed / "model.safetensors")
    assert bool(scales) == selection_of(arm).quantizes_activations
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for module, scale in scales.items():
        linear: Any = torch.nn.Linear(64, 64, bias=False)
        linear.quantization_status = QuantizationStatus.COMPRESSED
        linear.input_global_scale = torch.nn.Parameter(stored[f"{module}.input_global_scale"], requires_grad=False)
        theirs = forward_quantize(linear, x, "input", preset_name_to_scheme("NVFP4", ["Linear"]).input_activations)
        assert torch.allclose(theirs, nvfp4.fake_quantize_activation(x, scale), rtol=1e-6, atol=0)


def test_the_checker_passes_it_alone_and_against_its_arm(exports: Exports) -> None:
    arm, modelopt, compressed = exports
    for folder in (modelopt, compressed):
        assert check(folder) == []
        assert check(folder, source=arm) == []


def test_tensorrt_llm_is_said_to_read_the_layout_only_in_part(exports: Exports) -> None:
    assert [(f.rule, f.severity) for f in check(exports[2], engine="trtllm")] == [("E1", "warning")]
    assert check(exports[1], engine="trtllm") == []


def test_the_card_and_git_attributes_are_the_layouts(exports: Exports) -> None:
    arm, modelopt, compressed = exports
    for folder, layout in ((modelopt, "modelopt"), (compressed, "compressed-tensors")):
        card = (folder / "README.md").read_text()
        assert f"- {layout}\n" in card
        assert f"in the {layout} layout" in card
        rows: dict[str, int] = {}
        for line in card.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 3 and cells[1].replace(",", "").isdigit():
                rows[cells[0]] = int(cells[1].replace(",", ""))
        stored = load_file(folder / "model.safetensors")
        total = rows.pop("all tensors")
        assert total == sum(rows.values()) == sum(t.numel() * t.element_size() for t in stored.values())
        weights = sum(n * k for n, k in selection_of(arm).modules.values())
        assert rows["4-bit codes"] * 2 == rows["block scales"] * 16 == weights
        assert "*.safetensors filter=lfs" in (folder / ".gitattributes").read_text()


@pytest.mark.parametrize("exponent", [-20, -3, 0])
def test_a_reciprocal_comes_back_within_one_ulp_and_then_stays(exponent: int) -> None:
    significand = 1 + torch.arange(0, 1 << 23, 977, dtype=torch.int64).double() / (1 << 23)
    scales = (significand * 2.0**exponent).float()
    once = 1.0 / (1.0 / scales)
    steps = (once.view(torch.int32) - scales.view(torch.int32)).abs()
    assert int(steps.max()) == 1
    assert not steps[significand < 2**0.5].any()
    assert torch.equal(1.0 / (1.0 / once), once)


def test_the_recovery_table_is_placed_where_there_is_one(exports: Exports) -> None:
    from export.card import model_card, with_recovery
    from qad.untrusted.safetensors_header import Entry

    opened, entries = open_arm(exports[0]), [Entry("a.weight", "BF16", (4, 4))]
    plain = model_card(opened, MODELOPT, entries)
    table = "| task | recovery |\n|---|---|\n| facts | 95.9 % |"
    assert "Recovery" not in plain
    assert with_recovery(plain, table) == f"{plain}\n## Recovery\n\n{table}\n"
    assert with_recovery(with_recovery(plain, "| old |"), table) == f"{plain}\n## Recovery\n\n{table}\n"
    assert with_recovery("Another's card", table) == "Another's card"


def test_a_recipe_names_the_layout(tiny_llama_dir: Path) -> None:
    from qad.recipes.load import load_recipe

    overrides: list[Any] = ["export.layout=compressed-tensors"]
    assert load_recipe("smollm2-135m", overrides).export.layout == "compressed-tensors"
