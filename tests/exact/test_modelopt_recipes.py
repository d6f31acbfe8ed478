"""ModelOpt's own recipes: read as a section of ours they give ModelOpt's bits, and every one is read or refused with a reason."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import config_of

from export.check import check
from export.writer import export_arm
from qad.arms.selection import select
from qad.command.run import ptq_arm_by
from qad.errors import UsageError
from qad.model.experts import split_experts
from qad.model.loader import auto_class
from qad.recipes.job import prepare
from qad.recipes.load import load_recipe
from qad.recipes.modelopt import read_recipe, recipe_names, translated
from qad.recipes.recipe import Quantize

pytestmark = pytest.mark.exact

FAMILIES = ("Llama", "Qwen3-MoE", "Nemotron-H dense", "Qwen3-VL", "DeepSeek-V3")
READ = {"Llama": 36, "Qwen3-MoE": 50, "Nemotron-H dense": 36, "Qwen3-VL": 30, "DeepSeek-V3": 45}  # at least so many of 150
TEXT = ["calibrate.samples=8", "calibrate.seq_len=32", "calibrate.data=python-docs", "dtype=bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_recipe_is_read_or_refused_with_its_reason(family: str) -> None:
    """What is read selects without a word: every glob takes a module."""
    config = config_of(family)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    split_experts(model)
    read, refused = 0, {}
    for name in recipe_names():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                section = translated(Quantize(recipe=f"modelopt:{name}"), model)
        except UsageError as error:
            refused[name] = str(error)
        else:
            read += 1
            selection = select(model, section.format, section.include, section.exclude, section.formats)
            assert selection.modules
            assert section.recipe is None
    assert read >= READ[family]
    for name, told in refused.items():
        assert told.startswith(f"quantize.recipe modelopt:{name} cannot be read: ")
        assert len(told.partition("cannot be read: ")[2]) > 20


def test_imports_are_resolved_as_modelopt_resolves_them() -> None:
    from modelopt.recipe import load_recipe as theirs

    names = [name for name in recipe_names() if name.startswith("general/ptq")]
    assert len(names) > 20
    for name in names:
        expected = theirs(name).quantize.model_dump()["quant_cfg"]
        ours = read_recipe(f"modelopt:{name}")["quantize"]["quant_cfg"]
        assert [entry["quantizer_name"] for entry in ours] == [entry["quantizer_name"] for entry in expected]
        assert [entry.get("enable", True) for entry in ours] == [entry["enable"] for entry in expected]


@pytest.fixture(scope="module")
def sources(make_llama: Callable[..., Path], make_qwen3: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("sources")
    return {"llama": make_llama(root / "llama", tie_word_embeddings=False), "qwen3_moe": make_qwen3(root / "moe", "qwen3_moe")}


CASES = [
    ("llama", "general/ptq/nvfp4_default-kv_fp8"),
    ("llama", "general/ptq/nvfp4_weight_only-kv_fp16"),
    ("llama", "general/ptq/nvfp4_mlp_only-kv_fp8_cast"),
    ("llama", "configs/ptq/presets/model/fp8"),
    ("qwen3_moe", "general/ptq/nvfp4_experts_only-kv_fp8"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}-{name.rpartition('/')[2]}" for kind, name in CASES])
def test_a_recipe_gives_the_bits_of_modelopt(kind: str, name: str, sources: Any, tmp_path: Path) -> None:
    """By this tool, by `quantize.by: modelopt`, and by ModelOpt's own loader of recipes: one checkpoint."""
    asked = [f"model={sources[kind]}", *TEXT]
    for by in ("qad", "modelopt"):
        job = prepare(load_recipe(f"modelopt:{name}", [*asked, f"quantize.by={by}"]))
        assert job.recipe.quantize.recipe is None
        ptq_arm_by(job, tmp_path / by / "ptq")
        export_arm(tmp_path / by / "ptq", tmp_path / by / "out")
    ours, kept = (load_file(tmp_path / by / "out" / "model.safetensors") for by in ("qad", "modelopt"))
    theirs = load_file(_by_modelopt(job, name, tmp_path / "theirs") / "model.safetensors")
    assert ours.keys() == kept.keys() == theirs.keys()
    fused = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
    for tensor, value in theirs.items():
        assert _same(value, kept[tensor]), tensor
        if job.selection.algorithm != "FP8" or not any(part in tensor for part in fused):  # FP8: fused members share a scale here
            assert _same(value, ours[tensor]), tensor
    config = json.loads((tmp_path / "qad" / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == job.selection.algorithm
    assert [f for f in check(tmp_path / "modelopt" / "out") if f.severity == "error"] == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="ModelOpt can do it here")
def test_frozen_scales_by_modelopt_need_triton(sources: Any, tmp_path: Path) -> None:
    job = prepare(load_recipe("smollm2-135m", [f"model={sources['llama']}", *TEXT, "quantize.by=modelopt"]))
    with pytest.raises(UsageError, match="leave train out"):
        ptq_arm_by(job, tmp_path / "ptq")
    recipe = job.recipe.model_copy(update={"train": None})
    with pytest.raises(UsageError, match="needs triton for mse scales"):
        ptq_arm_by(dataclasses.replace(job, recipe=recipe), tmp_path / "ptq")


def _by_modelopt(job: Any, name: str, out: Path) -> Path:
    import modelopt.torch.quantization as mtq
    from modelopt.recipe import load_config, load_recipe
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    eager = {"experts_implementation": "eager"} if "moe" in str(job.source.folder) else {}
    model = AutoModelForCausalLM.from_pretrained(job.source.folder, dtype=torch.bfloat16, **eager).eval()
    config = load_config(name) if name.startswith("configs") else load_recipe(name).quantize.model_dump()
    windows = job.calibration_windows()

    def forward(quantized: Any) -> None:
        for batch in windows.batches(8):
            quantized(batch.input_ids_ST, position_ids=batch.position_ids_ST, use_cache=False)

    with torch.no_grad():
        mtq.quantize(model, config, forward)
        export_hf_checkpoint(model, export_dir=out)
    return out


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_what_a_recipe_decides_is_not_decided_twice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="recipe decides balance, format, plain, scales"):
        load_recipe("smollm2-135m", ["quantize.recipe=modelopt:general/ptq/nvfp4_default-kv_fp8"])
    with pytest.raises(UsageError, match="rounding and search are this tool's own"):
        load_recipe("smollm2-135m", ["quantize.by=modelopt", "quantize.rounding=gptq"])
    with pytest.raises(UsageError, match=r"no such recipe; did you mean general/ptq/nvfp4_default-kv_fp8"):
        load_recipe("modelopt:nvfp4_default-kv_fp8")
