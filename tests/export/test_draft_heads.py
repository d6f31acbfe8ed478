"""Heads that draft tokens ahead: carried over, excluded under the engines' names, and missed where they are lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.check import check
from export.convert import convert
from export.layouts.config_files import CONFIG, NESTED
from export.layouts.drafts import Drafts
from export.writer import export_arm

LAYOUTS = ["modelopt", "compressed-tensors"]
# As DeepSeek-V3 and GLM-4 MoE store theirs: a layer behind the last one; and as Qwen3.5 MoE does.
BEHIND = {
    "model.layers.2.eh_proj.weight": (64, 128),
    "model.layers.2.self_attn.q_proj.weight": (64, 64),
    "model.layers.2.mlp.experts.0.up_proj.weight": (128, 64),
    "model.layers.2.shared_head.head.weight": (512, 64),
    "model.layers.2.shared_head.norm.weight": (64,),
}
NAMED = {"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,), "mtp.layers.0.mlp.experts.down_proj": (2, 64, 32)}
ALIASES = {"behind": "model.layers.2.head", "named": "mtp.layers.0.mlp.experts"}
Arms = dict[str, Path]


@pytest.fixture(scope="module")
def arms(tiny_llama_dir: Path, build_arm: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Arms:
    found = {}
    for name, heads in (("behind", BEHIND), ("named", NAMED)):
        root = tmp_path_factory.mktemp(name)
        source = Path(shutil.copytree(tiny_llama_dir, root / "source"))
        g = torch.Generator().manual_seed(5)
        extra = {key: torch.randn(shape, generator=g).bfloat16() for key, shape in heads.items()}
        save_file({**load_file(source / "model.safetensors"), **extra}, source / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / CONFIG).read_text())
        assert config["num_hidden_layers"] == 2
        (source / CONFIG).write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
        found[name] = build_arm(source, root / "arm")
    return found


def change(folder: Path, rename: Callable[[str], str | None]) -> None:
    file = folder / "model.safetensors"
    kept = {new: tensor for name, tensor in load_file(file).items() if (new := rename(name))}
    save_file(kept, file, metadata={"format": "pt"})
    (folder / "qad_manifest.json").unlink()  # as of another tool


def unlist(folder: Path, name: str) -> None:
    for file, block, key in ((CONFIG, "quantization_config", "ignore"), (NESTED, "quantization", "exclude_modules")):
        if (folder / file).is_file():
            value = json.loads((folder / file).read_text())
            value[block][key].remove(name)
            (folder / file).write_text(json.dumps(value))


def said(folder: Path, arm: Path | None = None) -> set[tuple[str, str]]:
    return {(finding.rule, finding.severity) for finding in check(folder, source=arm)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ALIASES)
def test_heads_are_carried_over_and_listed_under_the_engines_names(arms: Arms, kind: str, layout: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_arm(arms[kind], out, layout=layout)
    ignore = json.loads((out / CONFIG).read_text())["quantization_config"]["ignore"]
    assert ALIASES[kind] in ignore
    assert said(out, arms[kind]) == set()
    other = next(name for name in LAYOUTS if name != layout)
    convert(out, other, tmp_path / "converted")
    assert said(tmp_path / "converted") == set()
    assert ALIASES[kind] in json.loads((tmp_path / "converted" / CONFIG).read_text())["quantization_config"]["ignore"]


@pytest.mark.parametrize("kind", ALIASES)
def test_a_name_that_an_engine_builds_and_nobody_excludes_is_an_error(arms: Arms, kind: str, tmp_path: Path) -> None:
    export_arm(arms[kind], tmp_path / "out")
    unlist(tmp_path / "out", ALIASES[kind])
    assert ("E13", "error") in said(tmp_path / "out")


@pytest.mark.parametrize(("kind", "start"), [("behind", "model.layers.2."), ("named", "mtp.")])
def test_a_lost_head_is_warned_about_and_an_error_against_the_arm(arms: Arms, kind: str, start: str, tmp_path: Path) -> None:
    export_arm(arms[kind], tmp_path / "out")
    change(tmp_path / "out", lambda name: None if name.startswith(start) else name)
    assert ("E13", "warning") in said(tmp_path / "out")
    against = check(tmp_path / "out", source=arms[kind])
    assert any(f.rule == "W3" and f.severity == "error" and "no draft is accepted" in f.message for f in against)


@pytest.mark.parametrize(("kind", "one"), [("behind", "model.layers.2.eh_proj.weight"), ("named", "mtp.fc.weight")])
def test_one_lost_tensor_of_a_head_is_found_against_the_arm(arms: Arms, kind: str, one: str, tmp_path: Path) -> None:
    export_arm(arms[kind], tmp_path / "out")
    change(tmp_path / "out", lambda name: None if name == one else name)
    assert any(f.rule == "W3" and one in f.message for f in check(tmp_path / "out", source=arms[kind]))


def test_a_renamed_head_is_not_taken_for_one(arms: Arms, tmp_path: Path) -> None:
    export_arm(arms["named"], tmp_path / "out")
    change(tmp_path / "out", lambda name: name.replace("mtp.", "draft."))
    assert {("E11", "warning"), ("E13", "warning")} <= said(tmp_path / "out")


def test_of_two_announced_heads_both_are_asked_for(arms: Arms, tmp_path: Path) -> None:
    export_arm(arms["behind"], tmp_path / "out")
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    (tmp_path / "out" / CONFIG).write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    assert ("E13", "error") in said(tmp_path / "out")
    (tmp_path / "out" / CONFIG).write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    assert ("E11", "error") in said(tmp_path / "out")  # the layer belongs to nothing then


@pytest.mark.parametrize(
    ("config", "tensor", "names"),
    [
        (
            {"num_hidden_layers": 36, "num_nextn_predict_layers": 1},
            "model.mtp_layers.0.self_attn.q_proj.weight",
            (
                *("model.mtp_layers.0.self_attn.q_proj", "model.layers.36.self_attn.q_proj"),
                *("model.mtp_layers.0.self_attn.qkv_proj", "model.layers.36.self_attn.qkv_proj"),
            ),
        ),
        (
            {"num_hidden_layers": 28, "num_nextn_predict_layers": 1},
            "model.mtp_block.0.mlp.down_proj.weight",
            ("model.mtp_block.0.mlp.down_proj", "model.layers.28.mlp.down_proj"),
        ),
        (
            {"model_type": "step3p5", "num_hidden_layers": 45, "num_nextn_predict_layers": 3},
            "model.layers.47.self_attn.o_proj.weight",
            ("model.layers.47.self_attn.o_proj", "model.layers.47.mtp_block.self_attn.o_proj"),
        ),
        ({"text_config": {"num_hidden_layers": 4, "mtp_num_hidden_layers": 1}}, "mtp.fc.weight", ("mtp.fc",)),
        ({"num_hidden_layers": 4, "num_nextn_predict_layers": 1}, "model.layers.3.mlp.up_proj.weight", ()),
        ({"num_hidden_layers": 4, "num_nextn_predict_layers": 1}, "vision_tower.encoder.layers.4.mlp.fc1.weight", ()),
    ],
)
def test_the_names_that_engines_build(config: dict[str, object], tensor: str, names: tuple[str, ...]) -> None:
    assert Drafts.of(config).names(tensor, (8, 8)) == names
    assert Drafts.of(config).names(tensor, (8,)) == ()
