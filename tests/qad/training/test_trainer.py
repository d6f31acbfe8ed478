"""The training loop on a tiny model: it learns, keeps the best, resumes to the bit, and counts tokens rightly."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qad.arms.arm import Arm, open_arm
from qad.errors import ArtifactError, TrainingError
from qad.numerics.compiled import compilation
from qad.recipes.job import Job, prepare
from qad.recipes.recipe import Method, Recipe
from qad.text.windows import Windows
from qad.training import trainer
from qad.training.optim import learning_rate
from qad.training.stages import arm_settings, ptq_arm, trained_arm
from qad.training.trainer import Trainer

SHARES = ("saturated_weight_share", "saturated_input_share")
SENTENCES = ["The river runs past the mill {0}.", "A heron waits {0} for fish.", "He counts {0} sacks of flour and {0} more."]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [{"text": " ".join(s.format(i * 7 + j) for j, s in enumerate(SENTENCES * 3))} for i in range(300)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe(model: Path, text: Path, **train: object) -> Recipe:
    settings = {
        "tokens": 10 * 4 * 32,
        "seq_len": 32,
        "batch_size": 4,
        "lr": 1e-4,
        "validate_every": 5,
        "save_every": 5,
        "validation_tokens": 256,
        "chunk": 64,
        "data": str(text),
    }
    return Recipe.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "calibrate": {"data": str(text), "samples": 8, "seq_len": 32},
            "train": {**settings, **train},
        }
    )


def train(recipe_: Recipe, folder: Path, method: Method = "qad") -> Arm:
    job = prepare(recipe_)
    with compilation(False):
        ptq_arm(job, folder / "ptq")
        trained_arm(job, method, folder / "ptq", folder / method, folder / "metrics.jsonl")
    return open_arm(folder / method)


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAD_COMPILE", "0")


@pytest.fixture(scope="module")
def trained(tiny_llama_dir: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Arm, Path]:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QAD_COMPILE", "0")
        return train(recipe(tiny_llama_dir, text_file, tokens=40 * 128), folder), folder


def test_held_out_kl_falls_below_ptq_and_the_best_checkpoint_is_kept(trained: tuple[Arm, Path]) -> None:
    arm, folder = trained
    training = arm.facts["training"]
    assert training["val_kl_best"] < 0.8 * training["val_kl_start"]
    validations = {r["step"]: r["val_kl"] for r in rows(folder / "metrics.jsonl") if r["val_kl"] is not None}
    assert validations[0] == training["val_kl_start"]
    assert min(validations.values()) == training["val_kl_best"] == validations[training["best_step"]]


def test_metrics_have_the_documented_keys_and_count_tokens(trained: tuple[Arm, Path]) -> None:
    metrics = rows(trained[1] / "metrics.jsonl")
    assert [set(r) for r in metrics] == [{"step", "tokens", "kl", "lr", "tokens_per_s", "val_kl", *SHARES}] * 41
    assert [r["tokens"] for r in metrics] == [128 * i for i in range(41)]
    assert all(r["kl"] >= 0 for r in metrics[1:])


def test_the_arm_holds_the_student_alone(trained: tuple[Arm, Path], tiny_llama_dir: Path) -> None:
    arm, _ = trained
    masters = load_file(arm.folder / "weights.safetensors")
    assert masters.keys() == load_file(tiny_llama_dir / "model.safetensors").keys()
    assert all(t.dtype == torch.float32 for t in masters.values())
    assert sorted(p.name for p in arm.folder.iterdir()) == [
        "arm.json",
        "metrics.jsonl",
        "qad_manifest.json",
        "scales.safetensors",
        "selection.json",
        "weights.safetensors",
    ]
    assert arm.facts["tokens"] == {"train": 5120, "validation": 256}


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("kill_after", [3, 5, 7])
def test_interrupted_and_resumed_equals_uninterrupted_to_the_bit(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_after: int
) -> None:
    job = recipe(tiny_llama_dir, text_file)
    whole = train(job, tmp_path / "whole")
    advance = Trainer._advance

    def killed(self: Trainer, bar: object) -> None:
        if self.progress.step == kill_after:
            raise _Killed
        advance(self, bar)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_advance", killed)
        with pytest.raises(_Killed):
            train(job, tmp_path / "parts")
    assert not (tmp_path / "parts" / "qad").exists()
    resumed = train(job, tmp_path / "parts")
    a, b = (load_file(arm.folder / "weights.safetensors") for arm in (whole, resumed))
    assert all(torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a)
    assert whole.facts["training"] == resumed.facts["training"]
    timeless = [
        [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in rows(tmp_path / p / "metrics.jsonl")]
        for p in ("whole", "parts")
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize(("minutes", "saved"), [(1e-9, [1, 2, 3, 4, 5, 6]), (60.0, [6])])
def test_states_are_saved_by_time_and_when_they_are_decides_nothing(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, saved: list[int]
) -> None:
    seen: list[int] = []
    save = trainer.save_state

    def watched(folder: Path, step: int, *rest: object) -> None:
        seen.append(step)
        save(folder, step, *rest)  # type: ignore[arg-type]
        assert len(list(folder.glob("state-*"))) == 1

    monkeypatch.setattr(trainer, "save_state", watched)
    by_time, by_steps = (recipe(tiny_llama_dir, text_file, tokens=6 * 128, save_every=2, save_minutes=m) for m in (minutes, None))
    train(by_time, tmp_path)
    assert seen == saved
    assert arm_settings(by_time, "qad") == arm_settings(by_steps, "qad")
    assert "save_minutes" not in arm_settings(by_time, "qad")["train"]


def test_state_without_moments_is_refused(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    job = recipe(tiny_llama_dir, text_file)
    advance = Trainer._advance

    def killed(self: Trainer, bar: object) -> None:
        if self.progress.step == 5:
            raise _Killed
        advance(self, bar)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_advance", killed)
        with pytest.raises(_Killed):
            train(job, tmp_path)
    state = next((tmp_path / "qad.partial").glob("state-*")) / "tensors.safetensors"
    save_file({n: t for n, t in load_file(state).items() if not n.startswith("exp_avg_sq")}, state)
    with pytest.raises(ArtifactError, match="lacks the state of"):
        train(job, tmp_path)


def test_micro_batches_change_nothing_but_rounding(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    """Gradients are normalised by the tokens of the whole step: 4 x 1 and 1 x 4 agree (W4A16: no activation rounding)."""
    kls = []
    for micro in (4, 1):
        job = recipe(tiny_llama_dir, text_file, tokens=3 * 128, micro_batch_size=micro)
        job = job.model_copy(update={"quantize": job.quantize.model_copy(update={"format": "W4A16_NVFP4"})})
        train(job, tmp_path / str(micro))
        kls.append([r["kl"] for r in rows(tmp_path / str(micro) / "metrics.jsonl")[1:]])
    assert kls[0] == pytest.approx(kls[1], rel=1e-4)


def losses_of(folder: Path) -> list[float]:
    return [r["cross_entropy"] if "cross_entropy" in r else r["kl"] for r in rows(folder / "metrics.jsonl")[1:]]


def test_qat_lowers_cross_entropy_and_drifts_from_the_teacher_where_qad_does_not(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, trained: tuple[Arm, Path]
) -> None:
    """Finding 1 of the method, in sign: QAD wins in held-out KL, QAT in cross-entropy on the text."""
    arm = train(recipe(tiny_llama_dir, text_file, tokens=20 * 128, method="qat"), tmp_path, "qat")
    assert arm.name == "qat"
    training, metrics = arm.facts["training"], rows(tmp_path / "metrics.jsonl")
    assert training["best_step"] == 20  # picked by cross-entropy, not by the KL
    assert training["val_loss_best"] < training["val_loss_start"] - 0.1
    assert training["val_kl_best"] > 2 * trained[0].facts["training"]["val_kl_best"]
    assert all(row["kl"] is None for row in metrics)
    assert metrics[-1]["val_cross_entropy"] == training["val_loss_last"]


@pytest.mark.parametrize("loss", ["mse", "reverse_kl", "jsd"])
def test_every_loss_brings_the_student_nearer(tiny_llama_dir: Path, text_file: Path, tmp_path: Path, loss: str) -> None:
    training = train(recipe(tiny_llama_dir, text_file, loss=loss), tmp_path).facts["training"]
    assert training["val_kl_best"] < training["val_kl_start"]


def test_the_whole_cached_teacher_trains_like_the_live_one(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    live = train(recipe(tiny_llama_dir, text_file), tmp_path / "live")
    cached = train(recipe(tiny_llama_dir, text_file, teacher_cache=512), tmp_path / "cached")
    assert losses_of(tmp_path / "cached") == pytest.approx(losses_of(tmp_path / "live"), rel=1e-4)
    assert (tmp_path / "cached" / "teacher_cache" / "shard-00000.safetensors").is_file()
    assert live.facts["training"]["val_kl_start"] == cached.facts["training"]["val_kl_start"]


@pytest.mark.filterwarnings("ignore:.*inputs lie above what was calibrated:UserWarning")
def test_a_larger_teacher_with_a_padded_vocabulary(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, make_llama: Callable[..., Path]
) -> None:
    teacher = make_llama(
        tmp_path / "teacher", seed=1, hidden_size=96, vocab_size=576, num_attention_heads=6, num_key_value_heads=3
    )
    job = prepare(recipe(tiny_llama_dir, text_file, teacher=str(teacher)))
    assert job.shared_ids == max(job.tokenizer.get_vocab().values()) + 1 <= 512
    training = train(recipe(tiny_llama_dir, text_file, teacher=str(teacher), lr=1e-3), tmp_path).facts["training"]
    assert training["val_kl_best"] < training["val_kl_start"]


def test_c9_a_step_without_a_supervised_token_changes_nothing_and_is_counted(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three steps is fully masked."""
    whole = Job.train_windows

    def masked(job: Job) -> Windows:
        stored = whole(job)
        windows = stored.at(torch.arange(len(stored)))
        counted = windows.counted_ST.clone()
        counted[4:8] = False
        return dataclasses.replace(windows, counted_ST=counted)

    monkeypatch.setattr(Job, "train_windows", masked)
    with pytest.warns(UserWarning, match="step 2 has no supervised token and changes nothing"):
        arm = train(recipe(tiny_llama_dir, text_file, tokens=3 * 128, validate_every=1), tmp_path)
    assert arm.facts["training"]["steps_without_tokens"] == 1
    metrics = rows(tmp_path / "metrics.jsonl")
    assert metrics[2]["kl"] is None
    assert metrics[2]["val_kl"] == metrics[1]["val_kl"] != metrics[3]["val_kl"]
    masters = load_file(arm.folder / "weights.safetensors")
    assert all(torch.isfinite(m).all() for m in masters.values())


