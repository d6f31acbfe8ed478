"""What a user can hand in that is no model or no checkpoint: one line, exit 2 (1 for a broken checkpoint), the input as it
was, nothing under the final name."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import SafetensorError

import export.files.safetensors_writer as safetensors_writer
import qad.arms.arm
import qad.model.source
import qad.training.stages
from export.writer import export_arm
from qad.command.cli import main
from qad.model.source import Checkpoint

BuildArm = Callable[..., Path]
INDEX = "model.safetensors.index.json"
SENTENCE = "The river runs past the mill for the {0}th time, and a heron waits {0} hours for fish."


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def half_download(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_shard(folder: Path) -> None:
    edit_index(folder, lambda weight_map: {**weight_map, "model.norm.weight": "model-00009-of-00009.safetensors"})


def point_outside(folder: Path) -> None:
    edit_index(folder, lambda weight_map: {**weight_map, "model.norm.weight": "../secret.safetensors"})


def disagree(folder: Path) -> None:
    edit_index(folder, lambda weight_map: {**weight_map, "model.nothing.weight": next(iter(weight_map.values()))})


def edit_index(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    path = folder / INDEX
    file = next(iter(folder.glob("*.safetensors"))).name
    index = json.loads(path.read_text()) if path.is_file() else {"weight_map": {"model.norm.weight": file}}
    path.write_text(json.dumps({**index, "weight_map": change(index["weight_map"])}))


def to_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def to_gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_suffix(".gguf"))


def to_pickle(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))


def quantize_already(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


BROKEN = {f.__name__: f for f in (half_download, lose_shard, point_outside, disagree)}
NO_MODEL = {f.__name__: f for f in (to_adapter, to_gguf, to_pickle)}
FAULTS: dict[str, Callable[[Path], None]] = {**BROKEN, **NO_MODEL, "quantize_already": quantize_already}


@pytest.fixture
def source(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "mödel, with spaces"))


def write_recipe(folder: Path, model: Path, format: str = "W4A16_NVFP4") -> Path:
    text = folder / "text.jsonl"
    lines = [" ".join(SENTENCE.format(17 * i + j) for j in range(6)) for i in range(200)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    recipe = {
        "model": str(model),
        "dtype": "float32",
        "quantize": {"format": format},
        "calibrate": {"data": str(text), "samples": 4, "seq_len": 32},
        "train": {"data": str(text), "tokens": 512, "seq_len": 32, "batch_size": 4, "validation_tokens": 128},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "measure": {"fidelity": None}}))
    return folder / "recipe.yaml"


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qad: error:")]
    assert len(errors) == 1
    return errors[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_ptq_of_what_is_no_whole_model(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    FAULTS[fault](source)
    before = digests(source)
    assert main(["ptq", str(write_recipe(tmp_path, source)), "--out", str(tmp_path / "arm")]) == 2
    one_line(capsys)
    assert digests(source) == before
    assert not list(tmp_path.glob("arm*"))


@pytest.mark.parametrize("fault", ["half_download", "lose_shard", "quantize_already"])
def test_export_of_a_source_that_broke_since(
    source: Path, build_arm: BuildArm, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    arm = build_arm(source, tmp_path / "arm", "W4A16_NVFP4")
    FAULTS[fault](source)
    before = digests(source), digests(arm)
    assert main(["export", str(arm), "--out", str(tmp_path / "out")]) == 2
    one_line(capsys)
    assert (digests(source), digests(arm)) == before
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("fault", {**BROKEN, **NO_MODEL})
def test_check_and_convert_of_what_is_no_whole_checkpoint(
    arm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """A broken checkpoint is a negative verdict, 1; what is none at all is an input error, 2."""
    folder, out = tmp_path / "ünd Leerzeichen", tmp_path / "out"
    export_arm(arm_dir, folder, shard_size=50_000)
    FAULTS[fault](folder)
    before, code = digests(folder), 1 if fault in BROKEN else 2
    assert main(["check", str(folder)]) == code
    assert ("error: E11" in capsys.readouterr().out) == (code == 1)
    assert main(["convert", str(folder), "--layout", "compressed-tensors", "--out", str(out)]) == code
    one_line(capsys)
    assert digests(folder) == before
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("command", ["ptq", "export", "convert"])
def test_a_disk_that_is_full_or_read_only(
    source: Path,
    arm_dir: Path,
    exported_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    fault: int,
) -> None:
    argv = {
        "ptq": ["ptq", str(write_recipe(tmp_path, source))],
        "export": ["export", str(arm_dir)],
        "convert": ["convert", str(exported_dir), "--layout", "compressed-tensors"],
    }[command]
    read = {"ptq": source, "export": arm_dir, "convert": exported_dir}[command]
    before = digests(read)
    reason = OSError(fault, "cannot be written")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise reason

    with monkeypatch.context() as patch:
        if fault != errno.ENOSPC:
            patch.setattr(Path, "mkdir", fail)
        elif command == "ptq":
            reason = SafetensorError("Error while serializing: I/O error: cannot be written")  # type: ignore[assignment]
            patch.setattr(qad.arms.arm.Path, "write_text", lambda *a, **k: fail())
        else:
            patch.setattr(safetensors_writer.os, "fsync", fail)
        assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "cannot be written" in one_line(capsys)
    assert digests(read) == before
    assert not (tmp_path / "out").exists()


def test_ptq_for_weights_alone_loads_no_model_and_holds_one_tensor(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("W4A16 needs no forward pass")

    held: set[int] = set()
    most: list[int] = []
    read = Checkpoint.get

    def counted(self: Checkpoint, name: str) -> Any:
        tensor = read(self, name)
        held.add(id(tensor))
        weakref.finalize(tensor, held.discard, id(tensor))
        most.append(len(held))
        return tensor

    monkeypatch.setattr(qad.training.stages, "load_model", refuse)
    monkeypatch.setattr(Checkpoint, "get", counted)
    before = digests(source)
    assert main(["ptq", str(write_recipe(tmp_path, source)), "--out", str(tmp_path / "arm")]) == 0
    assert len(most) == len(qad.model.source.open_checkpoint(source).tensors)  # each read once
    assert max(most) <= 2  # the next one is mapped before the last one goes
    assert digests(source) == before


def test_an_arm_is_no_checkpoint_and_the_message_says_so(arm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(arm_dir)]) == 2
    assert "give a Hugging Face checkpoint folder (of an arm, which `qad export` makes)" in capsys.readouterr().err
