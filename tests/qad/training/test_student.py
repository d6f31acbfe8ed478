"""The student is, at every step, what would be deployed; masters are FP32 and receive every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packed import pack_in_memory
from padding import padded

from qad.arms.arm import Arm, open_arm, write_arm
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.errors import ArtifactError, SourceError
from qad.model.loader import load_model, load_skeleton, load_tokenizer
from qad.model.source import Checkpoint, open_checkpoint
from qad.numerics import nvfp4
from qad.numerics.groups import quantize_group
from qad.text.documents import Document, Part
from qad.text.windows import Windows
from qad.training.calibrate import AmaxObserver, calibrate, group_input_scales
from qad.training.student import Student


@pytest.fixture(scope="session")
def source(tiny_llama_dir: Path) -> Checkpoint:
    return open_checkpoint(tiny_llama_dir)


def make_arm(source: Checkpoint, folder: Path, format: str = "NVFP4") -> Arm:
    selection = select(load_skeleton(source), format)
    scales = {}
    if selection.quantizes_activations:
        ids = torch.arange(64)[None]
        model = load_model(source, "float32", "cpu")
        with AmaxObserver(model, list(selection.modules)) as observer, torch.no_grad():
            model(ids)
        scales = group_input_scales(observer.amax, selection, 1.0)
    run_stage("arm", folder, {}, {}, lambda f: write_arm(f, "ptq", source, selection, scales))
    return open_arm(folder)


@pytest.fixture
def student(source: Checkpoint, tmp_path: Path) -> Student:
    return Student(make_arm(source, tmp_path / "arm"), load_model(source, "float32", "cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_is_the_decoded_export(source: Checkpoint, tmp_path: Path, dtype: str) -> None:
    arm = make_arm(source, tmp_path / "arm")
    student = Student(arm, load_model(source, dtype, "cpu"))
    with torch.no_grad():
        for master in student.masters.values():  # weights that are no longer BF16 numbers
            master.mul_(1.001)
    student.deploy()
    parameters = dict(student.model.named_parameters())
    seen = set()
    for group in arm.selection.groups:
        quantized = quantize_group({m: student.masters[f"{m}.weight"].detach() for m in group})
        for module, q in quantized.items():
            assert torch.equal(parameters[f"{module}.weight"], nvfp4.dequantize(q, parameters[f"{module}.weight"].dtype))
            seen.add(f"{module}.weight")
    assert len(seen) == 14
    for name in parameters.keys() - seen:
        assert torch.equal(parameters[name].float(), student.masters[name].bfloat16().float())


def test_what_neither_trains_nor_is_quantized_has_no_master_and_stays_the_sources(source: Checkpoint, tmp_path: Path) -> None:
    arm = make_arm(source, tmp_path / "arm")
    linears = {f"{module}.weight" for module in arm.selection.modules}
    student = Student(arm, load_model(source, "float32", "cpu"), trainable=linears - {"model.layers.0.mlp.down_proj.weight"})
    assert student.masters.keys() == linears
    student.deploy()
    for name in dict(student.model.named_parameters()).keys() - linears:
        assert torch.equal(student.model.get_parameter(name), source.get(name).float()), name


def test_scales_follow_the_weights(student: Student) -> None:
    """Multiplied by 3 after calibration, a weight is deployed with new scales, equal within its group."""
    group = next(g for g in student.selection.groups if len(g) == 3)
    before = quantize_group({m: student.masters[f"{m}.weight"].detach() for m in group})[group[0]].global_scale
    with torch.no_grad():
        for m in group:
            student.masters[f"{m}.weight"].mul_(3.0)
    student.deploy()
    after = quantize_group({m: student.masters[f"{m}.weight"].detach() for m in group})
    assert len({q.global_scale.item() for q in after.values()}) == 1
    assert after[group[0]].global_scale.item() == pytest.approx(3 * before.item())
    error = student.model.get_submodule(group[1]).weight - student.masters[f"{group[1]}.weight"]
    assert (error.norm() / student.masters[f"{group[1]}.weight"].norm()) < 0.15


def test_members_of_a_group_share_one_scale_however_different_they_are(student: Student) -> None:
    q, k, v = (f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv")
    weights = {m: student.masters[f"{m}.weight"].detach() * f for m, f in ((q, 1.0), (k, 10.0), (v, 0.1))}
    quantized = quantize_group(weights)
    assert len({t.global_scale.item() for t in quantized.values()}) == 1
    for module, t in quantized.items():
        error = (nvfp4.dequantize(t) - weights[module]).norm() / weights[module].norm()
        assert error < 0.15


def test_gradients_arrive_at_the_masters_and_add_up_in_fp32(source: Checkpoint, tmp_path: Path) -> None:
    student = Student(make_arm(source, tmp_path / "arm", "W4A16_NVFP4"), load_model(source, "float32", "cpu"))
    ids = torch.randint(0, 512, (4, 16), generator=torch.Generator().manual_seed(0))

    def gradients(split: int) -> dict[str, torch.Tensor]:
        for master in student.masters.values():
            master.grad = None
        for part in ids.split(split):
            student.model(part, use_cache=False).logits.float().logsumexp(-1).sum().div(ids.numel()).backward()
        assert all(p.grad is None for p in student.model.parameters())
        return {name: master.grad.clone() for name, master in student.masters.items()}

    whole, parts = gradients(4), gradients(1)
    assert whole.keys() == student.masters.keys()
    for name in whole:
        assert whole[name].dtype == torch.float32
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-5, atol=1e-6)


def test_bf16_compute_keeps_fp32_masters_and_moves_at_tiny_rates(source: Checkpoint, tmp_path: Path) -> None:
    """100 steps of 1e-6 are invisible to BF16 weights of 0.01; the master moves, and so does what is exported."""
    student = Student(make_arm(source, tmp_path / "arm"), load_model(source, "bfloat16", "cpu"))
    with torch.no_grad():
        for master in student.masters.values():
            master.fill_(0.01)
    optimizer = torch.optim.AdamW(student.masters.values(), lr=1e-6, weight_decay=0.0)
    for _ in range(100):
        for master in student.masters.values():
            master.grad = torch.ones_like(master)
        optimizer.step()
    moved = student.masters["model.layers.0.mlp.up_proj.weight"]
    assert moved.dtype == torch.float32
    assert moved.mean().item() == pytest.approx(0.0099, abs=2e-6)
    student.deploy()
    assert student.model.model.norm.weight.unique().item() == torch.tensor(moved.mean().item()).bfloat16().item()


def test_a_bf16_arm_has_no_student(source: Checkpoint, tmp_path: Path) -> None:
    run_stage("arm", tmp_path / "bf16", {}, {}, lambda f: write_arm(f, "bf16", source, None, {}))
    with pytest.raises(ArtifactError, match="quantizes nothing"):
        Student(open_arm(tmp_path / "bf16"), load_model(source, "float32", "cpu"))


# --- calibration ---


def test_calibration_sees_the_largest_input_whatever_the_batching(source: Checkpoint) -> None:
    selection = select(load_skeleton(source), "NVFP4")
    docs = [Document.of(f"{i} the miller counts his sacks " * 6) for i in range(30)]
    windows = pack_in_memory([Part("text", 1.0, docs)], load_tokenizer(source.folder), 12, 32, 0, "x")
    model = load_model(source, "float32", "cpu")
    scales = calibrate(model, selection, windows).input_scales
    seen: dict[str, float] = {}
    hooks = [
        model.get_submodule(m).register_forward_pre_hook(
            lambda _, args, m=m: seen.__setitem__(m, max(seen.get(m, 0.0), args[0].abs().max().item()))
        )
        for m in selection.modules
    ]
    with torch.no_grad():
        for ids, positions in zip(windows.input_ids_ST, windows.position_ids_ST, strict=True):
            model(ids[None], position_ids=positions[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    assert scales.keys() == selection.modules.keys()
    for group in selection.groups:
        assert len({scales[m].item() for m in group}) == 1
        assert scales[group[0]].item() * 2688 == pytest.approx(max(seen[m] for m in group), rel=1e-5)
    doubled = calibrate(model, selection, windows, headroom=2.0).input_scales
    assert all(doubled[m].item() == pytest.approx(2 * scales[m].item(), rel=1e-6) for m in scales)


def test_zero_unreached_and_infinite_activations(source: Checkpoint) -> None:
    """A layer that sees only zeros gets the scale of amax 1.0."""
    selection = select(load_skeleton(source), "NVFP4")
    zeros = {m: torch.zeros(()) for m in selection.modules}
    assert {s.item() for s in group_input_scales(zeros, selection, 1.0).values()} == {torch.tensor(1 / 2688).item()}
    with pytest.raises(SourceError, match="never reached"):
        group_input_scales(dict(list(zeros.items())[1:]), selection, 1.0)
    with pytest.raises(SourceError, match="damaged"):
        group_input_scales({**zeros, "model.layers.0.mlp.down_proj": torch.tensor(float("inf"))}, selection, 1.0)


def test_calibration_sees_real_tokens_only_whatever_batch_and_padding(source: Checkpoint) -> None:
    """Batch 1 or 4, padded left or right with a token that would raise the largest activation: the same scales."""
    selection = select(load_skeleton(source), "NVFP4")
    docs = [Document.of(f"{i} the miller counts his sacks " * 6) for i in range(12)]
    windows = pack_in_memory([Part("text", 1.0, docs)], load_tokenizer(source.folder), 4, 32, 0, "x")
    model = load_model(source, "float32", "cpu")
    alone = calibrate(model, selection, windows, batch_size=1).input_scales

    def over(token: int) -> float:
        """How much larger than on the text the inputs of some module get on this token."""
        seen = calibrate(model, selection, Windows.of(torch.full((1, 32), token), torch.arange(32)[None])).input_scales
        return max(float(seen[name] / alone[name]) for name in alone)

    unused = max(sorted(set(range(512)) - set(windows.input_ids_ST.flatten().tolist()))[:12], key=over)
    assert over(unused) > 1.05
    for wider in (windows, padded(windows, 64, 0, unused), padded(windows, 0, 64, unused), padded(windows, 7, 9, unused)):
        for batch_size in (1, 4):
            scales = calibrate(model, selection, wider, batch_size=batch_size).input_scales
            for name, scale in alone.items():
                torch.testing.assert_close(scales[name], scale, rtol=1e-6, atol=0)


def test_weight_only_formats_need_no_calibration(source: Checkpoint) -> None:
    selection = select(load_skeleton(source), "W4A16_NVFP4")
    docs = [Document.of("a b c d e f g h " * 9)]
    windows = pack_in_memory([Part("text", 1.0, docs)], load_tokenizer(source.folder), 1, 8, 0, "x")
    assert calibrate(None, selection, windows).input_scales == {}
