"""Frozen weight scales from the recipe to the reloaded export: found once, kept by training, and what outgrows them counted."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qad.hf  # noqa: F401  (registers the loader)
from export.check import check
from export.writer import export_arm
from qad.arms.arm import KIND, Arm, open_arm, write_arm
from qad.artifact import MANIFEST, run_stage
from qad.errors import ArtifactError
from qad.model.loader import load_model
from qad.numerics import input_saturation, nvfp4
from qad.numerics.groups import quantize_group
from qad.numerics.scale_search import STRATEGIES, search_scales
from qad.recipes.job import Job, prepare
from qad.recipes.recipe import Recipe
from qad.training.stages import ptq_arm, trained_arm
from qad.training.student import Student
from qad.training.trainer import Trainer

UP, GATE, DOWN = (f"model.layers.0.mlp.{leaf}_proj" for leaf in ("up", "gate", "down"))

pytestmark = pytest.mark.usefixtures("one_eager_thread")


def job(model: Path, text: Path, scales: str = "mse", headroom: float = 1.0, **train: object) -> Job:
    settings = {
        "tokens": 6 * 128,
        "seq_len": 32,
        "batch_size": 4,
        "lr": 1e-4,
        "validate_every": 3,
        "save_every": 3,
        "validation_tokens": 128,
        "chunk": 64,
        "data": str(text),
    }
    return prepare(
        Recipe.model_validate(
            {
                "model": str(model),
                "dtype": "float32",
                "quantize": {"scales": scales},
                "calibrate": {"data": str(text), "samples": 8, "seq_len": 32, "headroom": headroom},
                "train": {**settings, **train},
            }
        )
    )


def rows(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(prepared: Job, folder: Path) -> Arm:
    ptq_arm(prepared, folder / "ptq")
    trained_arm(prepared, "qad", folder / "ptq", folder / "qad", folder / "metrics.jsonl")
    return open_arm(folder / "qad")


@pytest.fixture(scope="module", params=STRATEGIES)
def trained(
    request: pytest.FixtureRequest, tiny_llama_dir: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with ptq, qad and metrics.jsonl of one strategy."""
    folder = tmp_path_factory.mktemp(request.param)
    assert train(job(tiny_llama_dir, text_file, request.param), folder).trained
    return folder


# --- found once ---


def test_the_ptq_arm_holds_what_the_search_finds_once_per_scale_group(trained: Path) -> None:
    arm = open_arm(trained / "ptq")
    assert arm.selection is not None
    stored = load_file(arm.folder / "frozen.safetensors")
    assert len(stored) == 2 * len(arm.selection.modules) == 28
    for group in arm.selection.groups:
        found = search_scales({m: arm.source.get(f"{m}.weight") for m in group}, arm.scales)
        assert len({scales.global_scale.item() for scales in found.values()}) == 1
        for module, scales in found.items():
            assert stored[f"{module}.block_scale"].dtype == torch.float8_e4m3fn
            assert torch.equal(stored[f"{module}.block_scale"].view(torch.uint8), scales.block_scale.view(torch.uint8))
            assert torch.equal(stored[f"{module}.global_scale"], scales.global_scale)


