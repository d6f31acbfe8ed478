"""Exported bytes equal ModelOpt 0.47's own export of the same weights and the same calibration, tensors and metadata.

Nothing of ModelOpt is replaced: `mtq.quantize` calibrates on the CPU (max calibration collects amax with quantization
off), `export_hf_checkpoint` writes. Our arm calibrates on the same batches.
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

from export.check import check
from export.writer import export_arm
from qad.arm import write_arm
from qad.artifact import run_stage
from qad.calibrate import calibrate
from qad.loader import load_model, load_skeleton
from qad.packing import Windows
from qad.selection import select
from qad.source import open_checkpoint

pytestmark = [
    pytest.mark.exact,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CONFIGS = {"NVFP4": "NVFP4_DEFAULT_CFG", "W4A16_NVFP4": "W4A16_NVFP4_CFG"}
MODELS = {"llama": 14, "qwen3": 14, "qwen3_moe": 32}  # packed modules
CASES = [(kind, format, kv) for kind in MODELS for format in CONFIGS for kv in ("off", "calibrated")]


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
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("modelopt")
    theirs, ours = root / "theirs", root / "ours"
    kind, format, kv = request.param
    folder = tiny_llama_dir if kind == "llama" else make_qwen3(root / "source", kind)
    eager = {"experts_implementation": "eager"} if kind == "qwen3_moe" else {}  # the only one ModelOpt calibrates
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **eager).eval()
    batch = windows()
    config = copy.deepcopy(getattr(mtq, CONFIGS[format]))
    if kv != "off":
        config["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
    mtq.quantize(model, config, lambda m: m(batch.input_ids_ST, use_cache=False))
    export_hf_checkpoint(model, export_dir=theirs)

    source = open_checkpoint(folder)
    selection = select(load_skeleton(source), format)
    found = calibrate(load_model(source, "bfloat16", "cpu"), selection, batch, kv_cache=kv)
    run_stage("arm", root / "arm", {}, {}, lambda f: write_arm(
        f, "ptq", source, selection, found.input_scales, kv_scales=found.kv_scales, kv_cache=kv))  # fmt: skip
    export_arm(root / "arm", ours)
    return ours, theirs


def test_every_tensor_has_the_same_name_dtype_shape_and_bytes(
    exports: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    kind, _, kv = request.node.callspec.params["exports"]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in exports)
    assert ours.keys() == theirs.keys()
    assert sum(n.endswith("weight_scale_2") for n in ours) == MODELS[kind]
    assert sum(n.endswith((".k_scale", ".v_scale")) for n in ours) == (4 if kv == "calibrated" else 0)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        same = torch.equal(tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
        assert same, name


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
