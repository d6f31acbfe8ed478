"""The real vLLM, on this CPU, on tiny checkpoints: its log-probabilities are those of the torch reference.

One process of vLLM opens all folders, one after the other: starting it takes longer than all it computes here.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ptq_export import export_ptq
from safetensors import safe_open
from safetensors.torch import save_file

from export.convert import convert
from harness.engines import transformers, vllm_scores
from harness.engines.vllm_child import Job
from harness.engines.vllm_scores import Scores
from harness.measure.parity import compared, plain_cache
from harness.parity import rules as parity
from harness.records.record import ParityData
from qad.command.cli import main

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:the checkpoint has a quantized KV cache")]

PROMPTS = [[(seed * 37 + place * 101) % 500 + 3 for place in range(16)] for seed in range(2)]
NEW = 16
LONG = [(place * 89) % 500 + 3 for place in range(200)]
HOLDS = (
    "llama_w4a4",
    "llama_w4a4_ct",
    "llama_w4a16",
    "llama_w4a16_ct",
    "llama_null_activations",
    "llama_fp8_kv",
    "llama_mixed",
    "qwen3_moe_w4a4",
    "qwen3_moe_w4a4_ct",
    "qwen3_moe_w4a16",
    "mixtral_w4a4",
    "mixtral_w4a16_ct",
    "qwen3_moe_fp8_experts",
    "qwen3_moe_fp8_experts_ct",
)
MIXED = {"*.down_proj": "FP8", "*.0.mlp.*": "W4A16_NVFP4"}
O_PROJ = "model.layers.1.self_attn.o_proj"


def scaled(folder: Path, out: Path, name: str, factor: float) -> Path:
    """A copy in which one scale is another."""
    shutil.copytree(folder, out)
    file = out / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
        metadata = opened.metadata()
    tensors[name] = tensors[name] * factor
    save_file(tensors, file, metadata=metadata)
    return out


def null_activations(folder: Path, out: Path) -> Path:
    """W4A16 as some exporters declare it: NVFP4, whose activations have no scheme."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "NVFP4"
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (out / "config.json").write_text(json.dumps(config))
    for name in ("hf_quant_config.json", "qad_manifest.json"):  # another exporter's folder
        (out / name).unlink()
    return out


