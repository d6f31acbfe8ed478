"""Every corruption is refused with the name of what is broken; untouched folders pass."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.check import Finding, check, to_json
from export.folder import Folder
from export.layouts.exclude import trtllm_excludes, vllm_excludes
from qad.artifact import MANIFEST
from qad.command.cli import main
from qad.errors import UsageError

Q, K, GATE, UP, DOWN = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.k_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.1.mlp.down_proj",
)
Tensors = dict[str, torch.Tensor]


def tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """A corruption of the weights file."""

    def corrupt(folder: Path) -> None:
        loaded = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
        change(loaded)
        save_file(loaded, folder / "model.safetensors", metadata={"format": "pt"})

    return corrupt


def outer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return edit("config.json", lambda config: change(config["quantization_config"]))


def nested(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return edit("hf_quant_config.json", lambda config: change(config["quantization"]))


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def corrupt(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return corrupt


def both(names: list[str]) -> Callable[[Path], None]:
    """The same exclude list in both places."""

    def corrupt(folder: Path) -> None:
        outer(lambda q: q.update(ignore=names))(folder)
        nested(lambda q: q.update(exclude_modules=names))(folder)

    return corrupt


def set_byte(name: str, value: int) -> Callable[[Tensors], None]:
    return lambda t: t[name].view(torch.uint8).view(-1).__setitem__(3, value)


def to_bf16(module: str) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        for leaf in ("weight_scale", "weight_scale_2", "input_scale"):
            del t[f"{module}.{leaf}"]
        packed = t[f"{module}.weight"]
        t[f"{module}.weight"] = torch.ones(packed.shape[0], packed.shape[1] * 2, dtype=torch.bfloat16)

    return change


def drop_layer(t: Tensors) -> None:
    for name in [n for n in t if n.startswith("model.layers.1.mlp")]:
        del t[name]


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def stale_shard(folder: Path) -> None:
    save_file({f"{DOWN}.weight_scale_2": torch.tensor(1.0)}, folder / "model-00001-of-00002.safetensors")


def add_kv(t: Tensors) -> None:
    t["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)


def announce_kv(folder: Path) -> None:
    outer(lambda q: q.update(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}))(folder)
    nested(lambda q: q.update(kv_cache_quant_algo="FP8"))(folder)


def lone_k_scale(folder: Path) -> None:
    announce_kv(folder)
    tensors(add_kv)(folder)


def wrong_index(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    weight_map = {n: "model.safetensors" for n in names if n != f"{UP}.weight"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def missing_shard(folder: Path) -> None:
    weight_map = {n: "model.safetensors" for n in load_file(folder / "model.safetensors")}
    weight_map["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# name -> (rule, what must be named, corruption)
CORRUPTIONS: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "missing input_scale": ("E3", Q, tensors(lambda t: t.pop(f"{Q}.input_scale"))),
    "missing weight_scale_2": ("E3", DOWN, tensors(lambda t: t.pop(f"{DOWN}.weight_scale_2"))),
    "missing weight_scale": ("E3", UP, tensors(lambda t: t.pop(f"{UP}.weight_scale"))),
    "missing weight": ("E3", K, tensors(lambda t: t.pop(f"{K}.weight"))),
    "weight_scale as uint8": (
        "E3",
        Q,
        tensors(lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].view(torch.uint8)})),
    ),
    "weight_scale as bf16": ("E3", Q, tensors(lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].bfloat16()}))),
    "half-width weight": ("E3", DOWN, tensors(lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"][:, ::2].contiguous()}))),
    "transposed scale": ("E3", UP, tensors(lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].T.contiguous()}))),
    "leaked buffer": ("E3", GATE, tensors(lambda t: t.update({f"{GATE}._amax": torch.ones(1)}))),
    "zero weight_scale_2": ("E3", DOWN, tensors(lambda t: t[f"{DOWN}.weight_scale_2"].fill_(0.0))),
    "negative weight_scale_2": ("E3", DOWN, tensors(lambda t: t[f"{DOWN}.weight_scale_2"].neg_())),
    "nan weight_scale_2": ("E3", DOWN, tensors(lambda t: t[f"{DOWN}.weight_scale_2"].fill_(float("nan")))),
    "infinite input_scale": ("E3", DOWN, tensors(lambda t: t[f"{DOWN}.input_scale"].fill_(float("inf")))),
    "denormal input_scale": ("E3", DOWN, tensors(lambda t: t[f"{DOWN}.input_scale"].fill_(1e-40))),
    "weight_scale_2 as bf16": (
        "E3",
        DOWN,
        tensors(lambda t: t.update({f"{DOWN}.weight_scale_2": t[f"{DOWN}.weight_scale_2"].bfloat16()})),
    ),
    "nan scale byte": ("E4", GATE, tensors(set_byte(f"{GATE}.weight_scale", 0x7F))),
    "negative nan scale byte": ("E4", GATE, tensors(set_byte(f"{GATE}.weight_scale", 0xFF))),
    "negative scale byte": ("E4", GATE, tensors(set_byte(f"{GATE}.weight_scale", 0xB8))),
    "zero scale over codes": ("E4", GATE, tensors(set_byte(f"{GATE}.weight_scale", 0x00))),
    "nan norm": ("E4", "model.norm", tensors(lambda t: t["model.norm.weight"].view(-1).__setitem__(0, float("nan")))),
    "unequal global scales in q/k/v": ("E6", K, tensors(lambda t: t[f"{K}.weight_scale_2"].mul_(10))),
    "unequal global scales by one ulp": ("E6", GATE, tensors(lambda t: t[f"{GATE}.weight_scale_2"].view(torch.int32).add_(1))),
    "unequal input scales in gate/up": ("E6", UP, tensors(lambda t: t[f"{UP}.input_scale"].mul_(2))),
    "bf16 member of a fused group": ("E6", K, tensors(to_bf16(K))),
    "bf16 linear not excluded": ("E7", DOWN, tensors(to_bf16(DOWN))),
    "head not excluded": ("E7", "lm_head", both(["model.embed_tokens"])),
    "packed module excluded": ("E7", DOWN, both(["lm_head", "model.embed_tokens", DOWN])),
    "substring excludes": ("E7", DOWN, both(["lm_head", "model.embed_tokens", "layers.1.mlp.down"])),
    "wildcard excludes": ("E7", UP, both(["lm_head", "model.embed_tokens", "*mlp*"])),
    "part of q/k/v excluded": ("E7", Q, both(["lm_head", "model.embed_tokens", Q])),
    "trailing dot": ("E7", "lm_head.", both(["lm_head.", "lm_head", "model.embed_tokens"])),
    "scale on the tied head": (
        "E8",
        "lm_head",
        tensors(lambda t: t.update({"lm_head.weight_scale": torch.ones(4, 4).to(torch.float8_e4m3fn)})),
    ),
    "kv scale without algorithm": ("E10", "model.layers.0.self_attn.k_proj", tensors(add_kv)),
    "kv algorithm without scales": ("E10", "config.json", announce_kv),
    "k scale without v scale": ("E10", "model.layers.0.self_attn.k_proj", lone_k_scale),
    "truncated file": ("E11", "model.safetensors", truncate),
    "stale shard": ("E11", f"{DOWN}.weight_scale_2", stale_shard),
    "index lacks a tensor": ("E11", f"{UP}.weight", wrong_index),
    "layer missing": ("E11", "model.layers.1.mlp.gate_proj", tensors(drop_layer)),
    "norm missing": ("E11", "model.layers.0.input_layernorm", tensors(lambda t: t.pop("model.layers.0.input_layernorm.weight"))),
    "embedding cut": (
        "E11",
        "model.embed_tokens",
        tensors(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:100].clone()})),
    ),
    "no weights": ("E11", "*.safetensors", lambda f: (f / "model.safetensors").unlink()),
    "nested config missing": ("E1", "hf_quant_config.json", lambda f: (f / "hf_quant_config.json").unlink()),
    "outer config missing": ("E1", "config.json", edit("config.json", lambda c: c.pop("quantization_config"))),
    "group_size missing": ("E1", "hf_quant_config.json", nested(lambda q: q.pop("group_size"))),
    "kv key missing": ("E1", "hf_quant_config.json", nested(lambda q: q.pop("kv_cache_quant_algo"))),
    "group size 32": ("E1", "hf_quant_config.json", nested(lambda q: q.update(group_size=32))),
    "algorithms disagree": ("E1", "config.json", nested(lambda q: q.update(quant_algo="W4A16_NVFP4"))),
    "exclude lists disagree": ("E1", "model.embed_tokens", nested(lambda q: q.update(exclude_modules=["lm_head"]))),
    "input_activations missing": ("E3", DOWN, outer(lambda q: q["config_groups"]["group_0"].pop("input_activations"))),
    "empty weight": (
        "E3",
        UP,
        tensors(
            lambda t: t.update(
                {f"{UP}.weight": t[f"{UP}.weight"][:0].clone(), f"{UP}.weight_scale": t[f"{UP}.weight_scale"][:0].clone()}
            )
        ),
    ),
    "weight as int8": ("E3", UP, tensors(lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].view(torch.int8)}))),
    "embedding in fp8": (
        "E3",
        "model.embed_tokens",
        tensors(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].to(torch.float8_e4m3fn)})),
    ),
    "infinite embedding": (
        "E4",
        "model.embed_tokens",
        tensors(lambda t: t["model.embed_tokens.weight"].view(-1).__setitem__(77, float("inf"))),
    ),
    "shard of the index missing": ("E11", "model-00002-of-00002.safetensors", missing_shard),
    "weights are garbage": ("E11", "model.safetensors", lambda f: (f / "model.safetensors").write_bytes(b"garbage")),
    "bytes behind the weights": (
        "E11",
        "model.safetensors",
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes() + b"\0" * 64),
    ),
    "tokenizer cut off": ("E11", "tokenizer.json", lambda f: (f / "tokenizer.json").write_text("{")),
    "empty exclude": ("E7", DOWN, both(["lm_head", "model.embed_tokens", ""])),
    "quantization_config is text": ("E1", "config.json", edit("config.json", lambda c: c.update(quantization_config="NVFP4"))),
    "quant_method missing": ("E1", "config.json", outer(lambda q: q.pop("quant_method"))),
    "ignore is text": ("E1", "config.json", outer(lambda q: q.update(ignore="lm_head"))),
    "exclude list holds numbers": ("E1", "hf_quant_config.json", nested(lambda q: q.update(exclude_modules=[3]))),
    "config_groups is a list": ("E1", "config.json", outer(lambda q: q.update(config_groups=[1]))),
    "eight bits announced": ("E1", "config.json", outer(lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8))),
    "dynamic activations announced": (
        "E1",
        "config.json",
        outer(lambda q: q["config_groups"]["group_0"]["input_activations"].update(dynamic=True)),
    ),
    "no config group": ("E1", "config.json", outer(lambda q: q.update(config_groups={}))),
    "targets of a group are numbers": ("E1", "config.json", outer(lambda q: q["config_groups"]["group_0"].update(targets=[1]))),
    "outer group size 32": ("E1", "config.json", outer(lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=32))),
    "kv scheme in one place": ("E1", "config.json", outer(lambda q: q.update(kv_cache_scheme="FP8"))),
    "unknown kv algorithm": ("E1", "hf_quant_config.json", nested(lambda q: q.update(kv_cache_quant_algo="FP2"))),
    "FP8 announced over 4-bit codes": (
        "E2",
        "config.json",
        lambda f: (outer(lambda q: q.update(quant_algo="FP8"))(f), nested(lambda q: q.update(quant_algo="FP8"))(f)),
    ),
    "mixed precision without layers": (
        "E2",
        "config.json",
        lambda f: (
            outer(lambda q: q.update(quant_algo="MIXED_PRECISION"))(f),
            nested(lambda q: q.update(quant_algo="MIXED_PRECISION"))(f),
        ),
    ),
    "another quant_method": ("E1", "config.json", outer(lambda q: q.update(quant_method="awq"))),
    "quant_method of the other layout": ("E1", "config.json", outer(lambda q: q.update(quant_method="compressed-tensors"))),
    "config_groups missing": ("E1", "config.json", outer(lambda q: q.pop("config_groups"))),
    "dynamic missing": ("E1", "config.json", outer(lambda q: q["config_groups"]["group_0"]["weights"].pop("dynamic"))),
    "targets missing": ("E1", "config.json", outer(lambda q: q["config_groups"]["group_0"].pop("targets"))),
    "targets that are not there": (
        "E1",
        "config.json",
        outer(lambda q: q["config_groups"]["group_0"].update(targets=["Conv1d"])),
    ),
    "reciprocal global scale": ("E3", DOWN, tensors(lambda t: t[f"{DOWN}.weight_scale_2"].reciprocal_())),
    "tensor of the other layout": (
        "E3",
        DOWN,
        tensors(lambda t: t.update({f"{DOWN}.weight_packed": t[f"{DOWN}.weight"].clone()})),
    ),
    "config of another size": ("E3", GATE, edit("config.json", lambda c: c.update(intermediate_size=256))),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_refused_and_named(exported: Path, name: str) -> None:
    rule, named, corrupt = CORRUPTIONS[name]
    corrupt(exported)
    errors = [f for f in check(exported) if f.severity == "error"]
    assert any(f.rule == rule and named in f.module for f in errors), errors
    assert all(f.message and f.remedy for f in errors)


def test_the_untouched_export_passes(exported_dir: Path, arm_dir: Path) -> None:
    assert check(exported_dir) == []
    assert check(exported_dir, source=arm_dir) == []


def test_weights_of_another_arm_are_told_apart(exported: Path, arm_dir: Path) -> None:
    tensors(lambda t: t[f"{DOWN}.weight_scale_2"].mul_(1.5))(exported)
    found = check(exported, source=arm_dir)
    assert [(f.rule, f.module) for f in found] == [("W3", DOWN)]


def test_a_norm_of_another_arm_is_told_apart(exported: Path, arm_dir: Path) -> None:
    tensors(lambda t: t["model.norm.weight"].mul_(2))(exported)
    assert [(f.rule, f.severity, f.module) for f in check(exported, source=arm_dir)] == [("W3", "error", "model.norm")]


def test_one_code_that_is_not_the_arms_is_damage(exported: Path, arm_dir: Path) -> None:
    def nudge(t: Tensors) -> None:
        t[f"{DOWN}.weight"].view(-1)[0] ^= 1

    tensors(nudge)(exported)
    assert [(f.rule, f.severity, f.module) for f in check(exported, source=arm_dir)] == [("W3", "error", DOWN)]


def test_the_export_of_an_arm_with_nearly_the_same_weights_is_told_apart(exported: Path, arm_dir: Path) -> None:
    (exported / MANIFEST).unlink()  # as of another tool

    def nudge(t: Tensors) -> None:
        for name in t:
            if f"{name}_scale" in t:
                t[name].view(-1)[0] ^= 1

    tensors(nudge)(exported)
    assert [(f.rule, f.severity) for f in check(exported, source=arm_dir)] == [("W3", "warning")]


@pytest.mark.parametrize("place", [-1000, -2000, -1])
def test_a_flipped_bit_that_no_other_rule_sees_is_found_by_the_manifest(exported: Path, place: int) -> None:
    assert check(exported) == []
    file = exported / "model.safetensors"
    held = bytearray(file.read_bytes())
    held[place] ^= 1
    file.write_bytes(held)
    assert [(f.rule, f.severity, f.module) for f in check(exported)] == [("E12", "error", file.name)]
    (exported / MANIFEST).write_text('{"files": [1]}')  # nothing that says what was written
    assert check(exported) == []


def test_another_calibration_is_told_apart(exported: Path, arm_dir: Path) -> None:
    (exported / MANIFEST).unlink()  # as of another tool
    tensors(lambda t: t[f"{DOWN}.input_scale"].mul_(2))(exported)
    assert [(f.rule, f.severity, f.module) for f in check(exported, source=arm_dir)] == [("W3", "error", DOWN)]
    tensors(lambda t: [s.mul_(1.5) for n, s in t.items() if n.endswith("input_scale")])(exported)
    assert [(f.rule, f.severity) for f in check(exported, source=arm_dir)] == [("W3", "warning")]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda c: c.update(rms_norm_eps=0.5)),
        ("config.json", lambda c: c.update(num_attention_heads=2, head_dim=32, num_key_value_heads=1)),
        ("tokenizer.json", lambda t: t["model"]["merges"].pop()),
    ],
    ids=["norm epsilon", "heads", "a merge of the tokenizer lost"],
)
def test_what_the_source_has_otherwise_is_found(
    exported: Path, arm_dir: Path, name: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    edit(name, change)(exported)
    found = check(exported, source=arm_dir)
    assert {(f.rule, f.severity) for f in found} == {("W3", "error")}
    assert {f.module for f in found} == {name.removesuffix(".json") if name == "tokenizer.json" else name}


def test_another_chat_template_is_another_prompt(exported: Path, arm_dir: Path) -> None:
    template = exported / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert [(f.rule, f.module) for f in check(exported, source=arm_dir)] == [("W3", "tokenizer")]


def test_answers_end_and_are_drawn_as_the_sources(exported: Path, arm_dir: Path) -> None:
    file = exported / "generation_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "temperature": 9.0}))
    assert [(f.rule, f.module, f.severity) for f in check(exported, source=arm_dir)] == [("W3", file.name, "warning")]
    file.unlink()
    assert ("W3", file.name, "error") in [(f.rule, f.module, f.severity) for f in check(exported, source=arm_dir)]


def test_input_scales_that_nobody_measured_are_said(exported: Path, arm_dir: Path) -> None:
    path = exported / "model.safetensors"
    tensors = load_file(path)
    tensors |= {name: torch.ones_like(value) for name, value in tensors.items() if name.endswith(".input_scale")}
    save_file(tensors, path, {"format": "pt"})
    (exported / "qad_manifest.json").unlink()
    assert any("nothing was calibrated" in finding.message for finding in check(exported))
    told = [finding for finding in check(exported, source=arm_dir) if "times off" in finding.message]
    assert [(finding.rule, finding.severity) for finding in told] == [("W3", "error")]


def test_an_unknown_architecture_is_judged_by_its_files(exported: Path) -> None:
    edit("config.json", lambda c: c.update(model_type="nobody-knows"))(exported)
    assert [(f.rule, f.severity) for f in check(exported)] == [("E11", "warning")]
    tensors(lambda t: [t.pop(n) for n in list(t) if n.startswith(UP)])(exported)
    assert [(f.rule, f.module) for f in check(exported) if f.severity == "error"] == [("E11", UP)]


def test_an_exclusion_that_means_nothing_is_a_warning(exported: Path) -> None:
    both(["lm_head", "model.embed_tokens", "lm_heda"])(exported)
    assert [(f.rule, f.severity, f.module) for f in check(exported)] == [("E7", "warning", "lm_heda")]


def test_tensors_without_a_place_are_a_warning(exported: Path) -> None:
    (exported / MANIFEST).unlink()  # as of another tool
    tensors(lambda t: t.update({"teacher.model.norm.weight": torch.ones(3)}))(exported)
    found = check(exported)
    assert [(f.rule, f.severity, f.module) for f in found] == [("E11", "warning", "teacher.model.norm.weight")]


@pytest.mark.parametrize("arguments", [{"tp": 0}, {"engine": "sglang"}])
def test_impossible_arguments_are_refused(exported_dir: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected tp"):
        check(exported_dir, **arguments)


def test_an_fp8_checkpoint_of_another_kind_says_what_was_not_checked(exported: Path) -> None:
    (exported / MANIFEST).unlink()  # as of another tool

    def to_fp8(t: Tensors) -> None:
        for name in [n.removesuffix("_scale_2") for n in t if n.endswith("weight_scale_2")]:
            t[name] = torch.ones(t[name].shape[0], t[name].shape[1] * 2).to(torch.float8_e4m3fn)
            t[f"{name}_scale"] = t.pop(f"{name}_scale_2")

    tensors(to_fp8)(exported)
    outer(lambda q: q.update(quant_algo="FP8_PB_WO"))(exported)
    nested(lambda q: q.update(quant_algo="FP8_PB_WO"))(exported)
    assert [(f.rule, f.severity) for f in check(exported)] == [("E2", "warning")]


def test_tensor_parallelism_is_checked_before_it_fails(exported_dir: Path) -> None:
    assert [f for f in check(exported_dir, tp=4) if f.severity == "error"] == []
    assert any(f.rule == "W1" and f.module.endswith("k_proj") for f in check(exported_dir, tp=4))
    assert any(f.rule == "E5" and f.module.endswith("o_proj") for f in check(exported_dir, tp=8))


def test_other_algorithms_are_unsupported_and_not_broken(exported: Path) -> None:
    outer(lambda q: q.update(quant_algo="NVFP4_AWQ"))(exported)
    nested(lambda q: q.update(quant_algo="NVFP4_AWQ"))(exported)
    assert [(f.rule, f.severity) for f in check(exported)] == [("E2", "warning")]


@pytest.mark.parametrize("what", ["missing", "bf16", "empty"])
def test_what_is_no_nvfp4_folder_is_a_usage_error(tiny_llama_dir: Path, tmp_path: Path, what: str) -> None:
    folder = {"missing": tmp_path / "none", "bf16": tiny_llama_dir, "empty": tmp_path}[what]
    with pytest.raises(UsageError):
        check(folder)
    assert main(["check", str(folder)]) == 2


def test_exit_codes_and_json(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(exported)]) == 0
    capsys.readouterr()
    tensors(set_byte(f"{GATE}.weight_scale", 0x7F))(exported)
    assert main(["check", str(exported), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert set(report["findings"][0]) == {"rule", "severity", "module", "engine", "message", "remedy"}
    assert main(["check", str(exported)]) == 1
    assert re.search(rf"error: E4 {GATE}", capsys.readouterr().out)


def test_warnings_pass_unless_strict(exported: Path) -> None:
    outer(lambda q: q.update(quant_algo="OTHER"))(exported)
    nested(lambda q: q.update(quant_algo="OTHER"))(exported)
    assert main(["check", str(exported)]) == 0
    assert main(["check", str(exported), "--strict"]) == 1


def test_findings_become_json() -> None:
    assert to_json([Finding("W1", "warning", "m", "all", "x", "y")])["ok"] is True


# --- the engines' matchers ---


@pytest.mark.parametrize(
    ("module", "patterns", "vllm", "trtllm"),
    [
        ("lm_head", ["lm_head"], True, True),
        ("model.layers.11.mlp.down_proj", ["model.layers.1"], True, False),  # vLLM: a substring
        ("model.layers.1.mlp.down_proj", ["model.layers.1"], True, True),  # TensorRT-LLM: an ancestor
        ("model.layers.0.mlp.gate_proj", ["model.layers.0.mlp.gate"], True, False),  # vLLM: inside gate_up_proj
        ("model.layers.0.self_attn.q_proj", ["*.self_attn.q_proj"], False, True),  # vLLM: not the fused qkv_proj
        ("model.layers.0.mlp.down_proj", ["re:.*down_proj"], False, True),
        ("model.layers.0.mlp.down_proj", ["*down_proj"], True, True),
        ("a.mlp.up_proj", ["a.mlp.gate_proj", "a.mlp.up_proj"], True, True),
        ("a.self_attn.o_proj", ["a.self_attn.q_proj"], False, False),
    ],
)
def test_matchers(module: str, patterns: list[str], vllm: bool, trtllm: bool) -> None:
    assert vllm_excludes(module, patterns) is vllm
    assert trtllm_excludes(module, patterns) is trtllm


def test_a_fused_member_that_does_not_exist_is_no_part() -> None:
    patterns = ["a.self_attn.q_proj"]
    assert vllm_excludes("a.self_attn.q_proj", patterns, {"a.self_attn.q_proj", "a.self_attn.o_proj"})
    with pytest.raises(ValueError, match="only part"):
        vllm_excludes("a.self_attn.q_proj", patterns, {"a.self_attn.q_proj", "a.self_attn.k_proj"})


def test_an_empty_pattern_excludes_everything_in_vllm() -> None:
    assert vllm_excludes("model.layers.0.mlp.down_proj", [""])
    assert not trtllm_excludes("model.layers.0.mlp.down_proj", ["", "re:("])


def test_part_of_a_fused_module_is_refused_by_vllm_and_excludes_all_in_tensorrt_llm() -> None:
    with pytest.raises(ValueError, match="only part"):
        vllm_excludes("a.self_attn.k_proj", ["a.self_attn.q_proj"])
    assert trtllm_excludes("a.self_attn.k_proj", ["a.self_attn.q_proj"])


def test_headers_and_scales_are_read_once_and_no_codes(exported_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a folder does not grow with its codes, eight ninths of it."""
    read: Counter[str] = Counter()
    get = Folder.get

    def counting(folder: Folder, name: str) -> torch.Tensor:
        read[name] += 1
        return get(folder, name)

    monkeypatch.setattr(Folder, "get", counting)
    assert not [f for f in check(exported_dir) if f.severity == "error"]
    stored = load_file(exported_dir / "model.safetensors")
    assert read == Counter(name for name, tensor in stored.items() if tensor.dtype != torch.uint8)