@pytest.mark.filterwarnings("ignore:.*inputs lie above what was calibrated:UserWarning")
def test_patience_stops_and_keeps_the_best(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="never fell below|above its PTQ start"):
        train(recipe(tiny_llama_dir, text_file, lr=1.0, tokens=40 * 128, validate_every=1, patience=2), tmp_path)
    assert rows(tmp_path / "metrics.jsonl")[-1]["step"] < 40


def test_c10_weights_that_do_not_move_are_said(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="of the weights have moved in 5 steps|not one quantized value|never fell below"):
        arm = train(recipe(tiny_llama_dir, text_file, lr=1e-30), tmp_path)
    assert arm.facts["training"]["moved_masters"] < 0.01
    assert arm.facts["training"]["moved_deployed"] == 0.0


def test_moved_shares_are_recorded(trained: tuple[Arm, Path]) -> None:
    training = trained[0].facts["training"]
    assert 0.5 < training["moved_masters"] <= 1.0
    assert 0.0 < training["moved_deployed"] < 1.0


def test_only_the_chosen_parameters_train(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    arm = train(recipe(tiny_llama_dir, text_file, trainable=["*.mlp.*"]), tmp_path)
    source = load_file(tiny_llama_dir / "model.safetensors")
    for name, master in load_file(arm.folder / "weights.safetensors").items():
        assert torch.equal(master, source[name].float()) == (".mlp." not in name), name


def test_weight_only_steps_leave_activations_alone_and_validation_does_not(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    """W4A16 training deployed as W4A4: the first steps' losses are those of W4A16, the validation that of W4A4."""
    deployed = train(recipe(tiny_llama_dir, text_file, tokens=5 * 128), tmp_path / "a")
    mixed = train(recipe(tiny_llama_dir, text_file, tokens=5 * 128, weight_only_steps=5), tmp_path / "b")
    assert deployed.facts["training"]["val_kl_start"] == mixed.facts["training"]["val_kl_start"]
    assert losses_of(tmp_path / "b")[0] < losses_of(tmp_path / "a")[0]
    assert mixed.input_scales.keys() == deployed.input_scales.keys()


def test_c14_a_state_saved_mid_run_holds_the_student_alone(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No teacher tensors, three numbers a student parameter and the optimizer's step."""
    advance = Trainer._advance

    def killed(self: Trainer, bar: object) -> None:
        if self.progress.step == 5:
            raise _Killed
        advance(self, bar)

    monkeypatch.setattr(Trainer, "_advance", killed)
    with pytest.raises(_Killed):
        train(recipe(tiny_llama_dir, text_file), tmp_path)
    tensors = load_file(next((tmp_path / "qad.partial").glob("state-*")) / "tensors.safetensors")
    names = load_file(tiny_llama_dir / "model.safetensors").keys()
    kinds = ("master", "exp_avg", "exp_avg_sq", "step")
    assert tensors.keys() == {f"{kind}.{name}" for kind in kinds for name in names}


def poisoned(monkeypatch: pytest.MonkeyPatch, steps: set[int], value: float) -> list[int]:
    """Losses of these steps become `value`, gradients with them; returns the steps that were asked for."""
    backward, asked = Trainer._backward, []

    def poison(self: Trainer, step: int) -> float | None:
        asked.append(step)
        loss = backward(self, step)
        if loss is None or step not in steps:
            return loss
        for master in self.student.masters.values():
            if master.grad is not None:
                master.grad *= value
        return loss * value

    monkeypatch.setattr(Trainer, "_backward", poison)
    return asked


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_training_and_the_last_good_state_is_kept(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    with monkeypatch.context() as patch:
        asked = poisoned(patch, {5, 6, 7, 8, 9, 10}, value)
        with (
            pytest.warns(UserWarning, match=f"step [56]: loss {value:g}, .*changes nothing"),
            pytest.raises(TrainingError, match=r"at step 7: .* for 3 steps on end .* of step 4 is kept .*Lower train.lr"),
        ):
            train(recipe(tiny_llama_dir, text_file), tmp_path / "poisoned")
    assert asked == [1, 2, 3, 4, 5, 6, 7]
    kept = next((tmp_path / "poisoned" / "qad.partial").glob("state-*"))
    assert all(torch.isfinite(tensor).all() for tensor in load_file(kept / "tensors.safetensors").values())
    assert kept.name.endswith("4")
    arms = [train(recipe(tiny_llama_dir, text_file), tmp_path / name) for name in ("poisoned", "through")]
    resumed, through = (load_file(arm.folder / "weights.safetensors") for arm in arms)  # as if nothing had been wrong
    assert all(torch.equal(resumed[name], through[name]) for name in through)


def test_one_step_that_is_no_number_changes_nothing_and_training_goes_on(
    tiny_llama_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, {2, 3, 5}, math.nan)
    with pytest.warns(UserWarning, match="changes nothing"):
        arm = train(recipe(tiny_llama_dir, text_file), tmp_path)
    assert arm.facts["training"]["step"] == 10
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl") if row["step"] and row["kl"] is None] == [2, 3, 5]
    assert all(math.isfinite(row["val_kl"]) for row in rows(tmp_path / "metrics.jsonl") if row["val_kl"] is not None)


@pytest.mark.filterwarnings("ignore:.*inputs lie above what was calibrated:UserWarning")
def test_a_collapsing_rate_warns_and_the_ptq_weights_are_kept(tiny_llama_dir: Path, text_file: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="never fell below its PTQ start"):
        arm = train(recipe(tiny_llama_dir, text_file, lr=0.3, tokens=5 * 128), tmp_path)
    assert not arm.trained
    assert arm.facts["training"]["best_step"] == 0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]), ("cosine", [0.5, 1, 1, 0.8536, 0.5, 0.1464])],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    config = Recipe.model_validate(
        {
            "model": "x",
            "calibrate": {"data": "python-docs"},
            "train": {
                "data": "python-docs",
                "tokens": 6 * 64,
                "seq_len": 16,
                "batch_size": 4,
                "lr": 1.0,
                "schedule": schedule,
                "warmup_steps": 2,
            },
        }
    ).train
    assert [learning_rate(config, step) for step in range(1, 7)] == pytest.approx(expected, abs=1e-4)
    assert math.isclose(learning_rate(config, 2), 1.0)
