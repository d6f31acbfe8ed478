"""The quantized KV cache: scales by policy from what goes into the cache, exported under the names of each layout."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from padding import padded
from safetensors.torch import load_file, save_file
from torch import nn

from export.check import check
from export.convert import convert
from export.repair import repair
from export.writer import export_arm
from qad.arms.arm import open_arm, write_arm
from qad.arms.kv_cache import attentions, kv_scales
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.errors import ArtifactError, SourceError, UsageError
from qad.model.loader import load_model, load_skeleton
from qad.model.source import Checkpoint, open_checkpoint
from qad.recipes.job import prepare
from qad.recipes.load import load_recipe
from qad.text.windows import Windows
from qad.training.calibrate import Calibration, calibrate

ATTENTIONS = [f"model.layers.{layer}.self_attn" for layer in (0, 1)]
NAMES = {f"{attention}.{cache}_scale" for attention in ATTENTIONS for cache in ("k", "v")}


@pytest.fixture(scope="module")
def source(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_llama(tmp_path_factory.mktemp("kv") / "llama", tie_word_embeddings=False))


def text() -> Windows:
    ids = torch.randint(0, 512, (6, 24), generator=torch.Generator().manual_seed(5))
    return Windows.of(ids, torch.arange(24).expand(6, 24).contiguous())


def found(source: Checkpoint, policy: str, windows: Windows | None = None, model: Any = None) -> Calibration:
    selection = select(load_skeleton(source), "W4A16_NVFP4")
    return calibrate(model or load_model(source, "float32", "cpu"), selection, windows or text(), kv_cache=policy)


def export(
    source: Checkpoint,
    root: Path,
    policy: str,
    layout: str = "modelopt",
    exclude: tuple[str, ...] = (),
    formats: dict[str, str] | None = None,
    **facts: str,
) -> Path:
    selection = select(load_skeleton(source), "W4A16_NVFP4", exclude=exclude, formats=formats or {})
    made = calibrate(load_model(source, "float32", "cpu"), selection, text(), kv_cache=policy)
    run_stage(
        "arm",
        root / "arm",
        {},
        {},
        lambda f: write_arm(f, "ptq", source, selection, made.input_scales, kv_scales=made.kv_scales, kv_cache=policy, **facts),
    )
    export_arm(root / "arm", root / "out", layout=layout)
    return root / "out"


def announced(folder: Path) -> tuple[Any, Any]:
    nested = folder / "hf_quant_config.json"
    outer = json.loads((folder / "config.json").read_text())["quantization_config"].get("kv_cache_scheme")
    return outer, json.loads(nested.read_text())["quantization"]["kv_cache_quant_algo"] if nested.is_file() else None


def test_the_scales_are_those_of_what_goes_into_the_cache(source: Checkpoint) -> None:
    """After rotary embedding, over all tokens: transformers' own cache is the witness."""
    model = load_model(source, "float32", "cpu")
    scales = found(source, "calibrated", model=model).kv_scales
    assert scales.keys() == NAMES
    with torch.no_grad():
        cache = model(text().input_ids_ST, use_cache=True).past_key_values
    for number, attention in enumerate(ATTENTIONS):
        for letter, stored in (("k", cache.layers[number].keys), ("v", cache.layers[number].values)):
            assert scales[f"{attention}.{letter}_scale"].item() * 448 == pytest.approx(stored.abs().max().item(), rel=1e-5)