def test_a_dynamic_arm_holds_none(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    ptq_arm(job(tiny_llama_dir, text_file, "dynamic"), tmp_path / "ptq")
    arm = open_arm(tmp_path / "ptq")
    assert arm.facts["scales"] == "dynamic"
    assert not (arm.folder / "frozen.safetensors").exists()
    assert arm.frozen_scales([UP, GATE]) == {}


# --- the law ---


def test_training_keeps_the_scales_and_the_export_stores_them(trained: Path, tmp_path: Path) -> None:
    """The trained arm and both exports hold the bytes that calibration found; nothing is searched again."""
    ptq, arm = open_arm(trained / "ptq"), open_arm(trained / "qad")
    frozen = (ptq.folder / "frozen.safetensors").read_bytes()
    assert (arm.folder / "frozen.safetensors").read_bytes() == frozen
    assert arm.scales == ptq.scales
    assert arm.selection is not None
    for which in (ptq, arm):
        out = tmp_path / which.name
        export_arm(which.folder, out)
        assert check(out, source=which.folder) == []
        stored = load_file(out / "model.safetensors")
        for module, scales in arm.frozen_scales(list(arm.selection.modules)[:3]).items():
            assert torch.equal(stored[f"{module}.weight_scale"].view(torch.uint8), scales.block_scale.view(torch.uint8))
            assert torch.equal(stored[f"{module}.weight_scale_2"], scales.global_scale)
    codes = [load_file(tmp_path / name / "model.safetensors")[f"{UP}.weight"] for name in ("ptq", "qad")]
    assert not torch.equal(*codes)


def test_logits_of_the_reloaded_export_equal_the_students_after_training(trained: Path, tmp_path: Path) -> None:
    """To the bit, with every weight moved from where its scales were found."""
    arm = open_arm(trained / "qad")
    student = Student(arm, load_model(arm.source, "float32", "cpu"))
    export_arm(arm.folder, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    parameters = dict(student.model.named_parameters())
    assert arm.selection is not None
    for module in arm.selection.modules:
        leaves = (stored[f"{module}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2"))
        decoded = nvfp4.dequantize(nvfp4.QuantizedTensor(*leaves))
        assert torch.equal(decoded.view(torch.int32), parameters[f"{module}.weight"].detach().view(torch.int32))
        assert not torch.equal(arm.weight(f"{module}.weight"), arm.source.get(f"{module}.weight").float())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = student.model(ids).logits, reloaded(ids).logits
    assert torch.equal(expected.view(torch.int32), actual.view(torch.int32))


def test_the_checker_tells_frozen_from_recomputed_scales(trained: Path, tmp_path: Path) -> None:
    """An export that recomputed its scales is another checkpoint than the arm's."""
    arm = open_arm(trained / "qad")
    out = tmp_path / "out"
    export_arm(arm.folder, out)
    stored = load_file(out / "model.safetensors")
    q = quantize_group({DOWN: arm.weight(f"{DOWN}.weight")})[DOWN]
    stored |= {f"{DOWN}.weight": q.packed, f"{DOWN}.weight_scale": q.block_scale, f"{DOWN}.weight_scale_2": q.global_scale}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    assert [(f.rule, f.severity, f.module) for f in check(out, source=arm.folder)] == [("W3", "error", DOWN)]


# --- resume ---


class _Killed(BaseException):
    pass


def killed_after(step: int, prepared: Job, folder: Path) -> None:
    advance = Trainer._advance

    def until(self: Trainer, bar: object) -> None:
        if self.progress.step == step:
            raise _Killed
        advance(self, bar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_advance", until)
        with pytest.raises(_Killed):
            train(prepared, folder)


def test_resumed_equals_uninterrupted_to_the_bit(trained: Path, tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    """Masters, scales, losses and counts."""
    whole = open_arm(trained / "qad")
    prepared = job(tiny_llama_dir, text_file, whole.scales)
    killed_after(4, prepared, tmp_path)
    resumed = train(prepared, tmp_path)
    for name in ("weights.safetensors", "frozen.safetensors", "scales.safetensors"):
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert resumed.facts["training"] == whole.facts["training"]
    timeless = [
        [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows(folder / "metrics.jsonl")]
        for folder in (trained, tmp_path)
    ]
    assert timeless[0] == timeless[1]


def without(file: Path, name: str) -> None:
    """The file without one tensor, and a manifest that vouches for it."""
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    manifest = json.loads((file.parent / MANIFEST).read_text())
    manifest["files"][file.name]["bytes"] = file.stat().st_size
    (file.parent / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("lost", ["all frozen scales", "a block scale", "a global scale", "an input scale"])
def test_resuming_without_a_scale_is_an_error(tiny_llama_dir: Path, text_file: Path, tmp_path: Path, lost: str) -> None:
    """Training never goes on with a quantizer less than it began with."""
    prepared = job(tiny_llama_dir, text_file)
    killed_after(3, prepared, tmp_path)
    ptq = tmp_path / "ptq"
    match lost:
        case "all frozen scales":
            (ptq / "frozen.safetensors").unlink()
        case "a block scale":
            without(ptq / "frozen.safetensors", f"{UP}.block_scale")
        case "a global scale":
            without(ptq / "frozen.safetensors", f"{UP}.global_scale")
        case "an input scale":
            without(ptq / "scales.safetensors", f"{UP}.input_scale")
    with pytest.raises(ArtifactError, match=r"frozen\.safetensors was removed|up_proj"):
        trained_arm(prepared, "qad", ptq, tmp_path / "qad", tmp_path / "metrics.jsonl")
    assert list((tmp_path / "qad.partial").glob("state-*"))  # nothing was lost, nothing was trained
    assert not (tmp_path / "qad").exists()


@pytest.mark.parametrize("fault", ["nan", "zero", "other shape", "unequal"])
def test_frozen_scales_that_no_engine_can_use_are_refused(trained: Path, tmp_path: Path, fault: str) -> None:
    arm = open_arm(trained / "ptq")
    damaged = load_file(arm.folder / "frozen.safetensors")
    match fault:
        case "nan" | "zero":
            damaged[f"{UP}.block_scale"].view(torch.uint8)[3, 1] = {"nan": 0x7F, "zero": 0}[fault]
        case "other shape":
            damaged[f"{UP}.block_scale"] = damaged[f"{UP}.block_scale"][1:].clone()
        case "unequal":
            damaged[f"{UP}.global_scale"] *= 2
    folder = tmp_path / "arm"
    folder.mkdir()
    for path in arm.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(damaged, folder / "frozen.safetensors", metadata={"format": "pt"})
    size = (folder / "frozen.safetensors").stat().st_size
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["frozen.safetensors"]["bytes"] = size
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"up_proj.*make the PTQ arm again"):
        export_arm(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what saturates ---


def test_shares_are_logged_at_validations_alone_and_kept_in_the_arm(trained: Path) -> None:
    arm = open_arm(trained / "qad")
    names = {"saturated_weight_share", "saturated_input_share"}
    log = rows(trained / "metrics.jsonl")
    assert all(names <= row.keys() for row in log)
    for row in log:
        for name in names:
            assert (row[name] is None) == (row["val_kl"] is None)
    assert log[0]["saturated_weight_share"] == 0.0
    kept = next(row for row in log if row["step"] == arm.facts["training"]["best_step"])
    assert arm.facts["training"]["saturation"] == {name: kept[name] for name in names}


def student_of(prepared: Job, folder: Path) -> Student:
    ptq_arm(prepared, folder / "ptq")
    return Student(open_arm(folder / "ptq"), load_model(prepared.source, "float32", "cpu"))


@pytest.mark.parametrize("scales", ["dynamic", "mse", "four_over_six"])
def test_a_weight_that_trebles_is_recomputed_or_saturates_and_is_counted(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, scales: str
) -> None:
    """Dynamic scales follow, equal within the fused group; frozen ones stay, and every block of the group counts."""
    student = student_of(job(tiny_llama_dir, text_file, scales), tmp_path)
    masters = {m: student.masters[f"{m}.weight"] for m in (GATE, UP)}
    before = quantize_group(masters, student.frozen)
    with torch.no_grad():
        for master in masters.values():
            master.mul_(3.0)
    student.deploy()
    frozen = scales != "dynamic"
    with pytest.warns(UserWarning, match=r"1024 of 1024 blocks") if frozen else contextlib.nullcontext():
        after = quantize_group(masters, student.frozen)
    deployed = student.model.get_submodule(UP).weight.detach()
    assert torch.equal(deployed, nvfp4.dequantize(after[UP]))
    assert after[UP].global_scale == after[GATE].global_scale
    error = ((deployed - masters[UP]).norm() / masters[UP].norm()).item()
    if scales == "dynamic":
        with student.saturation.counting():
            pass
        assert student.saturation.shares["saturated_weight_share"] is None
        assert after[UP].global_scale.item() == pytest.approx(3 * before[UP].global_scale.item())
        assert error < 0.15
        return
    with pytest.warns(UserWarning, match=r"weight blocks outgrew their frozen scales"), student.saturation.counting():
        pass
    blocks = {m: master.numel() for m, master in student.masters.items() if m.removesuffix(".weight") in student.frozen}
    outgrown = sum(blocks[f"{m}.weight"] for m in (GATE, UP)) / sum(blocks.values())
    share = student.saturation.shares["saturated_weight_share"]
    assert share == pytest.approx(outgrown, rel=0.02)
    for field in ("block_scale", "global_scale"):
        a, b = (getattr(q[UP], field).reshape(-1).view(torch.uint8) for q in (before, after))
        assert torch.equal(a, b)
    assert error > 0.3
    with student.saturation.counting():  # warned once, not at each validation
        pass


def test_an_export_of_weights_beyond_their_scales_counts_the_blocks_in_a_warning(trained: Path, tmp_path: Path) -> None:
    """The stored global amax is half the weight's; bytes stay below NaN and the file is whole."""
    arm = open_arm(trained / "ptq")
    assert arm.selection is not None
    frozen = {m: scales for group in arm.selection.groups for m, scales in arm.frozen_scales(group).items()}
    q = quantize_group({DOWN: arm.source.get(f"{DOWN}.weight")})[DOWN]
    frozen[DOWN] = nvfp4.FrozenScales(q.block_scale, q.global_scale / 2)
    run_stage(
        KIND,
        tmp_path / "arm",
        {},
        {},
        lambda f: write_arm(f, "ptq", arm.source, arm.selection, arm.input_scales, scales=arm.scales, frozen=frozen),
    )
    with pytest.warns(UserWarning, match=rf"{DOWN}: 512 of 512 blocks exceed their frozen scales"):
        export_arm(tmp_path / "arm", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")[f"{DOWN}.weight_scale"].view(torch.uint8)
    assert ((stored > 0) & (stored <= 0x7E)).all()
    assert [f for f in check(tmp_path / "out") if f.severity == "error"] == []


def test_what_the_search_cut_off_on_purpose_does_not_count(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    student = student_of(job(tiny_llama_dir, text_file, "mse"), tmp_path)
    module = student.frozen[UP]
    byte = module.block_scale.view(torch.uint8)
    byte[:, 0] -= 16  # a quarter of the scale
    assert nvfp4.saturated_weight_blocks(student.masters[f"{UP}.weight"], module)[:, 0].any()
    with student.saturation.counting():
        pass
    assert student.saturation.shares["saturated_weight_share"] == 0.0


@pytest.mark.parametrize("headroom", [0.5, 1.0, 2.0])
def test_headroom_gives_inputs_above_the_calibrated_amax_room(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, headroom: float
) -> None:
    """The input scale is headroom times the calibrated one; blocks above headroom times the amax are counted."""
    prepared = job(tiny_llama_dir, text_file, "dynamic", headroom)
    student = student_of(prepared, tmp_path / "given")
    ptq_arm(job(tiny_llama_dir, text_file, "dynamic"), tmp_path / "one")
    calibrated = open_arm(tmp_path / "one").input_scales
    assert {m: s.item() for m, s in open_arm(tmp_path / "given" / "ptq").input_scales.items()} == {
        m: s.item() * headroom for m, s in calibrated.items()
    }
    stored = prepared.calibration_windows()
    windows = stored.at(torch.arange(len(stored)))
    # The unquantized weights, so that the inputs are those of the calibration; nothing before is rounded in layer 0.
    first = "model.layers.0.self_attn.q_proj"
    seen = []
    handle = student.model.get_submodule(first).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    warned = pytest.warns(UserWarning, match="lie above what was calibrated") if headroom < 1 else contextlib.nullcontext()
    with torch.no_grad(), warned, student.saturation.counting():
        student.model.base_model(windows.input_ids_ST, position_ids=windows.position_ids_ST, use_cache=False)
    handle.remove()
    above = input_saturation.saturated_blocks(seen[0], student.model.get_submodule(first).input_scale).item()
    assert (above > 0) == (headroom < 1)
    share = student.saturation.shares["saturated_input_share"]
    assert share is not None
    assert (share > 0.001) == (headroom < 1)
    with torch.no_grad():
        student.model.base_model(windows.input_ids_ST, position_ids=windows.position_ids_ST, use_cache=False)
    assert not student.model.get_submodule(first)._forward_pre_hooks
    assert student.saturation.shares["saturated_input_share"] == share


def test_inputs_are_counted_once_per_scale_group(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    student = student_of(job(tiny_llama_dir, text_file, "dynamic"), tmp_path)
    attention = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"]
    for module in student.selection.modules:
        student.model.get_submodule(module).input_scale.fill_(1e-6 if module in attention else 1.0)
    ids = torch.randint(0, 512, (2, 8), generator=torch.Generator().manual_seed(0))
    warned = pytest.warns(UserWarning, match="10.0% of the blocks of inputs lie above what was calibrated")
    with torch.no_grad(), warned, student.saturation.counting():
        student.model.base_model(ids, use_cache=False)
    # Inputs per token and layer: q/k/v 64, o 64, gate/up 64, down 128; those of q/k/v in the first layer are all above.
    assert student.saturation.shares["saturated_input_share"] == 64 / (2 * 320)


def test_formats_without_activation_quantization_count_no_inputs(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    prepared = job(tiny_llama_dir, text_file, "mse")
    quantize = prepared.recipe.quantize.model_copy(update={"format": "W4A16_NVFP4"})
    student = student_of(prepare(prepared.recipe.model_copy(update={"quantize": quantize})), tmp_path)
    with torch.no_grad(), student.saturation.counting():
        student.model.base_model(torch.arange(16)[None], use_cache=False)
    assert student.saturation.shares == {"saturated_weight_share": 0.0, "saturated_input_share": None}
