"""Export: whole or absent, sharded, carrying the source's own files, refusing what cannot be exported."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import export.writer as writer
import qad.hf  # noqa: F401  (registers the loader)
from export.check import check
from export.files.safetensors_writer import write_file
from export.writer import export_arm
from qad.arms.arm import open_arm, write_arm
from qad.artifact import run_stage
from qad.errors import ArtifactError, SourceError, StorageError, UsageError
from qad.model.loader import load_tokenizer
from qad.model.source import open_checkpoint
from qad.numerics import nvfp4
from qad.numerics.groups import quantize_group
from qad.untrusted.safetensors_header import Entry

BuildArm = Callable[..., Path]


@pytest.fixture
def source(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "söurce model"))


def names_and_bytes(folder: Path) -> dict[str, bytes]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


def test_shards_agree_with_their_index_and_hold_the_same_bytes(arm_dir: Path, exported_dir: Path, tmp_path: Path) -> None:
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
    rendered = [load_tokenizer(f).apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for f in (source, out)]
    assert rendered[0] == rendered[1] != ""


def test_the_sources_own_files_are_copied_verbatim_and_nothing_else(source: Path, build_arm: BuildArm, tmp_path: Path) -> None:
    (source / "modeling_own.py").write_text("raise SystemExit('never run')\n")
    (source / "LICENSE").write_text("licence\n")
    (source / "Notice.txt").write_text("notice\n")
    (source / "vocab.txt").write_bytes(b"x" * 10_000_000)
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "optimizer.pt").write_bytes(b"pickle")
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out)
    for name in ("modeling_own.py", "LICENSE", "Notice.txt", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not {"pytorch_model.bin", "optimizer.pt"} & {p.name for p in out.iterdir()}
    large = [line.split()[0] for line in (out / ".gitattributes").read_text().splitlines() if "filter=lfs" in line]
    for name in ("model.safetensors", "tokenizer.json", "vocab.txt"):
        assert any(fnmatch(name, pattern) for pattern in large)
    assert not any(fnmatch("config.json", pattern) for pattern in large)


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
    """A zero Linear, and one whose calibration input is all zero (o_proj behind a zero v_proj); vanishing weights,
    reported. Scales are normal, with finite reciprocals, and what is zero computes zero."""
    tensors = load_file(source / "model.safetensors")
    down, v, o = "mlp.down_proj", "self_attn.v_proj", "self_attn.o_proj"
    tensors[f"model.layers.0.{down}.weight"].zero_()
    tensors[f"model.layers.0.{v}.weight"].zero_()
    tensors[f"model.layers.1.{down}.weight"].fill_(1e-36)
    tensors[f"model.layers.1.{o}.weight"].fill_(1e-39)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    with (
        pytest.warns(UserWarning, match=r"model\.layers\.1\.mlp\.down_proj: .* become zero"),
        pytest.warns(UserWarning, match=r"model\.layers\.1\.self_attn\.o_proj: .* become zero"),
    ):
        export_arm(build_arm(source, tmp_path / "arm"), out)
    stored = load_file(out / "model.safetensors")
    for module in (f"model.layers.0.{down}", f"model.layers.1.{down}", f"model.layers.1.{o}", f"model.layers.0.{v}"):
        assert torch.isfinite(1 / stored[f"{module}.weight_scale_2"])
        assert (stored[f"{module}.weight"] == 0).all()
    assert stored[f"model.layers.0.{o}.input_scale"].item() == torch.tensor(1 / 2688).item()
    scales = [tensor for name, tensor in stored.items() if name.endswith(("weight_scale_2", "input_scale"))]
    assert all(torch.isfinite(s) and s > 0 and torch.isfinite(1 / s) for s in scales)
    assert [f for f in check(out) if f.severity == "error"] == []
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    linear = model.get_submodule(f"model.layers.0.{down}")
    assert (linear(torch.randn(3, 128)) == 0).all()
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def test_zero_rows_export_without_nan_bytes_and_decode_to_zero(source: Path, build_arm: BuildArm, tmp_path: Path) -> None:
    """Rows and blocks of zeros in every Linear, next to ordinary ones."""
    tensors = load_file(source / "model.safetensors")
    arm = open_arm(build_arm(source, tmp_path / "plain"))
    assert arm.selection is not None
    for module in arm.selection.modules:
        tensors[f"{module}.weight"][1], tensors[f"{module}.weight"][:, 16:32] = 0.0, 0.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out)
    stored = load_file(out / "model.safetensors")
    for module in arm.selection.modules:
        byte = stored[f"{module}.weight_scale"].view(torch.uint8)
        assert ((byte & 0x7F) != 0x7F).all()
        assert (byte[1] == 0x38).all()
        assert (byte[:, 1] == 0x38).all()
        leaves = (stored[f"{module}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2"))
        decoded = nvfp4.dequantize(nvfp4.QuantizedTensor(*leaves))
        assert torch.equal(decoded[1].view(torch.int32), torch.zeros(decoded.shape[1], dtype=torch.int32))
        assert (decoded[:, 16:32] == 0).all()
        assert decoded.count_nonzero() > 0
    assert check(out) == []


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_nan_is_named_and_nothing_is_left(source: Path, build_arm: BuildArm, tmp_path: Path, name: str) -> None:
    arm = build_arm(source, tmp_path / "arm")
    masters = {n: t.float() for n, t in load_file(source / "model.safetensors").items()}
    masters[name][2, 3] = float("nan")
    opened = open_arm(arm)
    broken = tmp_path / "broken"
    run_stage("arm", broken, {}, {}, lambda f: write_arm(f, "qad", opened.source, opened.selection, opened.input_scales, masters))
    with pytest.raises(SourceError, match=rf"{name}.*nan.*2, 3"):
        export_arm(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moment", ["metadata", "weights"])
@pytest.mark.parametrize("fault", ["disk full", "killed"])
def test_an_interrupted_export_leaves_nothing_that_looks_whole(
    arm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, moment: str
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device") if fault == "disk full" else KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_file" if moment == "weights" else "_metadata", fail)
        with pytest.raises(StorageError if fault == "disk full" else KeyboardInterrupt):
            export_arm(arm_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_arm(arm_dir, tmp_path / "out")
    assert check(tmp_path / "out") == []


def test_an_interrupted_export_goes_on_behind_its_last_whole_shard(
    arm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write, limit = writer.write_file, [2]

    def counted(path: Path, *args: Any) -> str:
        if len(written) == limit[0]:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path.name)
        return write(path, *args)

    monkeypatch.setattr(writer, "write_file", counted)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(KeyboardInterrupt):
        export_arm(arm_dir, out, shard_size=20_000)
    first, second = sorted(p.name for p in partial.glob("*.safetensors"))
    damaged = bytearray((partial / second).read_bytes())
    damaged[-1] ^= 1  # same size, other bytes
    (partial / second).write_bytes(damaged)
    (partial / "stray.safetensors").write_bytes(b"")
    kept = (partial / first).stat().st_ino
    written.clear()
    limit[0] = 10**6
    artifact = export_arm(arm_dir, out, shard_size=20_000)
    assert f"{first}.tmp" not in written
    assert f"{second}.tmp" in written
    assert (out / first).stat().st_ino == kept
    whole = export_arm(arm_dir, tmp_path / "whole", shard_size=20_000)
    assert artifact.digest == whole.digest
    assert artifact.manifest["files"] == whole.manifest["files"]
    assert not [name for name in artifact.manifest["files"] if "shards" in name or name.endswith(".tmp")]


def test_shards_of_another_commit_are_written_again(arm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = writer.write_file

    def counted(path: Path, *args: Any) -> str:
        written.append(path.name)
        if len(written) == 2:
            raise KeyboardInterrupt
        return write(path, *args)

    monkeypatch.setattr(writer, "write_file", counted)
    with pytest.raises(KeyboardInterrupt):
        export_arm(arm_dir, tmp_path / "out", shard_size=20_000)
    record = tmp_path / "out.partial" / "shards.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "commit": "another"}))
    export_arm(arm_dir, tmp_path / "out", shard_size=20_000)
    assert written.count(written[0]) == 2


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


def test_too_little_room_is_told_before_anything_is_written(
    arm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StorageError, match=r"0\.00 GB free"):
        export_arm(arm_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_arm_and_source_are_never_overwritten(source: Path, build_arm: BuildArm, tmp_path: Path) -> None:
    arm = build_arm(source, tmp_path / "arms" / "ptq")
    for out in (arm, arm / "export", source, source / "nvfp4", tmp_path / "arms"):
        with pytest.raises(UsageError, match="choose another folder"):
            export_arm(arm, out, replace=True)
    assert open_arm(arm).source.folder == source.resolve()


def rewritten(arm: Path, folder: Path, **changes: Any) -> Path:
    """An arm like another one, with some of what write_arm takes replaced."""
    opened = open_arm(arm)
    parts: dict[str, Any] = {
        "source": opened.source,
        "selection": opened.selection,
        "input_scales": dict(opened.input_scales),
        "weights": None,
        **changes,
    }
    run_stage("arm", folder, {}, {}, lambda f: write_arm(f, "qad", **parts))
    return folder


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("what", ["missing", "zero", "infinite", "unequal"])
def test_input_scales_that_no_engine_can_use_are_refused(arm_dir: Path, tmp_path: Path, what: str) -> None:
    scales = dict(open_arm(arm_dir).input_scales)
    if what == "missing":
        del scales[UP]
    else:
        scales[UP] = {"zero": scales[UP] * 0, "infinite": scales[UP] / 0, "unequal": scales[UP] * 2}[what]
    with pytest.raises(ArtifactError, match=r"up_proj.*calibrate again"):
        export_arm(rewritten(arm_dir, tmp_path / "arm", input_scales=scales), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.layers.0.mlp.other.weight", "model.norm.weight"])
def test_trained_weights_that_the_source_has_no_place_for_are_refused(arm_dir: Path, tmp_path: Path, name: str) -> None:
    weights = {name: torch.ones(7)}
    with pytest.raises(ArtifactError, match=rf"trained {name} \[7\]"):
        export_arm(rewritten(arm_dir, tmp_path / "arm", weights=weights), tmp_path / "out")


def test_a_selected_module_that_the_source_lacks_is_refused(arm_dir: Path, tmp_path: Path) -> None:
    selection = open_arm(arm_dir).selection
    assert selection is not None
    selection = dataclasses.replace(selection, modules={**selection.modules, "model.layers.9.mlp.up_proj": (128, 64)})
    scales = {**open_arm(arm_dir).input_scales, "model.layers.9.mlp.up_proj": torch.tensor(1.0)}
    with pytest.raises(ArtifactError, match=r"model\.layers\.9\.mlp\.up_proj.*has no such tensor"):
        export_arm(rewritten(arm_dir, tmp_path / "arm", selection=selection, input_scales=scales), tmp_path / "out")


def test_a_routers_correction_bias_keeps_its_bits(source: Path, build_arm: BuildArm, tmp_path: Path) -> None:
    name, tensors = "model.layers.0.mlp.gate.e_score_correction_bias", load_file(source / "model.safetensors")
    bias = torch.tensor([5.0, 5.001, 5.002, -1e-4])
    save_file({**tensors, name: bias}, source / "model.safetensors", {"format": "pt"})
    export_arm(build_arm(source, tmp_path / "arm", "W4A16_NVFP4"), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored[name].dtype == torch.float32
    assert torch.equal(stored[name], bias)
    assert stored["model.norm.weight"].dtype == torch.bfloat16


def test_biases_lie_beside_their_weights_and_load(make_llama: Callable[..., Path], build_arm: BuildArm, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "biased", attention_bias=True, mlp_bias=True)
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out, shard_size=2_000)
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    biases = [name for name in weight_map if name.endswith(".bias")]
    assert len(biases) == 14
    assert all(weight_map[name] == weight_map[name.replace(".bias", ".weight")] for name in biases)
    assert check(out) == []


def test_a_stored_tied_head_is_dropped_and_one_that_differs_refused(source: Path, build_arm: BuildArm, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    arm = build_arm(source, tmp_path / "arm")
    trained = {"model.embed_tokens.weight": 2 * tensors["model.embed_tokens.weight"].float()}
    export_arm(rewritten(arm, tmp_path / "trained", weights=trained), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert torch.equal(stored["model.embed_tokens.weight"], trained["model.embed_tokens.weight"].bfloat16())
    tensors["lm_head.weight"] *= 2
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"tied, but lm_head\.weight differs"):
        open_checkpoint(source)


def test_odd_dimensions_stay_bf16_and_are_excluded(make_llama: Callable[..., Path], build_arm: BuildArm, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "odd", intermediate_size=40)
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out)
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == [
        "lm_head",
        "model.embed_tokens",
        *down,
    ]
    assert load_file(out / "model.safetensors")[f"{down[0]}.weight"].dtype == torch.bfloat16
    assert [f for f in check(out) if f.severity == "error"] == []


def test_the_card_carries_licence_and_tags_and_names_the_base_model(source: Path, build_arm: BuildArm, tmp_path: Path) -> None:
    front = "model_name: owner/river\nlicense: other\nlicense_name: river\ntags: [chat]\nmodel-index: [{name: x}]"
    (source / "README.md").write_text(f"---\n{front}\n---\n# River\n")
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm"), out)
    card = yaml.safe_load((out / "README.md").read_text().split("---")[1])
    assert card["base_model"] == "owner/river"
    assert (card["license"], card["license_name"]) == ("other", "river")
    assert card["tags"] == ["chat", "nvfp4", "modelopt", "nvfp4-qad", "ptq"]
    assert card["quantization"]["algorithm"] == "NVFP4"
    assert "model-index" not in card
    assert open_checkpoint(out, allow_quantized=True).display_name == "owner/river, NVFP4 (PTQ)"


@pytest.mark.parametrize(
    ("named", "expected"),
    [("[owner/one, owner/two]", ["owner/one", "owner/two"]), ("[owner/one]", "owner/one"), ("./a folder", None)],
)
def test_only_hub_names_are_base_models_and_the_hubs_own_reader_agrees(
    source: Path, build_arm: BuildArm, tmp_path: Path, named: str, expected: Any
) -> None:
    (source / "README.md").write_text(f"---\nbase_model: {named}\nlicense: apache-2.0\nlanguage: [de]\n---\n")
    out = tmp_path / "out"
    export_arm(build_arm(source, tmp_path / "arm", "W4A16_NVFP4"), out)
    card = ModelCard.load(out / "README.md").data
    assert (card.base_model, card.license, card.library_name) == (expected, "apache-2.0", "transformers")
    assert card.get("base_model_relation") == (None if expected is None else "quantized")
    assert card.language == ["de"]
    assert "nvfp4" in card.tags


def test_large_weights_are_quantized_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    whole = quantize_group({"m": weight})["m"]
    monkeypatch.setattr("qad.numerics.nvfp4._CHUNK", 28)
    parts = quantize_group({"m": weight})["m"]
    for field in ("packed", "block_scale", "global_scale"):
        a, b = (getattr(q, field).reshape(-1).view(torch.uint8) for q in (whole, parts))
        assert torch.equal(a, b)
    weight[40, 3] = float("nan")
    with pytest.raises(SourceError, match=r"m\.weight.*\(40, 3\)"):
        quantize_group({"m": weight})


def test_a_streamed_file_is_the_one_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "a": torch.randn(3, 5).bfloat16(),
        "s": torch.tensor(0.5),
        "é": torch.randn(2, 2),
        "f": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 4),
        "i": torch.arange(3),
    }
    dtypes = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64"}
    entries = [Entry(n, dtypes[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    digest = write_file(tmp_path / "ours", entries, tensors.items())
    assert digest == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with pytest.raises(AssertionError, match="never written"):
        write_file(tmp_path / "ours", entries, list(tensors.items())[1:])
