"""Every stored name of every family has its place in transformers' model, and comes back from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_families import FAMILIES
from transformers import PreTrainedModel

from qad.errors import SourceError
from qad.model.loader import load_model, load_skeleton
from qad.model.names import names_of
from qad.model.source import open_checkpoint


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_stored_is_what_the_model_has(family_dir: Callable[[str], Path], name: str) -> None:
    """By value: a name that leads to another tensor of the same shape would be found."""
    source = open_checkpoint(family_dir(name))
    model: PreTrainedModel = load_model(source, "float32", "cpu")
    names = names_of(model)
    parts = names.of({inner: parameter.detach() for inner, parameter in model.named_parameters()})
    tied = {source.head} if source.tied_embeddings else set()
    buffers = {names.tensor(inner) for inner, _ in model.named_buffers()}
    assert {*parts} - tied == {*source.tensors} - buffers - tied
    for stored, part in parts.items():
        assert torch.equal(source.get(stored).float(), part), stored


@pytest.mark.parametrize("name", ["GPT-NeoX", "Nemotron-H dense", "Gemma3", "Qwen2.5-VL", "Mixtral", "Mistral3"])
def test_modules_have_the_names_of_the_checkpoint(family_dir: Callable[[str], Path], name: str) -> None:
    source = open_checkpoint(family_dir(name))
    skeleton = load_skeleton(source)
    names = names_of(skeleton)
    linears = [inner for inner, module in skeleton.named_modules() if isinstance(module, torch.nn.Linear)]
    head = skeleton.get_output_embeddings()
    for inner in linears:
        stored = names.module(inner)
        assert names.inner(stored) == inner
        if skeleton.get_submodule(inner) is not head or not source.tied_embeddings:
            assert f"{stored}.weight" in source.tensors
    if name == "GPT-NeoX":
        assert names.module("lm_head") == "embed_out"
        assert names.inner("gpt_neox.layers.0.attention") == "gpt_neox.layers.0.attention"
    if name == "Nemotron-H dense":
        assert names.module("model.layers.0.mixer.in_proj") == "backbone.layers.0.mixer.in_proj"


def test_an_architecture_without_a_language_model_is_refused(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    import json

    folder = family_dir("Llama")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "clip", "architectures": ["XForCausalLM"]}))
    with pytest.raises(SourceError, match="as a causal LM"):
        load_skeleton(open_checkpoint(tmp_path))