def test_a_token_without_a_row_is_warned_of(exported: Path) -> None:
    tokenizer = json.loads((exported / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 512, "content": "<|tool|>"})
    (exported / "tokenizer.json").write_text(json.dumps(tokenizer))
    (found,) = check(exported)
    assert (found.rule, found.severity, found.module) == ("E11", "warning", "tokenizer.json")
    assert "id 512 ('<|tool|>') has no row in the embedding, which has 512" in found.message


@pytest.mark.parametrize(
    ("ends", "messages"),
    [
        (2, []),
        ([300, 2], []),
        (None, []),
        (300, ["is 300, the tokenizer's end of text '<|im_end|>' is 2"]),
        ([300, 301], ["is [300, 301], the tokenizer's end of text '<|im_end|>' is 2"]),
        ([2, 512], ["is [2, 512], the embedding has 512 rows"]),
    ],
)
def test_a_text_ends_for_every_engine(ends: Any, messages: list[str], exported: Path) -> None:
    path = exported / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    found = check(exported)
    assert [(f.rule, f.severity, f.module) for f in found] == [("E11", "warning", path.name)] * len(messages)
    assert all(told in f.message for told, f in zip(messages, found, strict=True))


def test_a_tokenizer_of_transformers_5_alone_is_named(exported: Path) -> None:
    path = exported / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "TokenizersBackend"}))
    found = [finding for finding in check(exported) if finding.module == path.name]
    assert [(finding.rule, finding.severity) for finding in found] == [("E11", "warning")]
