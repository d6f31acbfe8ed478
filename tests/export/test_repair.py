"""`qad check --fix`: what is lossless is repaired and said; what needs quantizing again comes from the arm or not at all."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_checkpoint import Checkpoint, Damage, Kind, pairs
from metadata_corruptions import METADATA_KINDS
from safetensors.torch import load_file, save_file
from tensor_corruptions import TENSOR_KINDS

from export.check import check
from export.layouts.layout import LAYOUTS
from export.repair import repair
from export.writer import export_arm
from qad.arms.arm import open_arm, write_arm
from qad.artifact import run_stage
from qad.command.cli import main
from qad.errors import BrokenCheckpointError, UsageError
from qad.numerics import nvfp4
from qad.numerics.groups import quantize_group

Valid = dict[str, tuple[Checkpoint, Path]]


@pytest.fixture(scope="module")
def valid(make_llama: Callable[..., Path], build_arm: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Valid:
    """Layout -> an export in shards, of a source with an all-zero block, and its arm."""
    root = tmp_path_factory.mktemp("repair")
    source = make_llama(root / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][:, :16] = 0.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    arm = build_arm(source, root / "arm")
    found = {}
    for layout in LAYOUTS:
        export_arm(arm, root / layout, layout=layout, shard_size=60_000)
        found[layout] = Checkpoint(root / layout), arm
    return found


def stored(folder: Path) -> dict[str, bytes]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {n: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


def damaged(original: Checkpoint, damage: Damage | Kind, out: Path) -> Path:
    return (damage if isinstance(damage, Damage) else Damage("", damage)).at(original, "repair", out)


LOSSLESS = [
    "excluded name lost",
    "excluded in one place only",
    "packed module excluded",
    "packed module excluded by a pattern",
    "malformed exclusion",
    "exclusion of another type",
    "key of quantization_config lost",
    "key of hf_quant_config lost",
    "value of hf_quant_config",
    "quant_method",
    "number of a config group lost",
    "number of a config group changed",
    "unknown key in a config group",
    "targets of a config group",
    "config groups",
    "weights of a config group",
    "format or status",
    "hf_quant_config.json lost, damaged or added",
    "quantization_config lost",
    "stale file",
    "index entry",
    "total_size",
    "index lost",
]


@pytest.mark.parametrize(("kind", "layout"), pairs({kind: METADATA_KINDS[kind] for kind in LOSSLESS}))
def test_what_the_tensors_tell_is_repaired(valid: Valid, kind: str, layout: str, tmp_path: Path) -> None:
    original, _ = valid[layout]
    folder = damaged(original, METADATA_KINDS[kind], tmp_path / "damaged")
    done = repair(folder, tmp_path / "out")
    assert done
    assert [f for f in check(tmp_path / "out") if f.severity == "error"] == []
    assert stored(tmp_path / "out") == stored(original.folder)
    config, before = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", original.folder))
    assert config == before
    assert (tmp_path / "out" / "hf_quant_config.json").exists() == (layout == "modelopt")
    if layout == "modelopt":
        nested = [
            json.loads((f / "hf_quant_config.json").read_text())["quantization"] for f in (tmp_path / "out", original.folder)
        ]
        assert nested[0] == nested[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [0x7F, 0xFF, 0xB8])
def test_nan_scales_of_zero_blocks_become_what_the_exporter_writes(valid: Valid, layout: str, value: int, tmp_path: Path) -> None:
    def kind(c: Checkpoint, r: random.Random) -> None:
        name = f"model.layers.1.mlp.up_proj.{c.block_scale}"
        scale = c.get(name)
        scale.view(torch.uint8)[5, 0] = value
        c.put(name, scale)

    original, arm = valid[layout]
    folder = damaged(original, kind, tmp_path / "damaged")
    assert [f.rule for f in check(folder) if f.severity == "error"] == ["E4"]
    assert any("1 block scales" in line for line in repair(folder, tmp_path / "out"))
    assert stored(tmp_path / "out") == stored(original.folder)
    assert check(tmp_path / "out", source=arm) == []


def test_wildcards_become_full_names(valid: Valid, tmp_path: Path) -> None:
    def kind(c: Checkpoint, r: random.Random) -> None:
        for place, key in ((c.quantization, "ignore"), (c.json["hf_quant_config.json"]["quantization"], "exclude_modules")):
            place[key] = ["*lm_head", "model.embed*", "re:.*up_proj"]
        c.changed.add("hf_quant_config.json")

    original, _ = valid["modelopt"]
    repair(damaged(original, kind, tmp_path / "damaged"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]


def test_a_leaked_buffer_is_left_out_and_the_index_follows(valid: Valid, tmp_path: Path) -> None:
    def kind(c: Checkpoint, r: random.Random) -> None:
        module = r.choice(c.modules)
        c.put(f"{module}._amax", torch.ones(1), beside=f"{module}.{c.codes}")

    original, _ = valid["compressed-tensors"]
    done = repair(damaged(original, kind, tmp_path / "damaged"), tmp_path / "out")
    assert len(done) == 2
    assert stored(tmp_path / "out") == stored(original.folder)


REQUANTIZE = [
    "NaN block scale",
    "global scale lost",
    "codes of half the width",
    "fused global scale scaled",
    "module lost",
    "input scale lost",
    "unquantized NaN",
]


@pytest.mark.parametrize("kind", REQUANTIZE)
def test_what_needs_quantizing_comes_from_the_arm_only(valid: Valid, kind: str, tmp_path: Path) -> None:
    original, arm = valid["compressed-tensors"]
    folder, out = damaged(original, TENSOR_KINDS[kind], tmp_path / "damaged"), tmp_path / "out"
    with pytest.raises(BrokenCheckpointError, match="--source ARM_DIR"):
        repair(folder, out)
    assert not out.exists()
    assert not out.with_name("out.partial").exists()
    with pytest.raises(UsageError, match="undo what was trained"):
        repair(folder, out, source=open_arm(arm).source.folder)
    assert not out.exists()
    assert "exported" in repair(folder, out, source=arm)[0]
    assert stored(out) == stored(original.folder)
    assert check(out, source=arm) == []


def test_another_arm_is_refused(valid: Valid, tmp_path: Path) -> None:
    """The PTQ arm of the same original would undo the training of a QAD arm."""
    original, arm = valid["modelopt"]
    opened = open_arm(arm)
    masters = {f"{m}.weight": opened.weight(f"{m}.weight").float() * 1.1 + 0.01 for m in (opened.selection or opened).modules}  # type: ignore[union-attr]
    run_stage(
        "arm",
        tmp_path / "qad",
        {},
        {},
        lambda f: write_arm(f, "qad", opened.source, opened.selection, dict(opened.input_scales), masters),
    )
    run_stage("arm", tmp_path / "bf16", {}, {}, lambda f: write_arm(f, "bf16", opened.source, None, {}))
    folder = damaged(original, TENSOR_KINDS["global scale lost"], tmp_path / "damaged")
    for source in (tmp_path / "qad", tmp_path / "bf16"):
        with pytest.raises(UsageError, match="undo what was trained"):
            repair(folder, tmp_path / "out", source=source)
    assert not (tmp_path / "out").exists()


def test_the_manifest_vouches_where_nothing_is_whole(valid: Valid, tmp_path: Path) -> None:
    original, arm = valid["modelopt"]
    folder = Path(shutil.copytree(original.folder, tmp_path / "damaged"))
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"garbage")
    assert "names this arm" in repair(folder, tmp_path / "out", source=arm)[0]
    assert stored(tmp_path / "out") == stored(original.folder)
    (folder / "qad_manifest.json").unlink()
    with pytest.raises(UsageError, match="not known to be the arm"):
        repair(folder, tmp_path / "out2", source=arm)


def test_the_command_repairs_and_says_what_it_did(valid: Valid, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original, _ = valid["modelopt"]
    whole, out = str(original.folder), tmp_path / "out"
    assert main(["check", whole, "--fix", str(out)]) == 0
    assert not out.exists()
    assert "nothing to repair" in capsys.readouterr().err
    folder = str(damaged(original, METADATA_KINDS["config groups"], tmp_path / "damaged"))
    assert main(["check", folder, "--fix", str(out), "--json"]) == 0
    told: Any = capsys.readouterr()
    assert json.loads(told.out) == {"ok": True, "findings": []}
    assert "fix: quantization_config: config_groups" in told.err
    lost = str(damaged(original, TENSOR_KINDS["global scale lost"], tmp_path / "lost"))
    assert main(["check", lost, "--fix", str(tmp_path / "out2")]) == 1
    assert main(["check", lost, "--fix", lost]) == 2


def test_an_arm_with_frozen_scales_is_known_by_them(valid: Valid, tmp_path: Path) -> None:
    opened = open_arm(valid["modelopt"][1])
    selection = opened.selection
    assert selection is not None
    frozen: dict[str, nvfp4.FrozenScales] = {}
    for group in selection.groups:
        for name, q in quantize_group({m: opened.weight(f"{m}.weight") for m in group}).items():
            stored_bytes = q.block_scale.view(torch.uint8)
            larger = (stored_bytes + (stored_bytes < 0x7E)).view(torch.float8_e4m3fn)
            frozen[name] = nvfp4.FrozenScales(larger, q.global_scale)
    arm = tmp_path / "arm"
    parts = ("ptq", opened.source, selection, dict(opened.input_scales))
    run_stage("arm", arm, {}, {}, lambda f: write_arm(f, *parts, scales="mse", frozen=frozen))
    for layout in LAYOUTS:
        export_arm(arm, tmp_path / layout, layout=layout)
        assert [f for f in check(tmp_path / layout, source=arm) if f.rule == "W3"] == []
        folder = damaged(Checkpoint(tmp_path / layout), TENSOR_KINDS["global scale lost"], tmp_path / f"{layout} damaged")
        assert "13 of 13" in repair(folder, tmp_path / f"{layout} out", source=arm)[0]
        assert stored(tmp_path / f"{layout} out") == stored(tmp_path / layout)