def test_scales_differ_between_layers_and_none_is_the_default(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """K of standard deviation 20."""
    source = open_checkpoint(make_llama(tmp_path / "llama", tie_word_embeddings=False))
    model = load_model(source, "float32", "cpu")
    keys: list[torch.Tensor] = []
    for attention in ATTENTIONS:
        linear = model.get_submodule(f"{attention}.k_proj")
        hook = linear.register_forward_hook(lambda module, args, out: keys.append(out))
        with torch.no_grad():
            model(text().input_ids_ST)
            linear.weight.mul_(20 / keys[-1].std())
        hook.remove()
        keys.clear()
    scales = found(source, "calibrated", model=model).kv_scales
    assert all(scales[f"{attention}.k_scale"] * 448 > 40 for attention in ATTENTIONS)
    assert len({scale.item() for scale in scales.values()}) == 4
    assert all(scale != 1.0 for scale in scales.values())


def test_padding_is_not_observed(source: Checkpoint) -> None:
    alone = found(source, "calibrated").kv_scales
    wider = found(source, "calibrated", padded(text(), 5, 9, 400)).kv_scales
    for name, scale in alone.items():
        torch.testing.assert_close(wider[name], scale, rtol=1e-5, atol=0)


def test_policies() -> None:
    amax = {"a.k_scale": torch.tensor(896.0), "a.v_scale": torch.tensor(4.48)}
    assert kv_scales(amax, ["a"], "calibrated")["a.k_scale"] == 2.0
    assert kv_scales(amax, ["a"], "calibrated")["a.v_scale"] == torch.tensor(4.48) / 448
    assert [s.item() for s in kv_scales(amax, ["a"], "at_least_one").values()] == [2.0, 1.0]
    assert kv_scales({**amax, "a.v_scale": torch.zeros(())}, ["a"], "calibrated")["a.v_scale"] == torch.tensor(1.0) / 448
    with pytest.raises(SourceError, match="damaged"):
        kv_scales({**amax, "a.k_scale": torch.tensor(float("nan"))}, ["a"], "calibrated")
    with pytest.raises(SourceError, match=r"never saw what b\.k_scale"):
        kv_scales(amax, ["a", "b"], "calibrated")


def test_an_attention_without_v_is_refused() -> None:
    """V is K."""
    attention = nn.Module()
    attention.add_module("k_proj", nn.Linear(16, 16))
    with pytest.raises(UsageError, match=r"a has a k_proj but no v_proj.*kv_cache to off"):
        attentions(nn.ModuleDict({"a": attention}))
    with pytest.raises(UsageError, match="no attention"):
        attentions(nn.ModuleDict({"q_proj": nn.Linear(16, 16)}))


@pytest.mark.parametrize("exclude", [(), ("*.self_attn.*",)], ids=["packed", "bf16 attention"])
def test_each_attention_has_one_pair_under_the_names_of_the_layout(
    source: Checkpoint, tmp_path: Path, exclude: tuple[str, ...]
) -> None:
    out = export(source, tmp_path, "calibrated", exclude=exclude)
    stored = load_file(out / "model.safetensors")
    named = {f"{a}.{c}_proj.{c}_scale" for a in ATTENTIONS for c in ("k", "v")}
    assert {name for name in stored if name.endswith((".k_scale", ".v_scale"))} == named
    assert all(stored[name].shape == () and stored[name].dtype == torch.float32 for name in named)
    assert announced(out) == ({"dynamic": False, "num_bits": 8, "type": "float"}, "FP8")
    assert check(out, source=tmp_path / "arm") == []
    stored["model.layers.1.self_attn.v_proj.v_scale"] *= 1.5
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    assert ("W3", "error") in [(f.rule, f.severity) for f in check(out, source=tmp_path / "arm")]


def test_the_other_layout_has_them_beside_the_projections(source: Checkpoint, tmp_path: Path) -> None:
    out = export(source, tmp_path, "at_least_one", layout="compressed-tensors")
    stored = load_file(out / "model.safetensors")
    assert {name for name in stored if name.endswith((".k_scale", ".v_scale"))} == NAMES
    assert all(stored[name].tolist() == [1.0] for name in NAMES)
    assert announced(out)[0]["num_bits"] == 8
    assert [f for f in check(out) if f.severity == "error"] == []


def test_off_writes_and_announces_nothing(source: Checkpoint, tmp_path: Path) -> None:
    out = export(source, tmp_path, "off")
    assert not [name for name in load_file(out / "model.safetensors") if name.endswith((".k_scale", ".v_scale"))]
    assert announced(out) == (None, None)


def test_cast_announces_without_scales_and_is_warned_about(source: Checkpoint, tmp_path: Path) -> None:
    out = export(source, tmp_path, "cast")
    assert not [name for name in load_file(out / "model.safetensors") if name.endswith((".k_scale", ".v_scale"))]
    assert announced(out)[1] == "FP8"
    convert(out, "compressed-tensors", tmp_path / "converted")
    for folder in (out, tmp_path / "converted"):
        assert [(f.rule, f.severity) for f in check(folder)] == [("E10", "warning")]
    (out / "qad_manifest.json").unlink()  # a folder that does not say so has lost its scales
    assert ("E10", "error") in [(f.rule, f.severity) for f in check(out)]


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_folder_that_casts_is_repaired_as_one(source: Checkpoint, layout: str, tmp_path: Path) -> None:
    out = export(source, tmp_path, "cast", layout)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"].pop("config_groups")
    (out / "config.json").write_text(json.dumps(config))
    assert repair(out, tmp_path / "fixed")
    assert [(f.rule, f.severity) for f in check(tmp_path / "fixed")] == [("E10", "warning")]
    assert announced(tmp_path / "fixed") == announced(out)


def test_an_arm_that_lacks_a_scale_is_not_exported(source: Checkpoint, tmp_path: Path) -> None:
    selection = select(load_skeleton(source), "W4A16_NVFP4")
    scales = found(source, "calibrated").kv_scales
    scales.pop("model.layers.1.self_attn.v_scale")
    run_stage(
        "arm",
        tmp_path / "arm",
        {},
        {},
        lambda f: write_arm(f, "ptq", source, selection, {}, kv_scales=scales, kv_cache="calibrated"),
    )
    assert open_arm(tmp_path / "arm").kv_scales.keys() == scales.keys()
    with pytest.raises(ArtifactError, match=r"no usable model\.layers\.1\.self_attn\.v_scale"):
        export_arm(tmp_path / "arm", tmp_path / "out")


def test_a_recipe_that_casts_is_warned_about(source: Checkpoint, tmp_path: Path) -> None:
    lines = (f"{i}: the river runs past {i} old mills and under a stone bridge, {i} boats on it.\n\n" for i in range(200))
    (tmp_path / "text.txt").write_text("".join(lines))
    data = str(tmp_path / "text.txt")
    recipe = {
        "model": str(source.folder),
        "dtype": "float32",
        "quantize": {"kv_cache": "cast"},
        "calibrate": {"data": data, "samples": 2, "seq_len": 16},
        "train": {"data": data, "tokens": 64, "seq_len": 16},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    with pytest.warns(UserWarning, match=r"kv_cache is cast: no scales"):
        prepare(load_recipe(str(tmp_path / "recipe.yaml"), []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(load_recipe(str(tmp_path / "recipe.yaml"), ["quantize.kv_cache=calibrated"]))


def test_an_nvfp4_cache_is_announced_in_the_words_of_modelopt_alone(source: Checkpoint, tmp_path: Path) -> None:
    """Scales are those of FP8. compressed-tensors has no word for it: refused there, in a recipe and in a conversion too."""
    out = export(source, tmp_path, "calibrated", kv_format="NVFP4")
    assert announced(out) == ("NVFP4", "NVFP4")
    assert check(out, source=tmp_path / "arm") == []
    assert "--kv-cache-dtype nvfp4" in (out / "README.md").read_text()
    eight = load_file(export(source, tmp_path / "eight", "calibrated") / "model.safetensors")
    four = load_file(out / "model.safetensors")
    assert all(torch.equal(four[name], eight[name]) for name in four)
    with pytest.raises(UsageError, match=r"NVFP4 KV cache, and the compressed-tensors layout knows FP8"):
        convert(out, "compressed-tensors", tmp_path / "converted")
    with pytest.raises(UsageError, match=r"NVFP4 KV cache, and the compressed-tensors layout knows FP8"):
        export_arm(tmp_path / "arm", tmp_path / "other", layout="compressed-tensors")
    asked = ["quantize.kv_cache=cast", "quantize.kv_format=NVFP4", "export.layout=compressed-tensors"]
    with pytest.raises(UsageError, match=r"no words in the compressed-tensors layout"):
        load_recipe("smollm2-135m", asked)


def test_an_nvfp4_cache_that_vllm_would_not_read_is_said(source: Checkpoint, tmp_path: Path) -> None:
    mixed = export(source, tmp_path / "mixed", "cast", formats={"*.mlp.*": "FP8"}, kv_format="NVFP4")
    told = [f.message for f in check(mixed) if f.rule == "E10"]
    assert any("reads no scales" in message for message in told)
    config = json.loads((mixed / "config.json").read_text())
    for width, severity in ((64, "warning"), (24, "error"), (128, None)):
        (mixed / "config.json").write_text(json.dumps({**config, "head_dim": width}))
        found = [f.severity for f in check(mixed) if f.rule == "E10" and "heads of" in f.message]
        assert found == ([severity] if severity else [])
