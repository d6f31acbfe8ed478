"""What the model class never loads goes along; a head that was trained apart from a tied embedding is exported as its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import qad.hf  # noqa: F401
from export.check import check
from export.convert import convert
from export.layouts.config_files import CONFIG, NESTED
from export.repair import repair
from export.writer import export_arm
from qad.arms.arm import open_arm, write_arm
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.errors import ArtifactError
from qad.model.loader import load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.training.student import Student

LAYOUTS = ["modelopt", "compressed-tensors"]
MTP = {
    "mtp.fc.weight": (64, 128),
    "mtp.norm.weight": (64,),
    "mtp.layers.0.mlp.up_proj.weight": (128, 64),
    "mtp.layers.0.mlp.experts.down_proj": (2, 64, 32),
}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def with_mtp(tiny_llama_dir: Path, build_arm: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, whose class loads nothing below mtp, and its arm."""
    root = tmp_path_factory.mktemp("mtp")
    source = Path(shutil.copytree(tiny_llama_dir, root / "source"))
    g = torch.Generator().manual_seed(4)
    extra = {name: torch.randn(shape, generator=g).bfloat16() for name, shape in MTP.items()}
    save_file({**load_file(source / "model.safetensors"), **extra}, source / "model.safetensors", metadata={"format": "pt"})
    build_arm(source, root / "arm")
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_the_class_never_loads_are_carried_over(with_mtp: Path, layout: str, tmp_path: Path) -> None:
    export_arm(with_mtp / "arm", tmp_path / "out", layout=layout)
    stored, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", with_mtp / "source"))
    for name in MTP:
        assert stored[name].dtype == torch.bfloat16
        assert as_bytes(stored[name]) == as_bytes(source[name])
    ignore = json.loads((tmp_path / "out" / CONFIG).read_text())["quantization_config"]["ignore"]
    assert {"mtp.fc", "mtp.layers.0.mlp.up_proj"} <= {*ignore}
    assert "mtp.norm" not in ignore
    findings = check(tmp_path / "out", source=with_mtp / "arm")
    assert {(f.rule, f.severity) for f in findings} == {("E11", "warning")}


def test_a_draft_model_that_is_not_excluded_is_warned_about(with_mtp: Path, tmp_path: Path) -> None:
    export_arm(with_mtp / "arm", tmp_path / "out")
    for name, block, key in ((CONFIG, "quantization_config", "ignore"), (NESTED, "quantization", "exclude_modules")):
        value = json.loads((tmp_path / "out" / name).read_text())
        value[block][key].remove("mtp.fc")
        (tmp_path / "out" / name).write_text(json.dumps(value))
    assert [(f.rule, f.severity) for f in check(tmp_path / "out") if f.module == "mtp.fc"] == [("E7", "warning")]
    convert(tmp_path / "out", "compressed-tensors", tmp_path / "converted")
    assert [f for f in check(tmp_path / "converted") if f.rule == "E7"] == []


def arm_with_a_head(tiny_llama_dir: Path, folder: Path, head: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """An arm of a tied source with masters for all weights and a head of its own."""
    source = open_checkpoint(tiny_llama_dir)
    selection = select(load_skeleton(source), "W4A16_NVFP4")
    masters = {name: parameter.detach() for name, parameter in load_model(source, "float32", "cpu").named_parameters()}
    masters["lm_head.weight"] = head(masters["model.embed_tokens.weight"]).clone()
    run_stage("arm", folder, {}, {}, lambda f: write_arm(f, "qad", source, selection, {}, masters))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_training_untied_is_stored_and_said_to_be_untied(tiny_llama_dir: Path, layout: str, tmp_path: Path) -> None:
    arm = arm_with_a_head(tiny_llama_dir, tmp_path / "arm", lambda embedding: embedding * 1.5)
    export_arm(arm, tmp_path / "out", layout=layout)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["tie_word_embeddings"] is False
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert as_bytes(stored["lm_head.weight"]) == as_bytes(open_arm(arm).weight("lm_head.weight").bfloat16())
    assert check(tmp_path / "out", source=arm) == []
    if layout == "modelopt":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        assert torch.equal(model.lm_head.weight, stored["lm_head.weight"].float())
        assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_head_that_is_still_the_embedding_stays_tied(tiny_llama_dir: Path, tmp_path: Path) -> None:
    arm = arm_with_a_head(tiny_llama_dir, tmp_path / "arm", lambda embedding: embedding)
    export_arm(arm, tmp_path / "out")
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert check(tmp_path / "out", source=arm) == []


def test_the_trainer_keeps_tied_weights_tied(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """One master for both, so that no training of ours unties them; an arm that did cannot start another one."""
    untied = arm_with_a_head(tiny_llama_dir, tmp_path / "untied", lambda embedding: embedding * 2)
    tied = arm_with_a_head(tiny_llama_dir, tmp_path / "tied", lambda embedding: embedding)
    model = load_model(open_checkpoint(tiny_llama_dir), "float32", "cpu")
    assert "lm_head.weight" not in Student(open_arm(tied), model).masters
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(ArtifactError, match="untie them in the source"):
        Student(open_arm(untied), model)


def test_a_head_of_another_shape_is_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    arm = arm_with_a_head(tiny_llama_dir, tmp_path / "arm", lambda embedding: embedding[:-1])
    with pytest.raises(ArtifactError, match=r"trained lm_head\.weight"):
        export_arm(arm, tmp_path / "out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_another_name_is_excluded_under_that_of_vllm_too(
    build_arm: Callable[..., Path], make_tokenizer: Callable[[Path], object], layout: str, tmp_path: Path
) -> None:
    """vLLM makes lm_head of GPT-NeoX's embed_out and would wait for its scales; an older list's lack is found and repaired."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 512}
    AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes)).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    make_tokenizer(tmp_path / "source")
    out = tmp_path / "out"
    export_arm(build_arm(tmp_path / "source", tmp_path / "arm"), out, layout=layout)
    assert check(out) == []
    (other,) = {*LAYOUTS} - {layout}
    convert(out, other, tmp_path / "converted")
    assert check(tmp_path / "converted") == []
    if layout == "modelopt":
        for name in (CONFIG, NESTED):
            raw = json.loads((out / name).read_text())
            (raw["quantization_config"]["ignore"] if name == CONFIG else raw["quantization"]["exclude_modules"]).remove("lm_head")
            (out / name).write_text(json.dumps(raw))
        (error,) = (finding for finding in check(out) if finding.severity == "error")
        assert (error.rule, error.module) == ("E7", "lm_head")
        repair(out, tmp_path / "repaired")
        assert check(tmp_path / "repaired") == []
