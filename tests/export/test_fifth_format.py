"""A format that the product does not have, added by one record, goes the whole way: these are the steps of ARCHITECTURE.md.

INT8_W8A8: weights and inputs 8-bit integers, one scale per tensor, as a real fifth format could be.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import qad.hf  # noqa: F401
from export.check import check
from export.convert import convert
from export.writer import export_arm
from qad.arms.arm import open_arm
from qad.model.loader import load_model
from qad.numerics.formats import CODES, FORMATS, GLOBAL_SCALE, INPUT_SCALE, Format, InLayout, Numerics, Stored
from qad.numerics.groups import fake_quantize_group, quantize_group
from qad.numerics.linear import quantize_input
from qad.recipes.recipe import Quantize
from qad.training.student import Student

LAYOUTS = ["modelopt", "compressed-tensors"]
Q = "model.layers.1.self_attn.q_proj"


# --- step 1: the numerics, which in the product are a module of qad/numerics ---


@dataclasses.dataclass(frozen=True)
class Int8Tensor:
    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.values, self.scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.values.float() * self.scale).to(dtype)


def global_scale_from_amax(amax: Tensor) -> Tensor:
    return torch.where(amax > 0, amax.float(), 1.0) / 127


def quantize(weight: Tensor, global_scale: Tensor) -> Int8Tensor:
    return Int8Tensor((weight.float() / global_scale).round().clamp(-127, 127).to(torch.int8), global_scale.reshape(()))


def fake_quantize(weight: Tensor, global_scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    decoded = quantize(weight, global_scale).dequantize(weight.dtype)
    return decoded if out is None else out.copy_(decoded)


def fake_quantize_activation(x: Tensor, input_scale: Tensor) -> Tensor:
    return ((x.float() / input_scale).round().clamp(-127, 127) * input_scale).to(x.dtype)


NUMERICS = types.SimpleNamespace(
    global_scale_from_amax=global_scale_from_amax,
    quantize=quantize,
    fake_quantize=fake_quantize,
    from_tensors=Int8Tensor,
    fake_quantize_activation=fake_quantize_activation,
)

# --- step 2: the record ---

NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "tensor"}
LEAVES = {CODES: "weight", GLOBAL_SCALE: "weight_scale", INPUT_SCALE: "input_scale"}
INT8 = Format(
    name="INT8_W8A8",
    bits=8,
    tensors=(Stored(CODES, "I8", 1), Stored(GLOBAL_SCALE, "F32"), Stored(INPUT_SCALE, "F32")),
    numerics=lambda: cast(Numerics, NUMERICS),
    largest=127.0,
    input_block=None,
    nvfp4_weights=False,
    error=0.01,
    error_limit=0.03,
    tag="int8",
    codes="8-bit integers",
    kind="in 8-bit integers with one FP32 scale per fused group",
    layouts={
        "modelopt": InLayout("INT8_W8A8", LEAVES, NUMBERS, NUMBERS),
        "compressed-tensors": InLayout("int-quantized", LEAVES, NUMBERS, NUMBERS),
    },
)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, INT8.name, INT8)


# --- step 3: its tests ---


def test_a_group_is_quantized_and_decoded_by_the_same_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(8, 32, generator=generator) for name in ("q", "k")}
    stored = quantize_group(weights, format=INT8.name)
    assert torch.equal(stored["q"].tensors[1], stored["k"].tensors[1])
    assert int(max(q.tensors[0].abs().max() for q in stored.values())) == 127
    for name, decoded in fake_quantize_group(weights, format=INT8.name):
        assert torch.equal(decoded, stored[name].dequantize())
    x, scale = torch.randn(4, 32, generator=generator), torch.tensor(0.01)
    assert torch.equal(quantize_input(x, scale, INT8.name), fake_quantize_activation(x, scale))


def test_a_recipe_may_name_it() -> None:
    assert Quantize.model_validate({"format": INT8.name, "formats": {"*.mlp.*": "NVFP4"}}).format == INT8.name


SCHEMES: dict[str, dict[str, Any]] = {
    "alone": {"format": INT8.name},
    "mixed": {"format": "NVFP4", "formats": {"*.self_attn.*": INT8.name}},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_goes_the_whole_way(
    make_llama: Callable[..., Path], build_arm: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    from transformers import AutoModelForCausalLM

    build_arm(make_llama(tmp_path / "source", tie_word_embeddings=False), tmp_path / "arm", **SCHEMES[scheme])
    arm, exports = open_arm(tmp_path / "arm"), {layout: tmp_path / layout for layout in LAYOUTS}
    assert arm.selection is not None
    for layout, out in exports.items():
        export_arm(tmp_path / "arm", out, layout=layout)
        assert check(out) == []
        assert check(out, source=tmp_path / "arm") == []
        assert "8-bit integers" in (out / "README.md").read_text()
    algorithm = json.loads((exports["modelopt"] / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
    assert algorithm == (INT8.name if scheme == "alone" else "MIXED_PRECISION")
    stored = load_file(exports["modelopt"] / "model.safetensors")
    eight = [m for m in arm.selection.modules if arm.selection.format_of(m) == INT8.name]
    assert {name for name, t in stored.items() if t.dtype == torch.int8} == {f"{m}.weight" for m in eight}

    for target, start in (("modelopt", "compressed-tensors"), ("compressed-tensors", "modelopt")):
        convert(exports[start], target, tmp_path / f"to {target}")
        assert check(tmp_path / f"to {target}", source=tmp_path / "arm") == []

    student = Student(arm, load_model(arm.source, "float32", "cpu"))
    reloaded = AutoModelForCausalLM.from_pretrained(exports["modelopt"], dtype=torch.float32)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(student.model(ids).logits, reloaded(ids).logits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_damage_is_found(
    make_llama: Callable[..., Path], build_arm: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    build_arm(make_llama(tmp_path / "source"), tmp_path / "arm", INT8.name)
    faults: dict[str, tuple[str, Callable[[dict[str, Tensor]], object]]] = {
        "no scale": ("E3", lambda t: t.pop(f"{Q}.weight_scale")),
        "bytes": ("E3", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].view(torch.uint8)})),
        "half": ("E3", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, ::2].contiguous()})),
        "other input scale": ("E6", lambda t: t[f"{Q}.input_scale"].mul_(2)),
    }
    for name, (rule, damage) in faults.items():
        out = tmp_path / name
        export_arm(tmp_path / "arm", out, layout=layout)
        tensors = load_file(out / "model.safetensors")
        damage(tensors)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        assert (rule, True) in {(f.rule, Q in f.module) for f in check(out) if f.severity == "error"}, name
