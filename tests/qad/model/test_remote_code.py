"""Code that a model folder brings along goes with the export, and is run only on demand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers.dynamic_module_utils

from export.check import check
from export.writer import export_arm
from qad.arms.arm import write_arm
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.command.cli import main
from qad.errors import SourceError
from qad.model.loader import load_model, load_skeleton, load_tokenizer, remote_code
from qad.model.source import open_checkpoint

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Is there once the code has run."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "was run"


def own_model(tiny_llama_dir: Path, to: Path, marker: Path, model_type: str) -> Path:
    shutil.copytree(tiny_llama_dir, to)
    (to / "modeling_own.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((to / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": AUTO_MAP, "architectures": ["OwnForCausalLM"]}
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_it_is_not_run_without_being_trusted(tiny_llama_dir: Path, tmp_path: Path, marker: Path) -> None:
    source = open_checkpoint(own_model(tiny_llama_dir, tmp_path / "own", marker, "own_llama"))
    for load in (load_skeleton, lambda s: load_model(s, "float32", "cpu")):
        with pytest.raises(SourceError, match="give --trust-remote-code"):
            load(source)
    load_tokenizer(source.folder)
    assert not marker.exists()
    with remote_code(True):
        assert type(load_skeleton(source)).__name__ == "OwnForCausalLM"
        assert marker.exists()
        model = load_model(source, "float32", "cpu")
    expected = load_model(open_checkpoint(tiny_llama_dir), "float32", "cpu")
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, expected(torch.tensor([[1, 2, 3]])).logits)
    with pytest.raises(SourceError, match="give --trust-remote-code"):
        load_skeleton(source)


def test_a_class_that_transformers_has_is_preferred(tiny_llama_dir: Path, tmp_path: Path, marker: Path) -> None:
    source = open_checkpoint(own_model(tiny_llama_dir, tmp_path / "own", marker, "llama"))
    assert type(load_skeleton(source)).__name__ == "LlamaForCausalLM"
    assert not marker.exists()


def test_it_goes_along_and_checking_never_runs_it(tiny_llama_dir: Path, tmp_path: Path, marker: Path) -> None:
    folder = own_model(tiny_llama_dir, tmp_path / "own", marker, "own_llama")
    source = open_checkpoint(folder)
    with remote_code(True):
        selection = select(load_skeleton(source), "W4A16_NVFP4")
    marker.unlink()
    run_stage("arm", tmp_path / "arm", {}, {}, lambda f: write_arm(f, "ptq", source, selection, {}))
    for layout in ("modelopt", "compressed-tensors"):
        out = tmp_path / layout
        export_arm(tmp_path / "arm", out, layout=layout)
        assert (out / "modeling_own.py").read_bytes() == (folder / "modeling_own.py").read_bytes()
        assert json.loads((out / "config.json").read_text())["auto_map"] == AUTO_MAP
        assert [f for f in check(out, source=tmp_path / "arm") if f.severity == "error"] == []
    assert not marker.exists()


def test_the_commands_that_load_models_have_the_flag(
    tiny_llama_dir: Path, tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_model(tiny_llama_dir, tmp_path / "own", marker, "own_llama")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "model": str(folder),
                "dtype": "float32",
                "quantize": {"format": "W4A16_NVFP4"},
                "calibrate": {"data": {"source": "random"}, "samples": 2, "seq_len": 16},
                "train": {"data": {"source": "random"}, "tokens": 64, "seq_len": 16, "validation_tokens": 16},
            }
        )
    )
    ptq = ["ptq", str(recipe), "--out", str(tmp_path / "arm")]
    assert main(ptq) == 2
    assert "give --trust-remote-code" in capsys.readouterr().err
    assert not marker.exists()
    assert main([*ptq, "--trust-remote-code"]) == 0
    assert marker.exists()
    for command in ("run", "plan", "ptq", "train", "measure accuracy", "measure parity"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        assert "--trust-remote-code" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("import flash_attn", "flash_attn"),
        ("__import__('absent_kernels')", "No module named 'absent_kernels'"),
        ("def f(:", "invalid syntax"),
        ("assert False, 'needs a newer version'", "needs a newer version"),
        ("[][0]", "list index out of range"),
    ],
)
def test_code_that_cannot_run_here_is_one_line(
    tiny_llama_dir: Path, tmp_path: Path, marker: Path, broken: str, named: str
) -> None:
    folder = own_model(tiny_llama_dir, tmp_path / "own", marker, "own_llama")
    code = folder / "modeling_own.py"
    code.write_text(f"{broken}\n{code.read_text()}")
    for load in (load_skeleton, lambda s: load_model(s, "float32", "cpu")):
        with remote_code(True), pytest.raises(SourceError) as refused:
            load(open_checkpoint(folder))
        assert named in str(refused.value)
        assert "\n" not in str(refused.value)
