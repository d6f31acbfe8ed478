"""FP8, several formats by module, and a quantized head in both layouts: stored, checked, converted, repaired."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.check import check
from export.convert import convert
from export.layouts.config_files import CONFIG, NESTED
from export.layouts.exclude import TrtllmFormats, vllm_format
from export.repair import repair
from export.writer import export_arm
from qad.arms.arm import open_arm
from qad.arms.selection import Selection
from qad.numerics import fp8

LAYOUTS = ["modelopt", "compressed-tensors"]
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"format": "FP8"},
    "mixed": {"format": "NVFP4", "formats": {"*.self_attn.*": "FP8"}},
    "four bits": {"format": "NVFP4", "formats": {"*.mlp.*": "W4A16_NVFP4"}},
    "head": {"format": "NVFP4", "include": ("*", "lm_head")},
    "mixed head": {"format": "FP8", "formats": {"lm_head": "NVFP4"}, "include": ("*", "lm_head"), "exclude": ["*.0.mlp.*"]},
}
Q, UP, DOWN = (f"model.layers.1.{name}_proj" for name in ("self_attn.q", "mlp.up", "mlp.down"))


def build(source: Path, folder: Path, scheme: dict[str, Any], build_arm: Callable[..., Path]) -> Path:
    """An arm in `folder`/arm and its exports in `folder`/LAYOUT."""
    build_arm(source, folder / "arm", **scheme)
    for layout in LAYOUTS:
        export_arm(folder / "arm", folder / layout, layout=layout)
    return folder


@pytest.fixture(scope="module")
def made(
    make_llama: Callable[..., Path], build_arm: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Scheme -> folder of `build`."""
    root = tmp_path_factory.mktemp("schemes")
    source = make_llama(root / "source", tie_word_embeddings=False)
    return {name: build(source, root / name, scheme, build_arm) for name, scheme in SCHEMES.items()}


def selection_of(folder: Path) -> Selection:
    selection = open_arm(folder / "arm").selection
    assert selection is not None
    return selection


