"""What serving needs goes along with everything that is made from a model; what stays is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.convert import convert
from export.writer import export_arm
from qad.errors import SourceError
from qad.model.beside import WEIGHTS, beside
from qad.model.source import open_checkpoint

OWN = [
    "tekken.json",
    "SYSTEM_PROMPT.txt",
    "encoding/encoding_own.py",
    "encoding/deep/tables.json",
    "THIRD_PARTY_NOTICES.md",
    "LICENCE",
    "additional_chat_templates/rag.jinja",
    "spiece.vocab",
    "figures/a.png",
    "no_ending",
    "modeling.py",
]
WEIGHTS_TOO = ["pytorch_model.bin", "optimizer.pt", "model.gguf", "pytorch_model.bin.index.json", "rust_model.ot"]
MODELS = {
    "original": ["consolidated.00.pth", "params.json"],
    "onnx": ["model.onnx", "model.onnx_data", "config.json"],
    "checkpoint-500": ["model.safetensors", "tokenizer.json"],
}


def fill(folder: Path) -> None:
    names = [*OWN, *WEIGHTS_TOO, *(f"{model}/{name}" for model, held in MODELS.items() for name in held)]
    for name in [*names, ".git/HEAD", ".cache/huggingface/x.lock", "__pycache__/a.pyc", "encoding/__pycache__/b.pyc"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}")


def test_everything_but_weights_goes_along_with_export_and_conversion(
    make_llama: Callable[..., Path], build_arm: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_llama(tmp_path / "source")
    before = {path.name for path in source.iterdir()}
    fill(source)
    (source / ".eval_results").mkdir()
    (source / ".eval_results" / "gsm8k.yaml").write_text("the original's scores are not those of what is made from it")
    with pytest.warns(UserWarning, match=r"left behind in .*: checkpoint-500/ \(it holds weights\); onnx/ \(it holds weights\)"):
        export_arm(build_arm(source, tmp_path / "arm"), tmp_path / "out")
    convert(tmp_path / "out", "compressed-tensors", tmp_path / "converted")
    for folder in (tmp_path / "out", tmp_path / "converted"):
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        made = {"hf_quant_config.json"} if folder.name == "out" else set()
        assert files == before | made | {*OWN, "README.md", ".gitattributes", "qad_manifest.json"}
        assert all((folder / name).read_text() == f"content of {name}" for name in OWN)


def test_an_export_is_made_anew_where_a_file_beside_the_weights_has_changed(
    make_llama: Callable[..., Path], build_arm: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_llama(tmp_path / "source")
    arm, out = build_arm(source, tmp_path / "arm"), tmp_path / "out"
    first = export_arm(arm, out)
    assert export_arm(arm, out).manifest["created"] == first.manifest["created"]
    (source / "SYSTEM_PROMPT.txt").write_text("Be brief.")
    second = export_arm(arm, out, replace=True)
    assert (out / "SYSTEM_PROMPT.txt").read_text() == "Be brief."
    weights = [made.manifest["files"]["model.safetensors"]["sha256"] for made in (first, second)]
    assert weights[0] == weights[1]


def test_what_stays_is_named_with_its_reason(tmp_path: Path) -> None:
    fill(tmp_path)
    with (tmp_path / "huge.dat").open("wb") as file:
        file.truncate(100_000_001)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "everything").symlink_to("/", target_is_directory=True)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "cached.txt").symlink_to(tmp_path / "no_ending")  # as in the hub's cache
    (tmp_path / "many").mkdir()
    for i in range(1001):
        (tmp_path / "many" / f"{i}.txt").touch()
    found = beside(tmp_path, ("modeling.py",))
    assert {path.as_posix() for path in found.files} == {*OWN, "cached.txt"} - {"modeling.py"}
    assert found.left == {
        "checkpoint-500/": "it holds weights",
        "circle": "no regular file",
        "everything/": "a link to a folder",
        "huge.dat": "huge.dat has 100,000,001 bytes, more than what lies beside weights",
        "many/": "more than 1,000 files",
        "onnx/": "it holds weights",
        "original/": "it holds weights",
        "pipe": "no regular file",
    }


def test_the_same_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def fetch(model: str, **options: Any) -> str:
        asked.update(options)
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(SourceError, match="offline"):
        open_checkpoint("owner/model")
    wanted = [*OWN, "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "README.md"]
    others = [f"model{suffix}" for suffix in WEIGHTS if suffix != ".safetensors"]
    others += [
        "original/consolidated.00.pth",
        "original/params.json",
        "onnx/config.json",
        "consolidated.safetensors",
        "checkpoint-500/model.safetensors",
        "pytorch_model.bin.index.json",
    ]
    assert list(filter_repo_objects([*wanted, *others], **asked)) == wanted
