"""Sources whose files say less, or more, than others: what a model is, is asked of the built config and of the tensors."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import qad.hf  # noqa: F401  (registers the loader)
from export.check import check
from export.writer import export_arm
from qad.arms.arm import open_arm
from qad.command.cli import main
from qad.errors import SourceError
from qad.model.built_config import ties_embeddings
from qad.model.loader import load_model
from qad.model.source import open_checkpoint
from qad.training.student import Student

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def train(model: Path, folder: Path) -> Path:
    """A QAD arm of a few steps; the folder exported from it."""
    lines = "\n\n".join(f"document {n}: " + " ".join(f"word{i % 7} of {n}" for i in range(30)) for n in range(60))
    (folder / "text.txt").write_text(lines)
    data = str(folder / "text.txt")
    recipe = {
        "model": str(model),
        "dtype": "float32",
        "calibrate": {"data": data, "samples": 4, "seq_len": 32},
        "train": {"data": data, "tokens": 256, "seq_len": 32, "batch_size": 2, "lr": 1e-3, "validation_tokens": 64},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "qad")]) == 0
        export_arm(folder / "qad", folder / "out")
    return folder / "out"


def require_equal_student(folder: Path) -> None:
    """The trained student and the reloaded export give the same bits."""
    arm = open_arm(folder / "qad")
    student = Student(arm, load_model(arm.source, "float32", "cpu")).model
    reloaded: Any = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(student(ids).logits, reloaded(ids).logits)


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [
        ("llama", False),
        ("gemma3_text", True),
        ("gemma2", True),
        ("cohere", True),
        ("opt", True),
        ("qwen3", False),
        ("nobody", False),
    ],
)
def test_what_a_config_leaves_to_its_class_is_asked_of_the_class(model_type: str, tied: bool) -> None:
    assert ties_embeddings({"model_type": model_type}) is tied
    assert ties_embeddings({"model_type": model_type, "tie_word_embeddings": not tied}) is not tied


def test_the_class_is_asked_for_every_architecture() -> None:
    """Whatever class transformers has: the answer is its own."""
    asked = 0
    for model_type in (
        "bloom",
        "falcon",
        "gpt2",
        "gpt_neox",
        "granite",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "smollm3",
        "starcoder2",
    ):
        asked += 1
        built = CONFIG_MAPPING[model_type]()
        assert ties_embeddings({"model_type": model_type}) is bool(built.tie_word_embeddings), model_type
    assert asked == 11


def save_gemma(folder: Path, tokenizer_of: Path) -> Path:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 64,
    }
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer_of / name).read_bytes())
    edit(folder, lambda config: config.pop("tie_word_embeddings", None))
    return folder


def test_a_sparse_config_exports_no_head_beside_the_trained_embedding(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = save_gemma(tmp_path / "model", tiny_llama_dir)
    rewrite(model, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    out = train(model, tmp_path)
    assert HEAD not in load_file(out / "model.safetensors")
    require_equal_student(tmp_path)


def test_a_sparse_config_with_another_head_is_refused_like_an_explicit_one(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = save_gemma(tmp_path / "model", tiny_llama_dir)
    rewrite(model, lambda t: t.update({HEAD: 2 * t[EMBEDDING]}))
    with pytest.raises(SourceError, match=re.escape(f"tied, but {HEAD} differs from {EMBEDDING}")):
        open_checkpoint(model)


def test_of_a_tied_pair_the_file_may_hold_the_head(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """What safetensors' save_model writes: the alias that is left is the embedding."""
    model = make_llama(tmp_path / "model")
    rewrite(model, lambda t: t.update({HEAD: t.pop(EMBEDDING)}))
    source = open_checkpoint(model)
    assert EMBEDDING in source.tensors
    assert HEAD not in source.tensors
    out = train(model, tmp_path)
    stored = load_file(out / "model.safetensors")
    assert EMBEDDING in stored
    assert HEAD not in stored
    assert check(out, source=tmp_path / "qad") == []
    require_equal_student(tmp_path)


@pytest.mark.parametrize("leaf", ["weight_scale_inv", "weight_scale", "input_scale"])
def test_scales_left_beside_unquantized_weights_are_refused_at_once(
    make_llama: Callable[..., Path], tmp_path: Path, leaf: str
) -> None:
    model = make_llama(tmp_path / "model")
    rewrite(model, lambda t: t.update({f"model.layers.0.mlp.up_proj.{leaf}": torch.full((1, 1), 0.01)}))
    with pytest.raises(SourceError, match=f"up_proj.{leaf}, a scale beside unquantized weights"):
        open_checkpoint(model)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_an_export_says_the_dtype_that_its_tensors_have(
    make_llama: Callable[..., Path], tmp_path: Path, dtype: str, key: str
) -> None:
    model = make_llama(tmp_path / "model")
    rewrite(model, lambda t: t.update({name: tensor.to(getattr(torch, dtype)) for name, tensor in t.items()}))

    def say(config: dict[str, Any]) -> None:
        config.pop("dtype", None)
        config[key] = dtype

    edit(model, say)
    out = train(model, tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert config[key] == "bfloat16"
    assert check(out, source=tmp_path / "qad") == []
    edit(out, lambda config: config.update({key: dtype}))
    (finding,) = check(out)
    assert (finding.rule, finding.severity) == ("E1", "warning")
    assert f"says dtype {dtype}, and its unquantized weights are BF16" in finding.message
