"""The plan of a model's scale: parameters and what backward keeps against torch itself, and three models from a config alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronHConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from qad.command.cli import main
from qad.command.planning.scale import (
    GPUS,
    USABLE,
    Shape,
    as_it_fits,
    config_alone,
    config_shape,
    flops,
    need,
    scale_lines,
    utilization,
)
from qad.model.loader import load_skeleton
from qad.numerics.linear import wrap_linears
from qad.recipes.job import prepare
from qad.recipes.load import parse_recipe
from qad.recipes.recipe import Recipe, Train

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "scale.md"
_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_LONG = {"max_position_embeddings": 131072, "tie_word_embeddings": False}
LARGE = {
    "8B dense": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        **_LONG,
    ),
    "30B-A3B hybrid mixture": NemotronHConfig(
        hidden_size=2688,
        layers_block_type=[_BLOCKS[c] for c in _PATTERN],
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=131072,
        intermediate_size=1856,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128,
        num_experts_per_tok=6,
        mamba_num_heads=64,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        **_LONG,
    ),
    "253B dense": LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=78,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        **_LONG,
    ),
}
SIZE = {"8B dense": (8.03e9, 7.50e9), "30B-A3B hybrid mixture": (31.6e9, 3.2e9), "253B dense": (253e9, 251e9)}


def recipe(folder: Path, **train: Any) -> dict[str, Any]:
    settings = {
        "data": "python-docs",
        "tokens": 10**9,
        "seq_len": 8192,
        "batch_size": 256,
        "micro_batch_size": 1,
        "activation_checkpointing": True,
        **train,
    }
    return {"model": str(folder), "dtype": "bfloat16", "calibrate": {"data": "python-docs"}, "train": settings}


def shape_of(config: PreTrainedConfig, folder: Path, **train: Any) -> tuple[Shape, Train]:

    config.save_pretrained(folder)
    asked = Recipe.model_validate(recipe(folder, **train))
    return config_shape(folder, asked)[0], asked.training


@pytest.fixture(scope="module", params=list(LARGE))
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Shape, Train]:
    folder = tmp_path_factory.mktemp("large")
    LARGE[request.param].save_pretrained(folder)
    asked = Recipe.model_validate(recipe(folder))
    return request.param, config_shape(folder, asked)[0], asked.training


# --- against torch ---


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen3Config(**SIZES, tie_word_embeddings=True)], ids=["llama", "qwen3"])
def test_parameters_are_counted_as_torch_counts_them(config: PreTrainedConfig, tmp_path: Path) -> None:
    shape, _ = shape_of(config, tmp_path)
    model: Any = AutoModelForCausalLM.from_config(config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert shape.parameters == shape.trained == sum(p.numel() for p in model.parameters())
    assert (shape.layer, shape.layers, shape.root) == (max(layers), 3, shape.parameters - sum(layers))
    looked_up = 0 if config.tie_word_embeddings else 64 * 96
    assert shape.active == shape.parameters - looked_up


def test_of_a_mixture_a_token_meets_its_experts_alone(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2)
    shape, _ = shape_of(config, tmp_path)
    experts = 3 * 8 * 3 * 48 * 64
    assert shape.experts
    assert shape.active == shape.parameters - 64 * 96 - experts * 6 // 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen3Config(**SIZES)], ids=["llama", "qwen3"])
def test_activations_are_those_that_autograd_saves(config: PreTrainedConfig, dtype: str, tmp_path: Path) -> None:
    shape, train = shape_of(
        config, tmp_path, activation_checkpointing=False, seq_len=64, tokens=640, batch_size=2, micro_batch_size=2
    )
    model: Any = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    wrap_linears(model, {name: (torch.tensor(0.01), "NVFP4") for name in linears})
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.zeros(2, 64, dtype=torch.int64)
        hidden = model.base_model(ids, position_ids=torch.arange(64).expand(2, 64), use_cache=False).last_hidden_state
    found = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert hidden.requires_grad
    planned = need(shape, train, dtype, 1).parts["activations"]
    assert planned == pytest.approx(found, rel=0.15)


# --- from a config alone ---


def test_three_models_have_their_size(large: tuple[str, Shape, Train]) -> None:
    name, shape, _ = large
    assert (shape.parameters, shape.active) == pytest.approx(SIZE[name], rel=0.02)


def test_every_byte_of_a_rank_is_named_and_shrinks_with_ranks(large: tuple[str, Shape, Train]) -> None:
    _, shape, train = large
    needs = [need(shape, train, "bfloat16", ranks) for ranks in (8, 16, 64)]
    for one in needs:
        assert one.total == sum(one.parts.values())
        assert one.parts["masters"] == 4 * shape.parameters / one.ranks
        assert one.parts["moments"] == 2 * one.parts["masters"]
    assert needs[0].total > needs[1].total > needs[2].total
    assert flops(shape, train) >= 8 * shape.active * train.tokens_used


def row(name: str, shape: Shape, train: Train) -> str:
    """A line of the page's table: GB a rank and hours on H200."""
    h200 = next(gpu for gpu in GPUS if gpu.name == "H200")
    cells = []
    for ranks in (8, 32, 256):
        size = need(shape, train, "bfloat16", ranks).total
        hours = flops(shape, train) / (h200.flops * utilization(shape) * ranks) / 3600
        fits = "" if size <= 0.92 * h200.memory else " (does not fit)"
        cells.append(f"{size / 1e9:.3g} GB{fits}, {hours:.2g} h")
    return f"| {name} | {shape.parameters / 1e9:.3g}B / {shape.active / 1e9:.3g}B | {' | '.join(cells)} |"