@pytest.fixture(scope="module")
def folders(
    make_llama: Callable[..., Path], make_qwen3: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    llama = make_llama(root / "llama", **heads)
    found = {
        "llama_w4a4": export_ptq(llama, root / "llama_w4a4", "NVFP4"),
        "llama_w4a16": export_ptq(llama, root / "llama_w4a16", "W4A16_NVFP4"),
        "llama_mixed": export_ptq(llama, root / "llama_mixed", "NVFP4", formats=MIXED),
        "llama_fp8_kv": export_ptq(llama, root / "llama_fp8_kv", "NVFP4", kv_cache="calibrated"),
    }
    for kind in ("qwen3_moe", "mixtral"):
        moe = make_qwen3(root / kind, kind, head_dim=32, **heads)
        found[f"{kind}_w4a4"] = export_ptq(moe, root / f"{kind}_w4a4", "NVFP4")
        found[f"{kind}_w4a16"] = export_ptq(moe, root / f"{kind}_w4a16", "W4A16_NVFP4")
        if kind == "qwen3_moe":
            found[f"{kind}_fp8_experts"] = export_ptq(moe, root / f"{kind}_fp8_experts", "NVFP4", formats={"*.experts.*": "FP8"})
    for name in ("llama_w4a4", "llama_w4a16", "qwen3_moe_w4a4", "qwen3_moe_fp8_experts", "mixtral_w4a16"):
        found[f"{name}_ct"] = convert(found[name], "compressed-tensors", root / f"{name}_ct").path
    found["llama_null_activations"] = null_activations(found["llama_w4a16"], root / "null_activations")
    damaged = {"k_scale": ("model.layers.0.self_attn.k_proj.weight_scale_2", 1.5), "o_input": (f"{O_PROJ}.input_scale", 3.0)}
    for name, (tensor, factor) in damaged.items():
        found[name] = scaled(found["llama_w4a4"], root / name, tensor, factor)
    return found


@dataclasses.dataclass(frozen=True)
class Reference:
    """loaded: what `compared` takes; inputs, outputs: of every layer, on the first prompt."""

    loaded: transformers.LoadedModel
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    """Of what the engine opens in another form, the reference reads the form it knows."""
    source = {"llama_null_activations": "llama_w4a16", "o_input": "llama_w4a4"}
    found = {}
    for name in folders:
        other = source.get(name, name.removesuffix("_ct"))
        if other not in found:
            loaded = transformers.load(folders[other], "float32", "cpu")
            found[other] = Reference(loaded, *parity.layer_inputs(loaded.model, PROMPTS[0]))
        found[name] = found[other]
    return found


@pytest.fixture(scope="module")
def answers(
    folders: dict[str, Path], references: dict[str, Reference], vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Scores]:
    out = tmp_path_factory.mktemp("answers")

    def job(name: str, prompts: list[list[int]], dtype: str = "float32") -> Job:
        return vllm_scores.job(
            folders[name],
            out / f"{name}-{dtype}-{len(prompts)}.safetensors",
            prompts,
            new_tokens=NEW,
            dtype=dtype,
            layers=references[name].inputs,
            overrides=plain_cache(folders[name]),
        )

    jobs = {name: job(name, PROMPTS) for name in folders}
    jobs["long"] = job("llama_w4a4", [LONG])
    jobs["bfloat16"] = job("llama_w4a4", PROMPTS, "bfloat16")
    jobs["moe bfloat16"] = job("qwen3_moe_w4a4", PROMPTS, "bfloat16")
    return dict(zip(jobs, vllm_scores.ask(vllm_python, list(jobs.values()), out), strict=True))


def verdict(name: str, folders: dict[str, Path], references: dict[str, Reference], answers: dict[str, Scores]) -> ParityData:
    reference = references[name]
    return compared(folders[name], reference.loaded, PROMPTS, reference.outputs, answers[name])


@pytest.mark.parametrize("name", HOLDS)
def test_the_engine_computes_what_the_folder_says(
    name: str, folders: dict[str, Path], references: dict[str, Reference], answers: dict[str, Scores]
) -> None:
    data = verdict(name, folders, references, answers)
    assert data.failures == []
    assert all(one.max_difference is not None and one.max_difference < 1e-4 for one in data.prompts)
    assert all(one.tokens_equal == one.output_tokens == NEW for one in data.prompts)
    dense = [module for module in references[name].outputs if ".experts." not in module]
    assert sorted(layer.module for layer in data.layers) == sorted(dense)
    assert len(dense) >= 8


def test_both_layouts_give_the_same_numbers(answers: dict[str, Scores]) -> None:
    for name in ("llama_w4a16", "llama_w4a4"):
        for one, other in zip(answers[name].log_probs, answers[f"{name}_ct"].log_probs, strict=True):
            assert (one - other).abs().max() < 1e-5


def test_activations_are_quantized_where_the_folder_says_so_and_only_there(answers: dict[str, Scores]) -> None:
    distance = (answers["llama_w4a4"].log_probs[0][:15] - answers["llama_w4a16"].log_probs[0][:15]).abs().max()
    assert distance > 0.01


def test_unequal_scales_in_a_fused_gemm_are_found_and_named(
    folders: dict[str, Path], references: dict[str, Reference], answers: dict[str, Scores]
) -> None:
    failures = verdict("k_scale", folders, references, answers).failures
    assert any("self_attn.q_proj and its siblings have unequal global scales" in line for line in failures)
    assert sum("its inputs part from the reference's at model.layers.0" in line for line in failures) == len(PROMPTS)
    assert any(line.startswith("model.layers.0.self_attn.q_proj:") for line in failures)
    assert not any(line.startswith("model.layers.1") for line in failures)


def test_an_input_scale_that_is_not_the_references_is_found_in_its_layer(
    folders: dict[str, Path], references: dict[str, Reference], answers: dict[str, Scores]
) -> None:
    data = verdict("o_input", folders, references, answers)
    assert [line.partition(":")[0] for line in data.failures if line.startswith("model.layers")] == [O_PROJ]
    assert any("was changed after it was exported" in line for line in data.failures)


def test_a_long_sequence_holds_as_well(
    folders: dict[str, Path], references: dict[str, Reference], answers: dict[str, Scores]
) -> None:
    reference = references["llama_w4a4"]
    data = compared(folders["llama_w4a4"], reference.loaded, [LONG], reference.outputs, answers["long"])
    assert data.failures == []
    assert data.prompts[0].input_tokens == len(LONG)
    assert parity.agrees(data.prompts[0])


@pytest.mark.parametrize(("answer", "name"), [("bfloat16", "llama_w4a4"), ("moe bfloat16", "qwen3_moe_w4a4")])
def test_bfloat16_serves_close_to_the_fp32_reference(
    answer: str, name: str, references: dict[str, Reference], answers: dict[str, Scores]
) -> None:
    for prompt, tokens, log_probs in zip(PROMPTS, answers[answer].tokens, answers[answer].log_probs, strict=True):
        expected = parity.log_probs(references[name].loaded.model, prompt, tokens)
        distance = parity.compare_prompt(prompt, tokens, log_probs, expected).mean_kl
        assert distance is not None
        assert 1e-6 < distance < 0.05  # rounding to BF16 moves FP4 codes


def test_the_log_names_the_kernel_and_says_that_it_emulates(answers: dict[str, Scores]) -> None:
    lines = answers["llama_w4a4"].kernels
    assert "Using CpuNvFp4LinearKernel for NVFP4 GEMM" in lines
    assert any("NVFP4 is emulated on this CPU" in line for line in lines)
    assert any("'EMULATION' NvFp4 MoE backend" in line for line in lines)
    assert answers["llama_w4a4"].device == "cpu"


@pytest.mark.slow
def test_the_command_with_a_compiled_model(
    folders: dict[str, Path], vllm_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--python", str(vllm_python), "--out", str(tmp_path / "parity.json"), "--compile"]
    assert main(["measure", "parity", str(folders["llama_w4a4"]), *options]) == 0
    assert "parity holds: 4 of 4 prompts agree" in capsys.readouterr().out
    record = json.loads((tmp_path / "parity.json").read_text())
    assert record["engine"]["emulated"]
    assert record["engine"]["kernel_path"].startswith("CpuNvFp4LinearKernel")
    assert record["engine"]["version"].startswith("0.32")
