"""Export: whole or absent, sharded, carrying the source's own files, refusing what cannot be exported."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import export.writer as writer
from export.check import check
from export.writer import export_arm
from qad.arm import open_arm, write_arm
from qad.artifact import run_stage
from qad.errors import ArtifactError, SourceError, StorageError, UsageError
from qad.loader import load_tokenizer
from qad.source import open_checkpoint

BuildArm = Callable[..., Path]


@pytest.fixture
def source(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "söurce model"))


def names_and_bytes(folder: Path) -> dict[str, bytes]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


def test_shards_agree_with_their_index_and_hold_the_same_bytes(
    arm_dir: Path, exported_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sharded"
    export_arm(arm_dir, out, shard_size=20_000)
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert check(out) == []
    assert names_and_bytes(out) == names_and_bytes(exported_dir)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    modules: dict[str, set[str]] = {}
    for name, file in index["weight_map"].items():
        modules.setdefault(name.rpartition(".")[0], set()).add(file)
    assert all(len(files) == 1 for files in modules.values())


def test_a_second_export_with_other_shards_leaves_nothing_stale(arm_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_arm(arm_dir, out, shard_size=50_000)
    with pytest.raises(ArtifactError, match="other inputs or settings"):
        export_arm(arm_dir, out)
    export_arm(arm_dir, out, replace=True)
    assert [p.name for p in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert check(out) == []


def test_the_same_export_is_reused(arm_dir: Path, tmp_path: Path) -> None:
    first = export_arm(arm_dir, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert export_arm(arm_dir, tmp_path / "out") == first
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


def test_config_equals_the_sources_but_for_quantization(exported_dir: Path, tiny_llama_dir: Path) -> None:
    exported = json.loads((exported_dir / "config.json").read_text())
    quantization = exported.pop("quantization_config")
    assert exported == json.loads((tiny_llama_dir / "config.json").read_text())
    nested = json.loads((exported_dir / "hf_quant_config.json").read_text())["quantization"]
    assert quantization["ignore"] == nested["exclude_modules"] == ["lm_head", "model.embed_tokens"]
    assert quantization["quant_algo"] == nested["quant_algo"] == "NVFP4"


def test_a_tied_head_is_dropped_and_stays_tied(exported_dir: Path) -> None:
    assert not any(n.startswith("lm_head") for n in names_and_bytes(exported_dir))
    assert json.loads((exported_dir / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("where", ["jinja", "tokenizer_config"])
def test_the_prompt_is_rendered_as_the_sources(source: Path, build_arm: BuildArm, tmp_path: Path, where: str) -> None:
    if where == "tokenizer_config":
        template = (source / "chat_template.jinja").read_text()
        (source / "chat_template.jinja").unlink()
        config = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out)
    chat = [{"role": "user", "content": "How deep is the river?"}]
    rendered = [
        load_tokenizer(f).apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for f in (source, out)
    ]
    assert rendered[0] == rendered[1] != ""


def test_the_sources_own_files_are_copied_verbatim_and_nothing_else(
    source: Path, build_arm: BuildArm, tmp_path: Path
) -> None:
    (source / "modeling_own.py").write_text("raise SystemExit('never run')\n")
    (source / "LICENSE").write_text("licence\n")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "optimizer.pt").write_bytes(b"pickle")
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out)
    for name in ("modeling_own.py", "LICENSE", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not {"pytorch_model.bin", "optimizer.pt"} & {p.name for p in out.iterdir()}


def test_the_card_names_base_and_licence(source: Path, build_arm: BuildArm, tmp_path: Path) -> None:
    (source / "README.md").write_text("---\nmodel_name: Tiny\nbase_model: owner/tiny\nlicense: mit\n---\n")
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out)
    card = open_checkpoint(out, allow_quantized=True).card
    assert (card["base_model"], card["license"], card["base_model_relation"]) == ("owner/tiny", "mit", "quantized")
    assert "nvfp4" in card["tags"]


@pytest.mark.parametrize("format", ["NVFP4", "W4A16_NVFP4"])
def test_fused_groups_share_scales_however_different_their_members(
    source: Path, build_arm: BuildArm, tmp_path: Path, format: str
) -> None:
    tensors = load_file(source / "model.safetensors")
    layer = "model.layers.0"
    for leaf, factor in (("self_attn.k_proj", 10.0), ("self_attn.v_proj", 0.1), ("mlp.gate_proj", 3.0)):
        tensors[f"{layer}.{leaf}.weight"] *= factor
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    arm, out = build_arm(source, tmp_path / "arm", format), tmp_path / "out"
    export_arm(arm, out)
    stored = load_file(out / "model.safetensors")
    for group in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]):
        for scale in ("weight_scale_2", *(["input_scale"] if format == "NVFP4" else [])):
            assert len({stored[f"{layer}.{m}.{scale}"].item() for m in group}) == 1
    assert check(out, source=arm) == []


def test_zero_weights_export_with_normal_scales(source: Path, build_arm: BuildArm, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    tensors["model.layers.1.mlp.down_proj.weight"].fill_(1e-36)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out)
    stored = load_file(out / "model.safetensors")
    for layer in (0, 1):
        assert torch.isfinite(1 / stored[f"model.layers.{layer}.mlp.down_proj.weight_scale_2"])
        assert (stored[f"model.layers.{layer}.mlp.down_proj.weight"] == 0).all()
    assert [f for f in check(out) if f.severity == "error"] == []


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_nan_is_named_and_nothing_is_left(source: Path, build_arm: BuildArm, tmp_path: Path, name: str) -> None:
    arm = build_arm(source, tmp_path / "arm")
    masters = {n: t.float() for n, t in load_file(source / "model.safetensors").items()}
    masters[name][2, 3] = float("nan")
    opened = open_arm(arm)
    broken = tmp_path / "broken"
    run_stage(
        "arm",
        broken,
        {},
        {},
        lambda f: write_arm(f, "qad", opened.source, opened.selection, opened.input_scales, masters),
    )
    with pytest.raises(SourceError, match=rf"{name}.*nan.*2, 3"):
        export_arm(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["disk full", "killed"])
def test_an_interrupted_export_leaves_nothing_that_looks_whole(
    arm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device") if fault == "disk full" else KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_metadata", fail)
        with pytest.raises(StorageError if fault == "disk full" else KeyboardInterrupt):
            export_arm(arm_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_arm(arm_dir, tmp_path / "out")
    assert check(tmp_path / "out") == []


def test_a_bf16_arm_a_changed_source_and_an_unknown_layout_are_refused(
    source: Path, build_arm: BuildArm, arm_dir: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(source)
    run_stage("arm", tmp_path / "bf16", {}, {}, lambda f: write_arm(f, "bf16", checkpoint, None, {}))
    with pytest.raises(ArtifactError, match="BF16 arm"):
        export_arm(tmp_path / "bf16", tmp_path / "out")
    with pytest.raises(UsageError, match="layout"):
        export_arm(arm_dir, tmp_path / "out", layout="gguf")
    arm = build_arm(source, tmp_path / "arm")
    (source / "generation_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="has changed since"):
        export_arm(arm, tmp_path / "out")


def test_an_export_cannot_be_the_source_of_another(exported_dir: Path) -> None:
    with pytest.raises(SourceError, match="already quantized"):
        open_checkpoint(exported_dir)
