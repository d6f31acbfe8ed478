"""An attention kernel that is not here falls back to one that is; nothing is fetched; the record says so."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers.integrations.hub_kernels

from harness.engines.transformers import load
from qad.model.loader import load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.model.streamed import streamed_model

KEYS = ["attn_implementation", "_attn_implementation"]
ABSENT = [
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "somebody/kernels",
    "kernels-community/flash-attn",
]


def asking(source: Path, to: Path, key: str, kernel: object) -> Path:
    shutil.copytree(source, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, key: kernel}))
    return to


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*given: object, **named: object) -> None:
        raise AssertionError(f"a kernel was asked for: {given}")

    for name in ("load_and_register_attn_kernel", "get_kernel"):
        if hasattr(transformers.integrations.hub_kernels, name):
            monkeypatch.setattr(transformers.integrations.hub_kernels, name, fetched)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kernel", ABSENT)
def test_an_absent_kernel_is_replaced_and_named(tiny_llama_dir: Path, tmp_path: Path, key: str, kernel: str) -> None:
    folder = asking(tiny_llama_dir, tmp_path / "asking", key, kernel)
    source, ids = open_checkpoint(folder), torch.arange(3, 40)[None]
    expected = load_model(open_checkpoint(tiny_llama_dir), "float32", "cpu")(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_skeleton(source)  # computes nothing, so there is nothing to say
    with pytest.warns(UserWarning, match=f"asks for {kernel} attention, which is not here"):
        loaded = load(folder, "float32", "cpu")
    assert loaded.engine.kernel_path == f"torch float32 matmul, sdpa attention (in place of {kernel})"
    assert torch.equal(loaded.model(ids).logits, expected)
    with pytest.warns(UserWarning, match=f"asks for {kernel} attention"):
        streamed = streamed_model(source, "float32")
    assert streamed is not None
    assert torch.equal(streamed(ids).logits, expected)


@pytest.mark.parametrize("key", KEYS)
def test_a_kernel_that_is_here_computes(tiny_llama_dir: Path, tmp_path: Path, key: str) -> None:
    folder = asking(tiny_llama_dir, tmp_path / "asking", key, "eager")
    assert load(folder, "float32", "cpu").engine.kernel_path == "torch float32 matmul, eager attention"
    path = load(folder, "float32", "cpu", "sdpa").engine.kernel_path  # asked for by whoever measures
    assert path == "torch float32 matmul, sdpa attention"
    assert load(tiny_llama_dir, "float32", "cpu").engine.kernel_path == "torch float32 matmul, sdpa attention"
