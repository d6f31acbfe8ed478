"""The table of families against what vLLM fuses, recorded from its classes; inside vLLM's environment the record itself.

Run in vLLM's environment: make test-in-vllm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from qad.model.families import DEFAULT, ROWS, family_name, family_of, named_family

RECORD = Path(__file__).with_name("packed_modules.json")


def recorded() -> Iterator[tuple[str, str, dict[str, list[str]]]]:
    """(architecture, its model_type, fused module -> members), where transformers knows the architecture."""
    from transformers.models.auto import modeling_auto as auto

    types: dict[str, list[str]] = {}
    for table in (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for model_type, names in table.items():
            for name in (names,) if isinstance(names, str) else names:
                types.setdefault(name, []).append(model_type)
    for fused, architectures in json.loads(RECORD.read_text())["fused"]:
        for architecture in architectures:
            for model_type in types.get(architecture, ()):
                yield architecture, model_type, fused


def test_what_vllm_fuses_shares_scales() -> None:
    """Under the name that vLLM's exclude rules go by."""
    seen = 0
    for architecture, model_type, fused in recorded():
        family = named_family(model_type)
        for name, members in fused.items():
            apart = [m for m in members if "." in m]  # of another parent: then none of them is quantized
            if apart:
                assert all(family.never_quantized(m) for m in members if m not in apart), (architecture, members)
                continue
            modules = [f"model.layers.0.x.{member}" for member in members]
            assert family.scale_groups(modules) == [tuple(modules)], (architecture, model_type, members)
            assert {family.fused_name(m, modules) for m in modules} == {f"model.layers.0.x.{name}"}, (architecture, name)
            seen += 1
    assert seen > 200


@pytest.mark.in_vllm
def test_the_record_is_the_installed_vllms() -> None:
    import sys

    pytest.importorskip("vllm")
    sys.path.insert(0, str(RECORD.parent))
    from packed_modules import read

    assert json.loads(json.dumps(read())) == json.loads(RECORD.read_text())


def test_a_row_is_found_by_its_own_type_or_that_of_its_text() -> None:
    inner = {"model_type": "internvl", "text_config": {"model_type": "qwen3_5_text"}}
    assert family_of(inner) is named_family("qwen3_5")
    assert family_name(inner) == "qwen3_5_text"
    assert family_of({"model_type": "nobody", "text_config": {"model_type": "nobody_text"}}) is DEFAULT
    assert family_name({"model_type": "nobody"}) == "nobody"
    assert family_of({}) is DEFAULT
    names = [name for row in ROWS for name in row.model_types]
    assert len(names) == len(set(names))


def test_the_larger_group_only_where_all_of_it_is_there() -> None:
    family = named_family("olmo_hybrid")
    linear = [f"model.layers.0.linear_attn.{leaf}_proj" for leaf in "qkvg"]
    full = [f"model.layers.1.self_attn.{leaf}_proj" for leaf in "qkv"]
    assert family.scale_groups([*linear, *full]) == [tuple(linear), tuple(full)]
    assert family.fused_name(linear[0], [*linear, *full]) == "model.layers.0.linear_attn.in_proj_qkvg"
    assert family.fused_name(full[0], [*linear, *full]) == "model.layers.1.self_attn.qkv_proj"


def test_a_mamba_1_mixer_stays_whole_and_a_mamba_2_mixer_does_not() -> None:
    mixer = [f"model.layers.0.mamba.{leaf}" for leaf in ("in_proj", "x_proj", "dt_proj", "out_proj")]
    other = ["model.layers.1.mamba.in_proj", "model.layers.1.mamba.out_proj", "model.layers.0.feed_forward.up_proj"]
    assert list(DEFAULT.in_mamba1([*mixer, *other])) == mixer