def as_bytes(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    tensors = load_file(folder / "model.safetensors")
    return {n: (t.dtype, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_checker_passes_it_alone_and_against_its_arm(made: dict[str, Path], scheme: str, layout: str) -> None:
    folder = made[scheme]
    assert check(folder / layout) == []
    assert check(folder / layout, source=folder / "arm") == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_is_stored_the_same_in_both_layouts(made: dict[str, Path], scheme: str) -> None:
    """Values and decode scales; only the shape of a scalar differs."""
    selection, (ours, theirs) = selection_of(made[scheme]), (as_bytes(made[scheme] / layout) for layout in LAYOUTS)
    eight = [module for module in selection.modules if selection.format_of(module) == "FP8"]
    for module in eight:
        for leaf in ("weight", "weight_scale", "input_scale"):
            assert ours[f"{module}.{leaf}"] == theirs[f"{module}.{leaf}"]
        assert f"{module}.weight_packed" not in theirs
    assert sum(dtype == torch.float8_e4m3fn and n.endswith(".weight") for n, (dtype, _) in ours.items()) == len(eight)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_conversion_is_the_export_in_that_layout(made: dict[str, Path], scheme: str, layout: str, tmp_path: Path) -> None:
    other = next(name for name in LAYOUTS if name != layout)
    convert(made[scheme] / other, layout, tmp_path / "out")
    converted, exported = as_bytes(tmp_path / "out"), as_bytes(made[scheme] / layout)
    assert converted.keys() == exported.keys()
    different = {name.rpartition(".")[2] for name in converted if converted[name] != exported[name]}
    assert different <= {"weight_scale_2", "input_scale"}  # reciprocals of 4-bit modules: one ulp
    assert (different == set()) or (layout == "modelopt" and scheme != "fp8")
    assert config_of(tmp_path / "out") == config_of(made[scheme] / layout)
    nested = [
        json.loads((folder / NESTED).read_text())
        for folder in (tmp_path / "out", made[scheme] / layout)
        if (folder / NESTED).exists()
    ]
    assert len(nested) == (2 if layout == "modelopt" else 0)
    assert nested[:1] == nested[1:]


def test_the_card_says_what_is_in_which_format(made: dict[str, Path]) -> None:
    card = (made["mixed"] / "modelopt" / "README.md").read_text()
    assert "- nvfp4\n- fp8\n" in card
    assert "algorithm: MIXED_PRECISION" in card
    stored = load_file(made["mixed"] / "modelopt" / "model.safetensors")
    eight = sum(t.numel() for n, t in stored.items() if t.dtype == torch.float8_e4m3fn and n.endswith(".weight"))
    assert f"| 8-bit weights | {eight:,} |" in card
    assert f"8 Linears, {eight:,} weights in FP8" in card


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["fp8", "mixed", "head"])
def test_the_library_opens_the_other_layout_with_the_same_values(made: dict[str, Path], scheme: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import AutoModelForCausalLM

    folder, selection = made[scheme] / "compressed-tensors", selection_of(made[scheme])
    read = QuantizationConfig.model_validate(config_of(folder))
    assert {str(group.format) for group in read.config_groups.values()} == {
        "float-quantized" if selection.format_of(module) == "FP8" else "nvfp4-pack-quantized" for module in selection.modules
    }
    stored = load_file(folder / "model.safetensors")
    packed, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = packed.state_dict()
    for name in stored:
        if name.rpartition(".")[0] in selection.modules and stored[name].dtype != torch.float32:
            assert state[name].dtype == stored[name].dtype
            assert torch.equal(state[name].view(torch.uint8), stored[name].view(torch.uint8))
    with torch.no_grad():
        packed(torch.arange(8)[None])  # decompresses; at loading the library can decompress one format only
    for module in (name for name in selection.modules if selection.format_of(name) == "FP8"):
        expected = fp8.dequantize(fp8.Fp8Tensor(stored[f"{module}.weight"], stored[f"{module}.weight_scale"][0]))
        weight = packed.get_parameter(f"{module}.weight").detach().float()
        assert torch.allclose(weight, expected, rtol=2**-7, atol=0)  # the library multiplies in BF16


# --- what is refused ---


def damaged(
    folder: Path,
    to: Path,
    tensors: Callable[[dict[str, torch.Tensor]], object] | None = None,
    outer: Callable[[dict[str, Any]], object] | None = None,
    both: bool = True,
) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("qad_manifest.json"))
    if tensors:
        loaded = {name: tensor.clone() for name, tensor in load_file(to / "model.safetensors").items()}
        tensors(loaded)
        save_file(loaded, to / "model.safetensors", metadata={"format": "pt"})
    for path, key in ((to / CONFIG, "quantization_config"), (to / NESTED, "quantization")):
        if outer and path.is_file() and (both or path.name == CONFIG):
            value = json.loads(path.read_text())
            outer(value[key])
            path.write_text(json.dumps(value))
    return to


def relist(module: str, algorithm: str | None) -> Callable[[dict[str, Any]], object]:
    def change(quantization: dict[str, Any]) -> None:
        layers = quantization["quantized_layers"]
        if algorithm is None:
            layers.pop(module)
        else:
            layers[module] = {"quant_algo": algorithm, **({} if algorithm == "FP8" else {"group_size": 16})}

    return change


def first(module: str, algorithm: str) -> Callable[[dict[str, Any]], object]:
    """A key that is no module of the model, in front of all others."""

    def change(quantization: dict[str, Any]) -> None:
        quantization["quantized_layers"] = {module: {"quant_algo": algorithm}, **quantization["quantized_layers"]}

    return change


NAN = torch.full((64, 64), float("nan")).to(torch.float8_e4m3fn)
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unlisted": ("E7", Q, {"outer": relist(Q, None)}),
    "listed as NVFP4": ("E3", Q, {"outer": relist(Q, "NVFP4")}),
    "fused members differ": ("E6", Q, {"outer": relist(Q, "NVFP4")}),
    "listed as FP8": ("E3", DOWN, {"outer": relist(DOWN, "FP8")}),
    "unknown algorithm": ("E2", UP, {"outer": relist(UP, "NVFP5")}),
    "one place only": ("E1", Q, {"outer": relist(Q, None), "both": False}),
    "another key is found first": ("E7", DOWN, {"outer": first(f"mtp.{DOWN}", "FP8")}),
    "no group size": (
        "E1",
        f"config.json quantized_layers {UP}",
        {"outer": lambda q: q["quantized_layers"][UP].pop("group_size")},
    ),
    "no layers": ("E2", CONFIG, {"outer": lambda q: q.pop("quantized_layers")}),
    "in another group": (
        "E1",
        Q,
        {"outer": lambda q: "config_groups" in q and q["config_groups"]["group_1"]["targets"].append(Q)},
    ),
    "eight bits said to be four": (
        "E1",
        CONFIG,
        {"outer": lambda q: "config_groups" in q and q["config_groups"]["group_0"]["weights"].update(num_bits=4)},
    ),
    "BF16 head listed": ("E7", "lm_head", {"outer": relist("lm_head", "FP8")}),
    "NaN value": ("E4", Q, {"tensors": lambda t: t.update({f"{Q}.weight": NAN})}),
    "no weight scale": ("E3", Q, {"tensors": lambda t: t.pop(f"{Q}.weight_scale")}),
    "no input scale": ("E3", Q, {"tensors": lambda t: t.pop(f"{Q}.input_scale")}),
    "negative scale": ("E3", Q, {"tensors": lambda t: t[f"{Q}.weight_scale"].neg_()}),
    "reciprocal scale": ("E3", Q, {"tensors": lambda t: t[f"{Q}.weight_scale"].reciprocal_()}),
    "scale per row": ("E3", Q, {"tensors": lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 1)})}),
    "a second scale": ("E3", Q, {"tensors": lambda t: t.update({f"{Q}.weight_scale_2": torch.tensor(1.0)})}),
    "half the values": ("E3", Q, {"tensors": lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, ::2].contiguous()})}),
    "values as bytes": ("E3", Q, {"tensors": lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].view(torch.uint8)})}),
    "BF16 values": ("E3", Q, {"tensors": lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].bfloat16()})}),
    "another input scale": ("E6", Q, {"tensors": lambda t: t[f"{Q}.input_scale"].mul_(2)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mixed_folder_that_is_broken_is_refused(made: dict[str, Path], fault: str, tmp_path: Path) -> None:
    rule, module, how = FAULTS[fault]
    errors = [f for f in check(damaged(made["mixed"] / "modelopt", tmp_path / "x", **how)) if f.severity == "error"]
    assert any(f.rule == rule and module in f.module for f in errors), errors


def test_an_fp8_scale_of_another_arm_is_told_apart(made: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(made["fp8"] / "modelopt", tmp_path / "x", lambda t: t[f"{DOWN}.weight_scale"].mul_(1.5))
    assert check(folder) == []
    assert [(f.rule, f.severity, f.module) for f in check(folder, source=made["fp8"] / "arm")] == [("W3", "error", DOWN)]


def test_unequal_fp8_weight_scales_are_a_warning(made: dict[str, Path], tmp_path: Path) -> None:
    """ModelOpt writes them; engines quantize again with the largest."""
    folder = damaged(made["fp8"] / "modelopt", tmp_path / "x", lambda t: t[f"{Q}.weight_scale"].mul_(0.5))
    assert [(f.rule, f.severity) for f in check(folder)] == [("E6", "warning")]


def test_nvfp4_without_input_activations_is_weight_only(made: dict[str, Path], tmp_path: Path) -> None:
    def drop_inputs(t: dict[str, torch.Tensor]) -> None:
        for name in [name for name in t if name.endswith("input_scale")]:
            del t[name]

    def null(quantization: dict[str, Any]) -> None:
        if "config_groups" in quantization:
            quantization["config_groups"]["group_0"]["input_activations"] = None

    folder = damaged(made["head"] / "modelopt", tmp_path / "x", drop_inputs, null)
    assert [(f.rule, f.severity, f.engine) for f in check(folder)] == [("E2", "warning", "trtllm")]
    assert check(folder, engine="vllm") == []
    with_scales = damaged(made["head"] / "modelopt", tmp_path / "y", None, null)
    assert {f.rule for f in check(with_scales) if f.severity == "error"} == {"E3"}


def test_a_quantized_head_is_held_against_the_exclude_list_both_ways(made: dict[str, Path], tmp_path: Path) -> None:
    def exclude(quantization: dict[str, Any]) -> None:
        for key in ("ignore", "exclude_modules"):
            if key in quantization:
                quantization[key].append("lm_head")

    for layout in LAYOUTS:
        listed = damaged(made["head"] / layout, tmp_path / f"listed {layout}", outer=exclude)
        assert {f.rule for f in check(listed) if f.module == "lm_head" and f.severity == "error"} == {"E7", "E8"}

    def decode(t: dict[str, torch.Tensor]) -> None:
        for name in [name for name in t if name.startswith("lm_head.")]:
            del t[name]
        t["lm_head.weight"] = torch.ones(512, 64).bfloat16()

    plain = damaged(made["head"] / "modelopt", tmp_path / "plain", decode)
    assert {(f.rule, f.module) for f in check(plain) if f.severity == "error"} == {("E7", "lm_head")}
    untargeted = damaged(
        made["head"] / "compressed-tensors",
        tmp_path / "untargeted",
        outer=lambda q: q["config_groups"]["group_0"].update(targets=["Linear"]),
    )
    assert [(f.rule, f.module, f.engine) for f in check(untargeted)] == [("E7", "lm_head", "vllm")]
    tied = tmp_path / "tied"
    shutil.copytree(made["head"] / "modelopt", tied)
    config = json.loads((tied / CONFIG).read_text())
    (tied / CONFIG).write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "E8" in {f.rule for f in check(tied) if f.severity == "error"}


# --- repair ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_metadata_are_repaired_from_the_tensors(made: dict[str, Path], scheme: str, layout: str, tmp_path: Path) -> None:
    def wrong_numbers(quantization: dict[str, Any]) -> None:
        for group in quantization.get("config_groups", {}).values():
            group["weights"]["num_bits"] = 7

    def unlisted(quantization: dict[str, Any]) -> None:
        wrong_numbers(quantization)
        for key in ("ignore", "exclude_modules"):
            if key in quantization:
                quantization[key] = []
        if scheme in ("mixed", "mixed head") and layout == "modelopt":
            quantization["quantized_layers"].pop(Q)

    repair(damaged(made[scheme] / layout, tmp_path / "x", outer=unlisted), tmp_path / "out")
    assert [f for f in check(tmp_path / "out") if f.severity == "error"] == []
    assert config_of(tmp_path / "out") == config_of(made[scheme] / layout)


def test_a_lost_input_scale_is_never_repaired_into_weight_only(made: dict[str, Path], tmp_path: Path) -> None:
    from qad.errors import BrokenCheckpointError

    broken = damaged(made["mixed"] / "modelopt", tmp_path / "x", lambda t: t.pop(f"{DOWN}.input_scale"))
    with pytest.raises(BrokenCheckpointError):
        repair(broken, tmp_path / "out")


# --- engines' rules ---

LISTED = {Q: "FP8", Q.replace("q_proj", "k_proj"): "FP8", Q.replace("q_proj", "v_proj"): "FP8", DOWN: "NVFP4"}


def test_vllm_finds_a_module_by_name_then_by_its_fused_members_then_by_what_lies_below() -> None:
    assert vllm_format(Q, LISTED, []) == "FP8"
    assert vllm_format(Q, {Q: "FP8"}, []) == "FP8"
    assert vllm_format(UP, LISTED, []) is None
    assert vllm_format(DOWN, LISTED, [DOWN]) is None
    expert = "model.layers.1.mlp.experts.3.up_proj"
    assert vllm_format(expert, {expert.replace("3", "0"): "NVFP4"}, []) == "NVFP4"
    with pytest.raises(ValueError, match="different algorithms"):
        vllm_format(Q, {**LISTED, Q: "NVFP4"}, [])


def test_tensorrt_llm_takes_the_first_key_that_contains_the_name() -> None:
    assert TrtllmFormats(LISTED).of(Q.replace("q_proj", "v_proj")) == "FP8"
    assert TrtllmFormats({f"mtp.{DOWN}": "FP8", **LISTED}).of(DOWN) == "FP8"
    assert TrtllmFormats(LISTED).of("lm_head") is None
    assert TrtllmFormats({"model.layers.1.mlp.gate_proj": "FP8"}).of("model.layers.1.mlp.gate") == "FP8"
    assert TrtllmFormats({DOWN: "A", f"{DOWN}.x": "B"}).of(f"{DOWN}.x") == "B"