def test_the_page_holds_what_the_plan_says(large: tuple[str, Shape, Train]) -> None:
    assert row(*large) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("large", ["8B dense"], indirect=True)
def test_the_evening_takes_what_its_page_says(large: tuple[str, Shape, Train]) -> None:
    page = (PAGE.parents[1] / "guides" / "eight-gpus.md").read_text(encoding="utf-8")
    train = parse_recipe(yaml.safe_load(page.partition("```yaml")[2].partition("```")[0]), "page").training
    planned = need(large[1], train, "bfloat16", 8)
    for size in [*planned.parts.values(), planned.total]:
        assert f"{size / 1e9:.3g} GB" in page
    h200 = next(gpu for gpu in GPUS if gpu.name == "H200")
    hours = flops(large[1], train) / (8 * h200.flops * utilization(large[1])) / 3600
    assert f"**{hours:.2g} hours**" in page
    assert f"{train.steps} steps" in page


def test_qad_plan_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LARGE["8B dense"]
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(tmp_path / "model")))
    assert config_alone(tmp_path / "model")
    assert main(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert "config.json alone" in out
    assert "224 Linears are quantized" in out
    assert "8.03B parameters, 7.5B a token, 32 layers" in out
    assert "H100 does not fit on one (80 GB); this would: 4 ranks" in out
    assert "B200 does not fit on one (180 GB); this would: train.optimizer: adamw8bit" in out


def test_what_fits_on_one_says_how_long(tmp_path: Path) -> None:
    shape, train = shape_of(LlamaConfig(**SIZES), tmp_path)
    lines = list(scale_lines(shape, train, "bfloat16"))
    assert sum("fits on one, " in line for line in lines) == len(GPUS)


def test_a_config_that_transformers_does_not_know_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "heron", "architectures": ["HeronForCausalLM"]}')
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(tmp_path)))
    assert main(["plan", str(path)]) == 2
    assert "transformers does not know" in capsys.readouterr().err


def test_a_gpu_that_is_too_small_checkpoints_by_itself(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"model": str(tiny_llama_dir), "calibrate": {"data": "python-docs", "samples": 1, "seq_len": 64}}
    raw["train"] = {"data": "python-docs", "tokens": 2048, "seq_len": 512, "batch_size": 4, "validation_tokens": 512}
    job = prepare(parse_recipe(raw, "recipe"))
    assert as_it_fits(job, print) is job
    on_gpu, train = dataclasses.replace(job, device="cuda", dtype="bfloat16"), job.recipe.training
    shape = Shape.of(load_skeleton(job.source), job.selection, train)
    without = need(shape, train, "bfloat16", 1).total
    for room, expected in ((1.01 * without, None), (0.99 * without, True)):
        memory = SimpleNamespace(total_memory=room / USABLE)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, memory=memory: memory)
        said: list[str] = []
        found = as_it_fits(on_gpu, said.append).recipe.training
        assert found.activation_checkpointing is expected
        assert bool(said) is bool(expected)
    assert need(shape, found, "bfloat16", 1).total < without
    asked = train.model_copy(update={"activation_checkpointing": False})
    kept = dataclasses.replace(on_gpu, recipe=job.recipe.model_copy(update={"train": asked}))
    assert as_it_fits(kept, print) is kept
