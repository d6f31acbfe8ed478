"""Mixtures of experts: split to the checkpoint's names, calibrated, quantized, exported, reloaded to the bit."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from padding import padded
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import qad.hf  # noqa: F401  (registers the loader)
from export.check import check
from export.convert import convert
from export.writer import export_arm
from qad.arms.arm import Arm, open_arm, write_arm
from qad.arms.selection import Selection, select
from qad.artifact import run_stage
from qad.command.cli import main
from qad.errors import SourceError, UsageError
from qad.model.experts import Experts, split_experts
from qad.model.families import DEFAULT
from qad.model.loader import DTYPES, load_model, load_skeleton
from qad.model.names import Stack, names_of
from qad.model.source import open_checkpoint
from qad.numerics import nvfp4
from qad.numerics.compiled import compilation
from qad.numerics.groups import fake_quantize_group, fake_quantize_stack
from qad.numerics.scale_search import search_scales
from qad.text.windows import Windows
from qad.training.calibrate import Calibration, calibrate
from qad.training.student import Student, _stacked

EXPERT = "model.layers.{}.mlp.experts.{}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def windows(ids: torch.Tensor) -> Windows:
    return Windows.of(ids, torch.arange(ids.shape[1]).expand(ids.shape).contiguous())


def text() -> Windows:
    return windows(torch.randint(0, 512, (8, 32), generator=torch.Generator().manual_seed(5)))


def ptq(source: Path, folder: Path, format: str) -> Arm:
    checkpoint = open_checkpoint(source)
    selection = select(load_skeleton(checkpoint), format)
    found = calibrate(load_model(checkpoint, "float32", "cpu"), selection, text())
    run_stage("arm", folder, {}, {}, lambda f: write_arm(f, "ptq", checkpoint, selection, found.input_scales))
    return open_arm(folder)


@pytest.fixture(scope="module", params=["NVFP4", "W4A16_NVFP4"])
def exported(request: pytest.FixtureRequest, moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Arm, Path]:
    root = tmp_path_factory.mktemp("experts")
    arm = ptq(moe_dir, root / "arm", request.param)
    export_arm(arm.folder, root / "out")
    return arm, root / "out"


def test_split_experts_have_the_checkpoints_names_and_compute_the_same_bits(moe_dir: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32, experts_implementation="eager").eval()
    ids = torch.arange(48)[None]
    with torch.no_grad():
        expected = model(ids).logits
        split_experts(model)
        assert torch.equal(bits(model(ids).logits), bits(expected))
    names = names_of(model)
    assert {names.tensor(name) for name, _ in model.named_parameters()} == set(open_checkpoint(moe_dir).tensors)
    assert any(isinstance(module, Experts) for module in model.modules())
    before = {name: id(module) for name, module in model.named_modules()}
    split_experts(model)
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_every_expert_projection_is_selected_and_the_router_is_not(moe_dir: Path) -> None:
    checkpoint = open_checkpoint(moe_dir)
    selection = select(load_skeleton(checkpoint), "NVFP4")
    of_experts = [name for name in selection.modules if ".experts." in name]
    assert len(of_experts) == 2 * 4 * 3
    assert all(f"{name}.weight" in checkpoint.tensors for name in selection.modules)
    assert [n.rpartition(".")[2] for n, reason in selection.excluded.items() if reason == "router"] == ["gate", "gate"]
    pairs = [group for group in selection.groups if ".experts." in group[0] and len(group) == 2]
    assert len(pairs) == 2 * 4
    assert all(a.rpartition(".")[0] == b.rpartition(".")[0] for a, b in pairs)
    shared = [group for group in selection.input_groups if ".experts." in group[0]]
    assert sorted(map(len, shared)) == [4, 4, 8, 8]


def test_input_scale_groups_join_the_experts_of_a_layer_only() -> None:
    names = ["l.0.experts.0.w1", "l.0.experts.1.w3", "l.0.experts.0.w2", "l.1.experts.0.w1", "l.0.shared_expert.up_proj"]
    groups = [("l.0.experts.0.w1", "l.0.experts.1.w3"), *((name,) for name in names[2:])]
    assert DEFAULT.input_scale_groups(names) == groups


def test_a_part_of_a_layers_experts_is_refused(moe_dir: Path) -> None:
    skeleton = load_skeleton(open_checkpoint(moe_dir))
    with pytest.raises(UsageError, match="engines run the experts of a layer as one"):
        select(skeleton, "NVFP4", exclude=["*.0.*.experts.2.*"])
    kept = select(skeleton, "NVFP4", exclude=["*.0.*.experts.*"])
    assert len([name for name in kept.modules if ".experts." in name]) == 4 * 3


def test_experts_fused_in_a_way_of_their_own_are_refused() -> None:
    from transformers import GptOssConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 4, "vocab_size": 512}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes))
    for module in model.modules():
        if hasattr(module, "has_post_expert_norm"):
            module.has_post_expert_norm = True
    split_experts(model)
    assert not any(isinstance(module, Experts) for module in model.modules())
    with pytest.raises(UsageError, match=r"experts.*3-D parameter.*not supported"):
        select(model, "NVFP4")


# --- calibration ---


def top_one(make_qwen3: Callable[..., Path], folder: Path) -> tuple[Any, Selection]:
    """Eight experts, one a token; the router never chooses numbers 5 to 7."""
    source = open_checkpoint(make_qwen3(folder, "qwen3_moe", num_experts=8, num_experts_per_tok=1))
    model = load_model(source, "float32", "cpu")
    split_experts(model)
    for module in model.modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(_spare_the_last_three)
    return model, select(load_skeleton(source), "NVFP4")


def _spare_the_last_three(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return args[0], args[1] % 5, args[2]


def test_experts_without_tokens_take_the_shared_input_scale_and_are_listed(
    make_qwen3: Callable[..., Path], tmp_path: Path
) -> None:
    model, selection = top_one(make_qwen3, tmp_path / "source")
    with pytest.warns(UserWarning, match="6 experts saw no token"):
        found = calibrate(model, selection, text())
    assert found.without_tokens == tuple(EXPERT.format(layer, n) for layer in (0, 1) for n in (5, 6, 7))
    assert found.input_scales.keys() == selection.modules.keys()
    assert all(torch.isfinite(scale) and scale > 0 for scale in found.input_scales.values())
    for group in selection.input_groups:
        assert len({found.input_scales[name].item() for name in group}) == 1


def test_what_each_expert_gets_is_observed(make_qwen3: Callable[..., Path], tmp_path: Path) -> None:
    """The shared amax is the largest over what the router sends, for down_proj what the gating makes of it."""
    model, selection = top_one(make_qwen3, tmp_path / "source")
    seen: dict[str, float] = {}

    def see(name: str) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            key = name.replace("up_proj", "gate_proj").split(".experts.")[0] + name.rpartition(".")[2][:2]
            seen[key] = max(seen.get(key, 0.0), args[0].abs().max().item())

        return hook

    for name in selection.modules:
        if ".experts." in name:
            model.get_submodule(name).register_forward_pre_hook(see(name))
    with pytest.warns(UserWarning, match="saw no token"):
        found = calibrate(model, selection, text())
    for name in (n for n in selection.modules if ".experts." in n):
        key = name.split(".experts.")[0] + name.rpartition(".")[2][:2]
        assert found.input_scales[name].item() * 2688 == pytest.approx(seen[key], rel=1e-5)


def test_padding_is_not_observed_inside_experts(moe_dir: Path) -> None:
    source = open_checkpoint(moe_dir)
    selection = select(load_skeleton(source), "NVFP4")
    model = load_model(source, "float32", "cpu")
    given = text()
    alone = calibrate(model, selection, given).input_scales
    for wider in (padded(given, 8, 3, 7), padded(given, 0, 5, 400)):
        found: Calibration = calibrate(model, selection, wider)
        for name, scale in alone.items():
            torch.testing.assert_close(found.input_scales[name], scale, rtol=1e-5, atol=0)


def test_a_layer_whose_experts_all_saw_nothing_is_an_error(moe_dir: Path) -> None:
    """Nothing observed is never a scale."""
    source = open_checkpoint(moe_dir)
    selection = select(load_skeleton(source), "NVFP4")
    model = load_model(source, "float32", "cpu")
    split_experts(model)
    for name, module in model.named_modules():
        if isinstance(module, Experts) and ".1." in name:
            module.forward = lambda hidden, index, weights: hidden  # type: ignore[method-assign]
    with pytest.raises(SourceError, match=r"never reached model\.layers\.1\..*experts"):
        calibrate(model, selection, text())


# --- export, check, load ---


def test_the_export_has_the_hubs_names_and_passes_the_checker(exported: tuple[Arm, Path]) -> None:
    """Each expert's pair shares its scale; routers are left alone."""
    arm, out = exported
    stored, assumed = load_file(out / "model.safetensors"), arm.selection
    assert assumed is not None
    assert check(out, source=arm.folder) == []
    leaves = {"weight", "weight_scale", "weight_scale_2"} | ({"input_scale"} if assumed.quantizes_activations else set())
    for module in assumed.modules:
        assert {n.rpartition(".")[2] for n in stored if n.rpartition(".")[0] == module} == leaves
    for group in assumed.groups:
        assert len({stored[f"{module}.weight_scale_2"].item() for module in group}) == 1
    routers = [name for name, reason in assumed.excluded.items() if reason == "router"]
    assert all(stored[f"{name}.weight"].dtype == torch.bfloat16 for name in routers)
    nested = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert set(routers) <= set(nested["exclude_modules"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reloaded_export_is_the_quantized_model_to_the_bit(exported: tuple[Arm, Path], dtype: str) -> None:
    """The law, for experts."""
    arm, out = exported
    student = Student(arm, load_model(arm.source, dtype, "cpu")).model
    reloaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype=DTYPES[dtype])
    stored = load_file(out / "model.safetensors")
    parameters = names_of(reloaded).of(dict(reloaded.named_parameters()))
    assert arm.selection is not None
    for module in arm.selection.modules:
        q = nvfp4.QuantizedTensor(*(stored[f"{module}.{x}"] for x in ("weight", "weight_scale", "weight_scale_2")))
        assert torch.equal(bits(nvfp4.dequantize(q, DTYPES[dtype])), bits(parameters[f"{module}.weight"].detach()))
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = student(ids).logits, reloaded(ids).logits
        again = reloaded(ids).logits
        plain = load_model(arm.source, dtype, "cpu")(ids).logits
    assert torch.equal(bits(expected), bits(actual))
    assert torch.equal(bits(actual), bits(again))
    assert not torch.equal(plain, actual)


def test_the_other_layout_carries_the_same_codes(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    arm, out = exported
    export_arm(arm.folder, tmp_path / "ct", layout="compressed-tensors")
    convert(out, "compressed-tensors", tmp_path / "converted")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("ct", "converted"))
    modelopt = load_file(out / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(bits(a[name]), bits(b[name])) for name in a)
    assert arm.selection is not None
    for module in arm.selection.modules:
        assert torch.equal(a[f"{module}.weight_packed"], modelopt[f"{module}.weight"])
        assert torch.equal(bits(a[f"{module}.weight_scale"]), bits(modelopt[f"{module}.weight_scale"]))
    assert [f for f in check(tmp_path / "ct", source=arm.folder) if f.severity == "error"] == []


# --- commands ---


@pytest.mark.pipeline
def test_ptq_export_check_and_fidelity_work(
    make_qwen3: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_qwen3(tmp_path / "source", "qwen3_moe")
    lines = (f"{i}: the river runs past {i} old mills and under a stone bridge, {i} boats on it.\n\n" for i in range(400))
    (tmp_path / "text.txt").write_text("".join(lines))
    data = str(tmp_path / "text.txt")
    recipe = {
        "model": str(source),
        "dtype": "float32",
        "calibrate": {"data": data, "samples": 4, "seq_len": 32},
        "train": {"data": data, "tokens": 256, "seq_len": 32, "batch_size": 4},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["ptq", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "ptq")]) == 0
        assert main(["export", str(tmp_path / "ptq"), "--out", str(tmp_path / "out")]) == 0
        assert main(["check", str(tmp_path / "out"), "--source", str(tmp_path / "ptq")]) == 0
        assert (
            main(
                [
                    "measure",
                    "fidelity",
                    str(tmp_path / "out"),
                    "--teacher",
                    str(source),
                    "--out",
                    str(tmp_path / "record.json"),
                    "--data",
                    str(tmp_path / "text.txt"),
                    "--tokens",
                    "128",
                    "--dtype",
                    "float32",
                ]
            )
            == 0
        )


class HostSynchronisations(TorchDispatchMode):
    """Counts values that the host asks of a tensor (`.item`, `.tolist`, a condition)."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_layer_of_experts_is_computed_at_once(exported: tuple[Arm, Path]) -> None:
    """Forward and backward ask the host nothing, and give what the loop over experts gives, to rounding."""
    arm, _ = exported
    student = Student(arm, load_model(arm.source, "float32", "cpu"))
    layer: Any = student.model.get_submodule(next(iter(student.experts)))
    x_tH = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    index = torch.randint(0, 4, (24, 2), generator=torch.Generator().manual_seed(2))
    weight = torch.rand(24, 2, generator=torch.Generator().manual_seed(3))
    with HostSynchronisations() as asked:
        actual = layer(x_tH, index, weight)
        actual.sum().backward()
    assert asked.count == 0
    assert all(grad is not None for grad in (student.masters[f"{next(iter(student.experts))}.down_proj"].grad, x_tH.grad))
    inputs = next(iter(student.experts.values()))
    expected = torch.zeros_like(actual)
    for token in range(24):
        for slot in range(2):
            expert = int(index[token, slot])
            first = inputs.quantize(1, x_tH[token : token + 1]) @ layer.gate_up_proj[expert].T
            second = inputs.quantize(2, layer._apply_gate(first)) @ layer.down_proj[expert].T
            expected[token] += weight[token, slot] * second[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_experts_that_share_no_input_scale_stay_apart(exported: tuple[Arm, Path], tmp_path: Path) -> None:
    """Another tool's folder: an engine would take one scale for all, `qad check` says so; what is loaded is what is stored."""
    arm, out = exported
    if not arm.input_scales:
        return  # W4A16 has none
    shutil.copytree(out, tmp_path / "odd")
    tensors = load_file(out / "model.safetensors")
    name = next(n for n in tensors if n.endswith(".experts.1.down_proj.input_scale") or n.endswith(".experts.1.w2.input_scale"))
    tensors[name] = tensors[name] * 2
    save_file(tensors, tmp_path / "odd" / "model.safetensors", metadata={"format": "pt"})
    apart: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "odd", dtype=torch.float32)
    layers = [name for name, module in apart.named_modules() if isinstance(module, Experts)]
    assert len(layers) == 1
    assert apart.get_submodule(names_of(apart).inner(name.rpartition(".")[0])).input_scale == tensors[name]


