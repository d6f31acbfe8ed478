"""`qad convert`: the other layout with the same codes and scales, and back; refused where there is nothing to convert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import export.convert as convert_module
from export.check import check
from export.convert import convert
from export.writer import export_arm
from qad.command.cli import main
from qad.errors import BrokenCheckpointError, StorageError, UsageError

LAYOUTS = ["modelopt", "compressed-tensors"]
OTHER = dict(zip(LAYOUTS, reversed(LAYOUTS), strict=True))


@pytest.fixture(scope="module", params=["NVFP4", "W4A16_NVFP4"])
def exports(
    request: pytest.FixtureRequest, tiny_llama_dir: Path, build_arm: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Layout -> export of one arm, in several shards."""
    root = tmp_path_factory.mktemp("convert")
    arm = build_arm(tiny_llama_dir, root / "arm", request.param)
    for layout in LAYOUTS:
        export_arm(arm, root / layout, layout=layout, shard_size=40_000)
    return {"arm": arm, **{layout: root / layout for layout in LAYOUTS}}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(a: Path, b: Path, ulps: int) -> None:
    """Every tensor to the bit; FP32 scalars (the global and input scales) within `ulps`."""
    left, right = stored(a), stored(b)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape)
        if tensor.dtype == torch.float32:
            assert int((tensor.view(torch.int32) - right[name].view(torch.int32)).abs().max()) <= ulps
        else:
            assert as_bytes(tensor) == as_bytes(right[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_is_the_export_in_that_layout(exports: dict[str, Path], tmp_path: Path, layout: str) -> None:
    source, out = exports[OTHER[layout]], tmp_path / "out"
    convert(source, layout, out)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_same(out, exports[layout], ulps=0 if layout == "compressed-tensors" else 1)
    assert check(out) == []
    assert check(out, source=exports["arm"]) == []
    wanted = {p.name for p in exports[layout].iterdir()}
    assert {p.name for p in out.iterdir()} == wanted
    for name in wanted - {"qad_manifest.json"} - {p.name for p in out.glob("*.safetensors*")}:
        assert (out / name).read_bytes() == (exports[layout] / name).read_bytes(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_the_same_but_for_one_ulp_of_the_scalars(exports: dict[str, Path], tmp_path: Path, layout: str) -> None:
    start = exports[layout]
    convert(start, OTHER[layout], tmp_path / "there")
    convert(tmp_path / "there", layout, tmp_path / "back")
    assert_same(start, tmp_path / "back", ulps=1)
    convert(tmp_path / "back", OTHER[layout], tmp_path / "there again")
    convert(tmp_path / "there again", layout, tmp_path / "back again")
    assert_same(tmp_path / "back", tmp_path / "back again", ulps=0)
    assert_same(tmp_path / "there", tmp_path / "there again", ulps=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_that_has_the_layout_is_refused(exports: dict[str, Path], tmp_path: Path, layout: str) -> None:
    with pytest.raises(UsageError, match="layout already"):
        convert(exports[layout], layout, tmp_path / "out")
    assert main(["convert", str(exports[layout]), "--layout", layout, "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_what_is_not_quantized_or_unknown_is_refused(exports: dict[str, Path], tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not quantized"):
        convert(tiny_llama_dir, "modelopt", tmp_path / "out")
    with pytest.raises(UsageError, match="gguf"):
        convert(exports["modelopt"], "gguf", tmp_path / "out")
    with pytest.raises(UsageError, match="choose another folder"):
        convert(exports["modelopt"], "compressed-tensors", exports["modelopt"])


@pytest.mark.parametrize("what", ["one module", "metadata only"])
def test_a_half_converted_folder_is_refused(exports: dict[str, Path], tmp_path: Path, what: str) -> None:
    source = Path(shutil.copytree(exports["modelopt"], tmp_path / "half"))
    if what == "metadata only":
        shutil.copyfile(exports["compressed-tensors"] / "config.json", source / "config.json")
    else:
        file = next(f for f in sorted(source.glob("*.safetensors")) if any(n.endswith("_2") for n in load_file(f)))
        tensors = load_file(file)
        module = next(n for n in tensors if n.endswith("weight_scale_2")).removesuffix(".weight_scale_2")
        tensors[f"{module}.weight_packed"] = tensors.pop(f"{module}.weight")
        tensors[f"{module}.weight_global_scale"] = 1 / tensors.pop(f"{module}.weight_scale_2").reshape(1)
        save_file(tensors, file, metadata={"format": "pt"})
    (source / "qad_manifest.json").unlink()
    for layout in LAYOUTS:
        with pytest.raises(BrokenCheckpointError, match="does not pass"):
            convert(source, layout, tmp_path / "out")
        assert main(["convert", str(source), "--layout", layout, "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_other_files_and_foreign_metadata_go_along_and_the_source_is_untouched(exports: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(exports["modelopt"], tmp_path / "söurce folder"))
    (source / "qad_manifest.json").unlink()
    (source / "images").mkdir()
    (source / "images" / "plot.png").write_bytes(b"png")
    (source / ".cache").mkdir()
    (source / ".cache" / "lock").write_bytes(b"")
    (source / "README.md").write_text("---\ntags:\n- modelopt\n---\nAnother's card\n")
    for file in source.glob("*.safetensors"):
        save_file(load_file(file), file, metadata={"format": "pt", "made_by": "someone"})
    before = {p.relative_to(source): p.read_bytes() for p in source.rglob("*") if p.is_file()}
    convert(source, "compressed-tensors", tmp_path / "out")
    assert {p.relative_to(source): p.read_bytes() for p in source.rglob("*") if p.is_file()} == before
    assert (tmp_path / "out" / "images" / "plot.png").read_bytes() == b"png"
    assert (tmp_path / "out" / "README.md").read_bytes() == before[Path("README.md")]
    assert not (tmp_path / "out" / ".cache").exists()
    header = (tmp_path / "out" / next(source.glob("*.safetensors")).name).read_bytes()[8:200]
    assert b'"made_by":"someone"' in header


def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(
    exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = convert_module.write_file
    calls = []

    def fail_at_the_second(*args: object) -> str:
        calls.append(args)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return written(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "write_file", fail_at_the_second)
        with pytest.raises(StorageError):
            convert(exports["modelopt"], "compressed-tensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert(exports["modelopt"], "compressed-tensors", tmp_path / "out")
    assert check(tmp_path / "out") == []


def test_kv_scales_change_their_names_and_come_back(exports: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(exports["modelopt"], tmp_path / "kv"))
    (source / "qad_manifest.json").unlink()
    index = json.loads((source / "model.safetensors.index.json").read_text())
    value = 0.25
    for layer in (0, 1):
        for cache in ("k", "v"):
            name = f"model.layers.{layer}.self_attn.{cache}_proj.{cache}_scale"
            file = source / index["weight_map"][name.replace(f"{cache}_scale", "weight")]
            save_file({**load_file(file), name: torch.tensor(value)}, file, metadata={"format": "pt"})
            index["weight_map"][name] = file.name
            index["metadata"]["total_size"] += 4
            value *= 2
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    config, nested = (json.loads((source / name).read_text()) for name in ("config.json", "hf_quant_config.json"))
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    nested["quantization"]["kv_cache_quant_algo"] = "FP8"
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text(json.dumps(nested))
    assert check(source) == []
    convert(source, "compressed-tensors", tmp_path / "there")
    there = stored(tmp_path / "there")
    assert as_bytes(there["model.layers.0.self_attn.v_scale"]) == as_bytes(torch.tensor([0.5]))
    assert check(tmp_path / "there") == []
    convert(tmp_path / "there", "modelopt", tmp_path / "back")
    assert check(tmp_path / "back") == []
    assert_same(source, tmp_path / "back", ulps=1)
    assert json.loads((tmp_path / "back" / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_the_command_converts(exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["convert", str(exports["modelopt"]), "--layout", "compressed-tensors", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert main(argv) == 0  # reused
    assert capsys.readouterr().out.count("checkpoint: ") == 2
