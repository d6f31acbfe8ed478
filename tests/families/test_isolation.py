"""What a small instance says about packing is what the family itself does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, config_of

from qad.arms.selection import select
from qad.errors import UsageError
from qad.model import isolation
from qad.model.isolation import LIMIT, Isolation, probe
from qad.model.loader import load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.recipes import apart

FamilyDir = Callable[[str], Path]
LEAKING = {
    "Bamba",
    "Falcon-H1",
    "Granite-hybrid dense",
    "Jamba",
    "LFM2",
    "Nemotron-H MoE",
    "Nemotron-H dense",
    "Qwen2.5-VL",
    "Qwen3-Next",
    "Qwen3.5 text",
    "Qwen3.5-VL",
    "gpt-oss",
    "gpt-oss MXFP4",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_probe_finds_what_leaks(name: str) -> None:
    found = probe(config_of(name))
    assert found.why_not == ""
    assert found.proved == (name not in LEAKING)
    assert found.causal


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "DeepSeek-V3", "Qwen3-MoE", "Bamba", "LFM2", "gpt-oss", "Qwen3-VL"])
def test_the_family_itself_does_what_its_small_instance_did(family_dir: FamilyDir, name: str) -> None:
    model = load_model(open_checkpoint(family_dir(name)), "float32", "cpu")
    ids = torch.randint(3, 500, (2, 1, 30), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(30).repeat(2)[None]
    with torch.no_grad():
        alone = model.base_model(ids[1], position_ids=positions[:, :30], use_cache=False)[0]
        behind = model.base_model(ids.view(1, 60), position_ids=positions, use_cache=False)[0][:, 30:]
    difference = float((behind - alone).abs().max() / alone.abs().max())
    assert (difference <= LIMIT) == (name not in LEAKING)


def test_the_random_numbers_of_others_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    probe(config_of("Llama"))
    assert torch.equal(torch.rand(3), expected)


def test_what_cannot_be_asked_is_not_proved_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(model: Any, *documents: torch.Tensor) -> torch.Tensor:
        return torch.ones(2, sum(document.shape[1] for document in documents), 8)

    monkeypatch.setattr(isolation, "_hidden", blind)
    found = probe(config_of("Llama"))
    assert not found.proved
    assert "do not depend on what comes before" in found.why_not


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    from transformers import BertConfig

    found = probe(BertConfig(num_hidden_layers=2, is_decoder=False))
    assert found.followed is not None
    assert not found.causal


def looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[bool, list[str]]:
    model, said = load_skeleton(open_checkpoint(folder)), []
    selection = select(model, "NVFP4")
    monkeypatch.setattr(apart, "probe", lambda config: dataclasses.replace(probe(config), **changed))
    return apart.one_document_a_row(model, selection, None, said.append), said


def test_a_job_says_what_was_found(family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, said = looked_at(family_dir("Llama"), monkeypatch)
    assert not rows
    assert len(said) == 1
    rows, said = looked_at(family_dir("Bamba"), monkeypatch)
    assert rows
    assert "one document a row" in said[0]
    rows, said = looked_at(family_dir("Granite"), monkeypatch, packed=None, why_not="X")
    assert rows
    assert "(X)" in said[0]


def test_what_was_not_walked_is_called_untried(family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "TRIED", frozenset())
    said = looked_at(family_dir("Llama"), monkeypatch)[1]
    assert said[-1].strip().startswith("untried: nobody has taken a llama the whole way")
    assert said[-1].endswith("packing proved")


def test_modules_that_text_never_runs_are_refused_before_anything_is_computed(
    family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"never reach model.layers.0.mlp.down_proj \(2 modules\)"):
        looked_at(family_dir("Llama"), monkeypatch, unreached=frozenset({"model.layers.N.mlp.down_proj"}))
    with pytest.raises(UsageError, match="not causal"):
        looked_at(family_dir("Llama"), monkeypatch, followed=0.5)


def test_nothing_that_is_selected_goes_unreached_in_any_family(family_dir: FamilyDir) -> None:
    """But for experts, that are asked for in calibration itself."""
    found = Isolation(0.0, 0.0)
    for name in ("Llama", "Falcon-H1", "LFM2", "Nemotron-H dense", "Gemma3", "Qwen3-VL"):
        model = load_skeleton(open_checkpoint(family_dir(name)))
        found = probe(model.config)
        apart._require_reached(model, select(model, "NVFP4"), found)
    assert found.unreached  # of the last, its tower's
