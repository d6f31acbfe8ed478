"""Everything that cannot be a source is refused by its headers, in one line with the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qad.errors import SourceError
from qad.model.built_config import built_config
from qad.model.source import open_checkpoint
from qad.training.stages import require_finite


@pytest.fixture
def model(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "a model, ünïcode"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def to_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def to_gguf(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


def gguf_with_config(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")


def two_shards(folder: Path, twice: bool = False, keep: bool = False) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    index(folder, {name: file for file, part in parts.items() for name in part})
    parts["model-00002-of-00002.safetensors"] = names[2 if twice else 3 :]
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    if not keep:
        (folder / "model.safetensors").unlink()


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def to_fp8(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()}, folder / "model.safetensors")


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config no json": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "not causal": (lambda f: edit_config(f, architectures=["BertModel"]), "not a causal language model"),
    "no architecture": (lambda f: edit_config(f, architectures=None), "not a causal language model"),
    "quantized": (lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}), "already quantized"),
    "fp8 tensors": (to_fp8, "F8_E4M3"),
    "no tokenizer": (drop_tokenizer, "no tokenizer"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no \\*.safetensors"),
    "pickle": (to_pickle, "pickle is not read"),
    "truncated": (truncate, "incomplete or damaged"),
    "adapter": (to_adapter, "merge it first"),
    "gguf": (to_gguf, "GGUF"),
    "shard missing": (lambda f: index(f, {"a": "model-00001-of-00002.safetensors"}), "download is incomplete"),
    "index outside": (lambda f: index(f, {"a": "../secret.safetensors"}), "outside its folder"),
    "index wrong": (lambda f: index(f, {"nonsense": "model.safetensors"}), "says nonsense is in"),
    "index with numbers": (lambda f: index(f, {"a": 7}), "names 7 as a file"),  # type: ignore[dict-item]
    "index lists too little": (
        lambda f: index(f, {"model.norm.weight": "model.safetensors"}),
        "model.embed_tokens.weight, but .* does not list it",
    ),
    "tensor in two shards": (lambda f: two_shards(f, twice=True), "but .* lists it in model-00001"),
    "stale single file": (lambda f: two_shards(f, keep=True), "lies beside an index that does not list it"),
    "gguf with config": (gguf_with_config, "It holds GGUF"),
    "quantization no object": (lambda f: edit_config(f, quantization_config=["fp8"]), "already quantized \\(unknown"),
    "architectures no names": (lambda f: edit_config(f, architectures=[1]), "not a causal language model"),
    "index broken": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "not a safetensors index"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_source_is_refused(model: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(model)
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere" / "deep")
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match="is a file"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_a_hub_name_without_network_says_what_to_do() -> None:
    with pytest.raises(SourceError, match="neither a local folder nor could it be fetched"):
        open_checkpoint("owner/no-such-model-here")


def test_a_good_source_opens_without_being_touched(model: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in model.iterdir()}
    checkpoint = open_checkpoint(model)
    assert checkpoint.tied_embeddings
    assert checkpoint.get("model.norm.weight").dtype == torch.bfloat16
    assert len(checkpoint.digest) == 64
    assert {p.name: p.stat().st_mtime_ns for p in model.iterdir()} == before


def test_the_name_is_the_cards_or_the_folders(model: Path) -> None:
    assert open_checkpoint(model).display_name == "a model, ünïcode"
    (model / "README.md").write_text('---\nmodel_name: "Tiny, made up"\n---\n')
    assert open_checkpoint(model).display_name == "Tiny, made up"


def test_the_digest_follows_the_contents(model: Path) -> None:
    before = open_checkpoint(model).digest
    edit_config(model, rope_scaling=None, extra=1)
    assert open_checkpoint(model).digest != before


@pytest.mark.parametrize(
    "name", ["merges.txt", "special_tokens_map.json", "qwen.tiktoken", "additional_chat_templates/tool_use.jinja"]
)
def test_the_digest_follows_all_that_makes_ids_and_prompts(model: Path, name: str) -> None:
    digests = {open_checkpoint(model).digest}
    for text in ("a b", "b a"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
        digests.add(open_checkpoint(model).digest)
    assert len(digests) == 3


def test_infinity_as_transformers_5_writes_it_is_read() -> None:
    config = {"model_type": "falcon_h1", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    built = built_config(config)
    assert built is not None
    assert built.time_step_limit[1] == float("inf")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_with_its_index(model: Path, bad: float) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds .* at index \[3, 5\]"):
        require_finite(open_checkpoint(model))