@pytest.mark.parametrize("method", ["qad", "qat"])
def test_a_mixture_trains_and_what_was_trained_is_deployed(moe_dir: Path, tmp_path: Path, method: str) -> None:
    words = [f"word{i % 7}" for i in range(40)]
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join([f"document {n}", *words]) for n in range(60)))
    data = str(tmp_path / "text.txt")
    recipe = {
        "model": str(moe_dir),
        "dtype": "float32",
        "quantize": {"scales": "mse"},
        "calibrate": {"data": data, "samples": 4, "seq_len": 32},
        "train": {
            "method": method,
            "data": data,
            "tokens": 1024,
            "seq_len": 32,
            "batch_size": 2,
            "lr": 1e-3,
            "validate_every": 4,
            "validation_tokens": 64,
            "lr_scale": {"*.experts.*": 0.5},
        },
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["plan", str(tmp_path / "recipe.yaml")]) == 0
        assert main(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "arm")]) == 0
        assert main(["export", str(tmp_path / "arm"), "--out", str(tmp_path / "out")]) == 0
        assert main(["check", str(tmp_path / "out"), "--source", str(tmp_path / "arm"), "--strict"]) == 0
        arm = open_arm(tmp_path / "arm")
        student = Student(arm, load_model(arm.source, "float32", "cpu"))
    progress = arm.facts["training"]
    assert progress["val_loss_best"] < progress["val_loss_start"]
    assert arm.trained_shapes().keys() == open_checkpoint(moe_dir).tensors.keys()
    moved = [n for n in arm.trained_shapes() if ".experts." in n and not torch.equal(arm.weight(n), arm.source.get(n).float())]
    assert len(moved) > 12
    reloaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(bits(student.model(ids).logits), bits(reloaded(ids).logits))


