"""Exported bytes equal ModelOpt 0.47's own export of the same weights and the same calibration, tensors and metadata.

Nothing of ModelOpt is replaced: `mtq.quantize` calibrates on the CPU (max calibration collects amax with quantization
off), `export_hf_checkpoint` writes. Our arm calibrates on the same batches.

FP8: ModelOpt's own `preprocess_linear_fusion`, which gives q/k/v and gate/up one weight scale, is called here, as its FP8
export leaves it out. Engines quantize members with unequal scales again, and what was trained would change.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from export.arm_of_folder import arm_of_folder
from export.check import check
from export.writer import export_arm
from qad.arms.arm import open_arm, write_arm
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.model.loader import load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.text.windows import Windows
from qad.training.calibrate import calibrate

pytestmark = [
    pytest.mark.exact,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# Of ModelOpt: a preset, and what is added to it. Of ours: arguments of `select`.
_E4M3 = {"num_bits": (4, 3), "axis": None}
FP8_ATTENTION = [
    {"quantizer_name": "*self_attn*weight_quantizer", "cfg": _E4M3},
    {"quantizer_name": "*self_attn*input_quantizer", "cfg": _E4M3},
    {"quantizer_name": "*mlp*input_quantizer", "enable": False},
    {"quantizer_name": "*o_proj*", "enable": False},
]
CONFIGS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "NVFP4": ("NVFP4_DEFAULT_CFG", [], {"format": "NVFP4"}),
    "W4A16_NVFP4": ("W4A16_NVFP4_CFG", [], {"format": "W4A16_NVFP4"}),
    "FP8": ("FP8_DEFAULT_CFG", [], {"format": "FP8"}),
    "MIXED_PRECISION": (
        "NVFP4_DEFAULT_CFG",
        FP8_ATTENTION,
        {"format": "W4A16_NVFP4", "formats": {"*.self_attn.*": "FP8"}, "exclude": ["*.o_proj"]},
    ),
    "head": ("NVFP4_DEFAULT_CFG", [], {"format": "NVFP4", "include": ["*", "lm_head"]}),
}
MODELS = {"llama": 14, "qwen3": 14, "qwen3_moe": 32}  # modules in 4 bits
CASES = [(kind, name, kv) for kind in MODELS for name in ("NVFP4", "W4A16_NVFP4") for kv in ("off", "calibrated")]
CASES += [
    ("llama", "FP8", "off"),
    ("qwen3", "FP8", "calibrated"),
    ("llama", "MIXED_PRECISION", "off"),
    ("qwen3", "MIXED_PRECISION", "calibrated"),
    ("qwen3", "head", "off"),
    ("qwen3", "NVFP4", "nvfp4"),
]
FOUR_BITS = {"FP8": -14, "MIXED_PRECISION": -8, "head": 1}  # more or fewer of them


def windows() -> Windows:
    ids = torch.randint(0, 512, (8, 32), generator=torch.Generator().manual_seed(5))
    return Windows.of(ids, torch.arange(32).expand(8, 32).contiguous())


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def exports(
    request: pytest.FixtureRequest,
    tiny_llama_dir: Path,
    make_qwen3: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("modelopt")
    theirs, ours = root / "theirs", root / "ours"
    kind, name, kv = request.param
    preset, added, arguments = CONFIGS[name]
    folder = tiny_llama_dir if kind == "llama" else make_qwen3(root / "source", kind)
    eager = {"experts_implementation": "eager"} if kind == "qwen3_moe" else {}  # the only one ModelOpt calibrates
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **eager).eval()
    batch = windows()
    config = copy.deepcopy(getattr(mtq, preset))
    config["quant_cfg"] += added
    if name == "head":
        config["quant_cfg"] += [
            {"quantizer_name": f"*lm_head*{quantizer}", "cfg": config["quant_cfg"][1]["cfg"]}
            for quantizer in ("weight_quantizer", "input_quantizer")
        ]
    if kv != "off":
        config["quant_cfg"] += (mtq.NVFP4_KV_CFG if kv == "nvfp4" else mtq.FP8_KV_CFG)["quant_cfg"]
    mtq.quantize(model, config, lambda m: m(batch.input_ids_ST, use_cache=False))
    source = open_checkpoint(folder)
    selection = select(load_skeleton(source), **arguments)
    for group in selection.groups:
        if selection.format_of(group[0]) == "FP8":
            preprocess_linear_fusion([model.get_submodule(module) for module in group])
    export_hf_checkpoint(model, export_dir=theirs)

    policy, facts = ("calibrated", {"kv_format": "NVFP4"}) if kv == "nvfp4" else (kv, {})
    found = calibrate(load_model(source, "bfloat16", "cpu"), selection, batch, kv_cache=policy)
    run_stage(
        "arm",
        root / "arm",
        {},
        {},
        lambda f: write_arm(f, "ptq", source, selection, found.input_scales, kv_scales=found.kv_scales, kv_cache=policy, **facts),
    )
    export_arm(root / "arm", ours)
    return ours, theirs


def test_every_tensor_has_the_same_name_dtype_shape_and_bytes(exports: tuple[Path, Path], request: pytest.FixtureRequest) -> None:
    kind, name, kv = request.node.callspec.params["exports"]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in exports)
    assert ours.keys() == theirs.keys()
    assert sum(n.endswith("weight_scale_2") for n in ours) == MODELS[kind] + FOUR_BITS.get(name, 0)
    assert sum(t.dtype == torch.float8_e4m3fn and n.endswith("weight") for n, t in ours.items()) == {
        "FP8": 14,
        "MIXED_PRECISION": 6,
    }.get(name, 0)
    assert sum(n.endswith((".k_scale", ".v_scale")) for n in ours) == (0 if kv == "off" else 4)
    for tensor_name, tensor in ours.items():
        other = theirs[tensor_name]
        assert tensor.dtype == other.dtype
        assert tensor.shape == other.shape
        same = torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        assert same, tensor_name


def test_an_arm_of_theirs_is_exported_as_theirs(exports: tuple[Path, Path], tmp_path: Path) -> None:
    theirs = exports[1]
    source = open_arm(exports[0].parent / "arm").source.folder
    arm_of_folder(theirs, str(source), "ptq", tmp_path / "arm")
    export_arm(tmp_path / "arm", tmp_path / "again")
    again, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", theirs))
    assert again.keys() == before.keys()
    for name, tensor in again.items():
        assert (tensor.dtype, tensor.shape) == (before[name].dtype, before[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)), name


def without_producer(folder: Path, name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / name).read_text())
    value.pop("producer", None)
    value.get("quantization_config", {}).pop("producer", None)
    return value


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_metadata_is_the_same_but_for_the_producer(exports: tuple[Path, Path], name: str) -> None:
    assert without_producer(exports[0], name) == without_producer(exports[1], name)


def test_the_checker_passes_both(exports: tuple[Path, Path]) -> None:
    for folder in exports:
        assert [f for f in check(folder) if f.severity == "error"] == []