@pytest.mark.parametrize("scales", ["dynamic", "mse"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_stack_of_experts_is_quantized_as_expert_by_expert(scales: str, compiled: bool) -> None:
    """Seven experts, one of zeros, one a thousand times larger: bits of gate and up together, and of down alone."""
    stack = Stack("experts", "experts", ("gate", "up", "down"))
    halves = torch.randn(7, 2 * 16, 48, generator=torch.Generator().manual_seed(4))
    down = torch.randn(7, 48, 16, generator=torch.Generator().manual_seed(5))
    for tensor in (halves, down):
        tensor[2], tensor[3] = 0, tensor[3] * 1000
    for leaf, tensor in (("gate_up_proj", halves), ("down_proj", down)):
        parts = stack.parts(leaf, tensor)
        groups = [{n: parts[f"{n}.weight"] for n in stack.modules(e) if f"{n}.weight" in parts} for e in range(7)]
        frozen = [search_scales(group, "mse") for group in groups] if scales == "mse" else [{} for _ in groups]
        expected = [torch.cat([value for _, value in fake_quantize_group(g, f)]) for g, f in zip(groups, frozen, strict=True)]
        actual = torch.empty_like(tensor)
        with compilation(compiled):
            fake_quantize_stack(tensor, _stacked([s for f in frozen for s in f.values()], 7, stack.layout), actual)
        assert torch.equal(bits(actual), bits(torch.stack(expected)))
