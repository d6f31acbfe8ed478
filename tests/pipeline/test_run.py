"""`qad run` on a tiny model, through folders: all of it, reuse, kills at any moment, and what a user does wrong."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from qad.artifact import open_artifact
from qad.command.cli import main
from qad.lock import only_one

pytestmark = pytest.mark.pipeline

SHARES = ("saturated_weight_share", "saturated_input_share")
SENTENCES = ["The river runs past the mill {0}.", "A heron waits {0} for fish.", "He counts {0} sacks of flour and {0} more."]


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAD_COMPILE", "0")


def write_recipe(folder: Path, model: Path, **train: Any) -> Path:
    text = folder / "text.jsonl"
    lines = [{"text": " ".join(s.format(i * 7 + j) for j, s in enumerate(SENTENCES * 3))} for i in range(400)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "model": str(model),
        "dtype": "float32",
        "quantize": {"format": "NVFP4", "exclude": ["lm_head"]},
        "calibrate": {"data": str(text), "samples": 8, "seq_len": 32},
        "train": {
            "data": str(text),
            "tokens": 12 * 128,
            "seq_len": 32,
            "batch_size": 4,
            "lr": 1e-4,
            "validate_every": 4,
            "save_every": 2,
            "validation_tokens": 256,
            "chunk": 64,
            **train,
        },
        "measure": {
            "engine": "transformers",
            "fidelity": {"data": str(text), "tokens": 512, "seq_len": 64},
            "accuracy": {"tasks": ["qad_agreement"], "limit": 40},
            "throughput": {"input_tokens": 16, "output_tokens": 4, "repeats": 2},
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def finished(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("run")
    recipe = write_recipe(folder, tiny_llama_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QAD_COMPILE", "0")
        assert main(["run", str(recipe), "--out", str(folder / "out")]) == 0
    return recipe, folder / "out"


def exported_bytes(run: Path) -> dict[str, bytes]:
    """Everything in the exported folders but the manifests, which hold times."""
    files = sorted(p for p in (run / "export").rglob("*") if p.is_file() and p.name != "qad_manifest.json")
    return {str(p.relative_to(run)): p.read_bytes() for p in files}


def test_the_run_folder_is_the_contract(finished: tuple[Path, Path]) -> None:
    _, run = finished
    for name in ("arms/bf16", "arms/ptq", "arms/qad", "export/ptq", "export/qad"):
        assert (run / name / "qad_manifest.json").is_file()
    for arm in ("bf16", "ptq", "qad"):
        assert {p.name for p in (run / "measure" / arm).iterdir()} == {
            "memory.json",
            "fidelity.json",
            "accuracy.json",
            "accuracy.samples.parquet",
            "throughput.json",
        }
    assert {p.name for p in (run / "report").iterdir()} >= {"report.html", "report.md", "report.json"}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"step", "tokens", "kl", "lr", "tokens_per_s", "val_kl", *SHARES}] * 13
    assert not list(run.rglob("*.partial"))
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["lr"] == 1e-4


def test_exported_folders_pass_the_check_and_name_no_path_of_this_machine(finished: tuple[Path, Path]) -> None:
    _, run = finished
    for arm in ("ptq", "qad"):
        assert main(["check", str(run / "export" / arm), "--strict"]) == 0
        assert main(["check", str(run / "export" / arm), "--source", str(run / "arms" / arm)]) == 0
        for name in ("config.json", "hf_quant_config.json", "README.md"):
            assert str(run.parent) not in (run / "export" / arm / name).read_text()


def test_the_card_holds_what_was_measured_and_its_owner_may_edit_it(finished: tuple[Path, Path]) -> None:
    _, run = finished
    folder = run / "export" / "qad"
    card = (folder / "README.md").read_text()
    assert "|  | BF16 | QAD | n |" in card.partition("## Recovery")[2]
    assert "KL divergence" in card
    assert "PTQ" not in card.partition("## Recovery")[2]
    facts = json.loads((folder / "qad_manifest.json").read_text())["files"]["README.md"]
    assert facts["bytes"] == len(card.encode())
    (folder / "README.md").write_text(card + "More.\n")
    open_artifact(folder, "checkpoint")
    (folder / "README.md").write_text(card)


def test_the_trained_checkpoint_differs_from_ptq_in_weights_and_not_in_calibration(finished: tuple[Path, Path]) -> None:
    _, run = finished
    ptq, qad = (load_file(run / "export" / arm / "model.safetensors") for arm in ("ptq", "qad"))
    assert ptq.keys() == qad.keys()
    scales = [n for n in ptq if n.endswith("input_scale")]
    assert all(ptq[n].item() == qad[n].item() for n in scales)
    assert any(not ptq[n].equal(qad[n]) for n in ptq if n.endswith(".weight"))


def test_qat_joins_a_finished_run_as_an_arm_of_its_own(finished: tuple[Path, Path], tmp_path: Path) -> None:
    """BF16, PTQ, QAT and QAD in one report; what was there is reused."""
    recipe, run = finished
    out = tmp_path / "out"
    shutil.copytree(run, out)
    made = (out / "arms" / "qad" / "qad_manifest.json").read_bytes()
    assert main(["run", str(recipe), "--out", str(out), "--set", "train.method=[qat, qad]"]) == 0
    assert (out / "arms" / "qad" / "qad_manifest.json").read_bytes() == made
    assert main(["check", str(out / "export" / "qat"), "--source", str(out / "arms" / "qat"), "--strict"]) == 0
    assert {p.name for p in (out / "measure" / "qat").iterdir()} == {p.name for p in (out / "measure" / "qad").iterdir()}
    assert "| PTQ | QAT | QAD |" in (out / "report" / "report.md").read_text()
    rows = [json.loads(line) for line in (out / "metrics-qat.jsonl").read_text().splitlines()]
    assert rows[-1]["val_cross_entropy"] < rows[0]["val_cross_entropy"]


def test_a_plain_ptq_beside_the_asked_one_is_what_a_plain_run_exports(finished: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, run = finished
    out = tmp_path / "out"
    asked = ["--set", "quantize.scales=mse", "--set", "quantize.plain=true", "--set", "measure.accuracy=null"]
    assert main(["run", str(recipe), "--out", str(out), "--set", "measure.throughput=null", *asked]) == 0
    plain, usual, other = (
        (folder / "model.safetensors").read_bytes()
        for folder in (out / "export" / "ptq_plain", run / "export" / "ptq", out / "export" / "ptq")
    )
    assert plain == usual
    assert plain != other
    assert "| BF16 | plain PTQ | PTQ | QAD |" in (out / "report" / "report.md").read_text()
    ratio = json.loads((out / "report" / "report.json").read_text())["comparison"]["kl_ratio_plain"]
    kl = {arm: json.loads((out / "measure" / arm / "fidelity.json").read_text())["data"] for arm in ("ptq_plain", "qad")}
    sums = {arm: sum(sequence["kl_sum"] for sequence in data["sequences"]) for arm, data in kl.items()}
    assert ratio["value"] == pytest.approx(sums["qad"] / sums["ptq_plain"])


def test_a_second_run_does_nothing_again(finished: tuple[Path, Path]) -> None:
    recipe, run = finished
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and run / "report" not in p.parents}
    assert main(["run", str(recipe), "--out", str(run)]) == 0
    changed = [p for p, t in before.items() if p.stat().st_mtime_ns != t]
    assert [p.name for p in changed] in ([], ["recipe.yaml"])


def test_a_trained_arm_is_replaced_only_where_that_is_asked_for(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever changed is named, a key or an input; what is made again are the changed stages alone."""
    recipe, run = write_recipe(tmp_path, tiny_llama_dir), tmp_path / "out"
    args = ["run", str(recipe), "--out", str(run), "--set", "measure.accuracy=null", "--set", "measure.throughput=null"]
    assert main(args) == 0

    def made() -> dict[str, int]:
        return {arm: (run / "arms" / arm / "qad_manifest.json").stat().st_mtime_ns for arm in ("ptq", "qad")}

    before = made()
    for changes, named in (
        (["train.lr=2e-4"], "train.lr 0.0001 -> 0.0002: qad, its export and its records would be made again"),
        (["calibrate.samples=4"], "calibrate.samples 8 -> 4; the text is another one: qad"),
        (["quantize.scales=mse", "seed=3"], 'quantize.scales "dynamic" -> "mse"; seed 0 -> 3'),
    ):
        capsys.readouterr()
        assert main([*args, *(part for change in changes for part in ("--set", change))]) == 2
        error = capsys.readouterr().err
        assert named in error
        assert "--redo" in error
        assert made() == before
        assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["lr"] == 1e-4
    text = tmp_path / "text.jsonl"
    words = text.read_text()
    text.write_text(words.replace("heron", "stork"))
    assert main(args) == 2
    assert "the text is another one; the train is another one; the validation is another one: qad" in capsys.readouterr().err
    text.write_text(words)
    assert main([*args, "--set", "train.lr=2e-4", "--redo"]) == 0
    assert "redo   train.lr 0.0001 -> 0.0002" in capsys.readouterr().out
    assert made()["ptq"] == before["ptq"]
    assert made()["qad"] != before["qad"]


def test_two_runs_into_one_folder_are_one(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock names its process, and dies with it."""
    recipe, run = write_recipe(tmp_path, tiny_llama_dir), tmp_path / "out"
    code = "import sys, pathlib, qad.lock as l\nwith l.only_one(pathlib.Path(sys.argv[1])):\n print('held', flush=True); input()"
    command = [sys.executable, "-c", code, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert main(["run", str(recipe), "--out", str(run)]) == 2
        assert f"is being filled by process {holder.pid}" in capsys.readouterr().err
        assert not run.exists()
        holder.kill()
    with only_one(run):
        pass
    assert list(tmp_path.glob(".out.lock")) == []


CLOCK = """{%- set today = strftime_now('%Y-%m-%d') -%}
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ today }} {{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_that_asks_for_the_time_is_told_the_same_tomorrow(
    make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_llama(tmp_path / "model")
    (model / "chat_template.jinja").write_text(CLOCK)
    recipe = write_recipe(tmp_path, model)
    chats = [
        {"messages": [{"role": "user", "content": f"How many {i}?"}, {"role": "assistant", "content": f"{i} " * 20}]}
        for i in range(200)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    data = f"{{source: jsonl, path: {tmp_path / 'chat.jsonl'}, field: messages}}"
    keys = [f"{key}={data}" for key in ("calibrate.data", "train.data", "measure.fidelity.data")]
    args = [part for key in (*keys, "measure.accuracy=null", "measure.throughput=null") for part in ("--set", key)]
    on_day(monkeypatch, 1)
    assert main(["run", str(recipe), "--out", str(tmp_path / "out"), *args]) == 0
    made = {arm: (tmp_path / "out" / "arms" / arm / "qad_manifest.json").read_bytes() for arm in ("ptq", "qad")}
    assert yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["template_time"].startswith("2026-03-01")
    on_day(monkeypatch, 2)
    assert main(["run", str(recipe), "--out", str(tmp_path / "out"), *args]) == 0
    assert {arm: (tmp_path / "out" / "arms" / arm / "qad_manifest.json").read_bytes() for arm in made} == made
    assert main(["run", str(recipe), "--out", str(tmp_path / "new"), *args, "--set", "template_time=2026-03-01"]) == 0
    assert exported_bytes(tmp_path / "new") == exported_bytes(tmp_path / "out")
    capsys.readouterr()
    assert main(["ptq", str(recipe), "--out", str(tmp_path / "ptq"), *args]) == 2
    assert "asks for the time" in capsys.readouterr().err


def on_day(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return datetime.datetime(2026, 3, day, 12)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Then)
    monkeypatch.setattr("qad.command.run.datetime", SimpleNamespace(datetime=Then))


def test_report_and_show_read_a_finished_run(finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, run = finished
    html = (run / "report" / "report.html").read_bytes()
    assert main(["report", str(run)]) == 0
    assert (run / "report" / "report.html").read_bytes() == html
    capsys.readouterr()
    assert main(["show", str(run / "export" / "qad")]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "checkpoint"
    assert main(["show", str(run)]) == 0
    told = capsys.readouterr().out
    assert "measured: accuracy, fidelity, memory, throughput" in told
    assert told.splitlines()[-1] == f"next: qad gate {run} --policy drop-1pct; vllm serve {run / 'export' / 'qad'}"


def test_show_says_where_an_interrupted_run_stands(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = finished
    for name in ("recipe.yaml", "arms/bf16", "arms/ptq", "measure/bf16"):
        place = tmp_path / "run" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (run / name).is_dir() else shutil.copyfile)(run / name, place)
    (tmp_path / "run" / "arms" / "qad.partial" / "state-00000006").mkdir(parents=True)
    assert main(["show", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "  qad    arm interrupted at step 6; export not yet; measured: nothing yet" in told
    assert f"qad run {tmp_path / 'run' / 'recipe.yaml'} --out {tmp_path / 'run'} goes on (" in told


def test_measure_by_hand(
    finished: tuple[Path, Path], tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = finished
    folder, text = run / "export" / "ptq", yaml.safe_load(recipe.read_text())["train"]["data"]
    out = tmp_path / "record.json"
    assert main(["measure", "memory", str(folder), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["kind"] == "memory"
    fidelity = ["measure", "fidelity", str(folder), "--out", str(out), "--data", text, "--tokens", "512", "--seq-len", "64"]
    assert main(fidelity) == 2  # no teacher
    other = shutil.copytree(tiny_llama_dir, tmp_path / "other")
    generation = {"_from_model_config": True, "bos_token_id": 1, "top_k": 7}
    (other / "generation_config.json").write_text(json.dumps(generation))
    capsys.readouterr()
    assert main([*fidelity, "--teacher", str(other), "--dtype", "float32"]) == 2
    assert "is not the original of" in capsys.readouterr().err
    assert main([*fidelity, "--teacher", str(other), "--other-teacher", "--dtype", "float32"]) == 0
    apart = json.loads(out.read_text())
    assert apart["settings"]["reference"] == "other"
    both = [f"bf16={run / 'measure' / 'bf16' / 'fidelity.json'}", f"ptq={out}"]
    assert main(["compare", *both, "--out", str(tmp_path / "cmp")]) == 2
    refused = capsys.readouterr().err
    assert "teacher (bf16 " in refused
    assert "reference (bf16 absent, ptq other)" in refused
    assert main([*fidelity, "--teacher", str(tiny_llama_dir), "--dtype", "float32"]) == 0
    in_run = json.loads((run / "measure" / "ptq" / "fidelity.json").read_text())
    by_hand = json.loads(out.read_text())
    assert by_hand["data"] == in_run["data"]
    assert by_hand["settings"] == in_run["settings"]
    assert by_hand["checkpoint"] == in_run["checkpoint"]
    original = ["--teacher", str(tiny_llama_dir), "--dtype", "float32", "--arm", "bf16"]
    assert main([*fidelity, *original]) == 2
    assert "--arm bf16 is the original's name" in capsys.readouterr().err
    baseline = [str(tiny_llama_dir) if part == str(folder) else part for part in fidelity]
    assert main([*baseline, *original]) == 0
    assert json.loads(out.read_text())["data"] == json.loads((run / "measure/bf16/fidelity.json").read_text())["data"]


def test_a_record_from_another_machine_is_accepted_by_its_hash(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    shutil.copytree(finished[1], run)
    for arm in ("qad", "ptq"):
        shutil.copytree(run / "export" / arm, away / arm)
    record = run / "measure" / "qad" / "memory.json"
    record.unlink()
    assert main(["measure", "memory", str(away / "qad"), "--arm", "qad", "--out", str(record)]) == 0
    assert main(["report", str(run)]) == 0
    capsys.readouterr()
    for arguments, message in (
        (["--arm", "custom"], "was measured as arm 'custom': measure it with --arm qad"),
        (["--arm", "qad"], "memory.json is of other weights"),
    ):
        assert main(["measure", "memory", str(away / "ptq"), *arguments, "--out", str(record)]) == 0
        assert main(["report", str(run)]) == 2
        assert message in capsys.readouterr().err


def test_a_noise_floor_joins_a_finished_run(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = finished
    out = tmp_path / "out"
    shutil.copytree(run, out)
    assert main(["run", str(recipe), "--out", str(out), "--set", "measure.noise_floor=true"]) == 0
    assert "noise floor, ptq against itself" in capsys.readouterr().out
    content = json.loads((out / "report" / "report.json").read_text())
    assert set(content["comparison"]["noise_floor"]) == {"bf16", "ptq"}


# --- killed at any moment ---


def start(recipe: Path, run: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "QAD_COMPILE": "0", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "qad", "run", str(recipe), "--out", str(run)]
    return subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A background shell hands down an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


MOMENTS = {
    "calibrating": "arms/ptq.partial",
    "first steps": "metrics.jsonl",
    "state saved": "arms/qad.partial/state-00000004",
    "exporting": "export/ptq.partial",
    "measuring": "measure/bf16/memory.json",
}


@pytest.mark.slow
def test_killed_at_five_moments_and_started_again_it_ends_in_the_same_bytes(finished: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, whole = finished
    run = tmp_path / "out"
    for awaited in MOMENTS.values():
        process = start(recipe, run)
        deadline = time.monotonic() + 120
        while not (run / awaited).exists():
            if process.poll() is not None:  # a moment too short to be caught: the run went on to its end
                break
            assert time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    final = start(recipe, run)
    output, _ = final.communicate(timeout=300)
    assert final.returncode == 0, output
    assert exported_bytes(run) == exported_bytes(whole)
    assert "report:" in output


def test_ctrl_c_exits_130_and_leaves_nothing_that_looks_finished(tiny_llama_dir: Path, tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, tiny_llama_dir), tmp_path / "out"
    process = start(recipe, run)
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in output
    assert not (run / "arms" / "qad").exists()


# --- what a user does wrong ---


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=nowhere/at/all"], "does not exist"),
        (["train.lrr=1"], "did you mean 'lr'?"),
        (["train.tokens=100000000"], "its text has"),
        (["train.data=none.jsonl"], "cannot be read"),
        (["measure.accuracy.tasks=[qad_agrement]"], "qad_agreement"),
        (["quantize.exclude=['*.q_proj']"], "include or exclude all of them"),
        (["quantize.exclude=[nothing]"], "matches no module"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_llama_dir)
    args = [a for o in overrides for a in ("--set", o)]
    assert main(["run", str(recipe), "--out", str(tmp_path / "out"), *args]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qad: error:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "out" / "arms").exists()


def test_a_run_of_another_model_and_a_foreign_folder_are_refused(
    finished: tuple[Path, Path], make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = finished
    other = make_llama(tmp_path / "other", seed=1)
    assert main(["run", str(recipe), "--out", str(run), "--set", f"model={other}"]) == 2
    assert "run of another model" in capsys.readouterr().err
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    assert main(["run", str(recipe), "--out", str(foreign)]) == 2
    assert [p.name for p in foreign.iterdir()] == ["thesis.tex"]


def test_a_layout_that_transformers_cannot_measure_is_refused_before_anything_runs(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = write_recipe(tmp_path, tiny_llama_dir), tmp_path / "out"
    assert main(["run", str(recipe), "--set", "export.layout=compressed-tensors", "--out", str(out)]) == 2
    assert "computes in bfloat16 only, dtype is float32" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_in_the_compressed_tensors_layout_is_measured_through_that_library(tiny_llama_dir: Path, tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path, tiny_llama_dir), tmp_path / "out"
    settings = ("export.layout=compressed-tensors", "dtype=bfloat16", "measure.accuracy=null", "measure.throughput=null")
    sets = [argument for setting in settings for argument in ("--set", setting)]
    assert main(["run", str(recipe), *sets, "--out", str(out)]) == 0
    config = json.loads((out / "export" / "qad" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    record = json.loads((out / "measure" / "qad" / "fidelity.json").read_text())
    assert record["engine"]["emulated"]


def test_two_seeds_of_one_recipe_are_one_arm(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """train.seed moves the order of the training text and nothing else; measured alike, both are one arm."""
    recipe, run = finished
    again = tmp_path / "again"
    only = ["--set", "measure.throughput=null", "--set", "measure.memory=false"]
    assert main(["run", str(recipe), "--out", str(again), "--set", "train.seed=1", *only]) == 0
    ptq, qad = (
        [(folder / "export" / arm / "model.safetensors").read_bytes() for folder in (run, again)] for arm in ("ptq", "qad")
    )
    assert ptq[0] == ptq[1]
    assert qad[0] != qad[1]
    records = [json.loads((folder / "measure" / "qad" / "accuracy.json").read_text()) for folder in (run, again)]
    assert [record["training"]["seed"] for record in records] == [0, 1]
    assert records[0]["training"]["recipe"] == records[1]["training"]["recipe"]
    assert "training" not in json.loads((run / "measure" / "ptq" / "accuracy.json").read_text())
    arms = [f"{arm}={folder / 'measure' / arm}" for folder, arm in ((run, "bf16"), (run, "ptq"), (run, "qad"), (again, "qad"))]
    out = tmp_path / "cmp"
    capsys.readouterr()
    assert main(["compare", *arms, "--out", str(out)]) == 0
    assert "Seed 0" in capsys.readouterr().out
    raw = json.loads((out / "report" / "report.json").read_text())
    assert [seed["seed"] for seed in raw["comparison"]["training_seeds"]["qad"]] == [0, 1]
    assert {record["training"]["seed"] for record in raw["records"] if record["arm"] == "qad"} == {0, 1}
    page = (out / "report" / "report.md").read_text()
    assert "**Training seeds, each by itself**" in page
    assert "QAD (training seed 1) | accuracy" in page
    assert main(["report", str(out)]) == 0
    assert (
        main(["run", str(recipe), "--out", str(again), "--redo", "--set", "train.seed=1", "--set", "train.lr=2e-4", *only]) == 0
    )
    capsys.readouterr()
    assert main(["compare", *arms, "--out", str(out)]) == 2
    assert "differ in more than the seed, in train.lr" in capsys.readouterr().err


def test_weights_alone_are_quantized_without_calibration_or_training(
    make_qwen3: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = yaml.safe_load(write_recipe(tmp_path, tmp_path).read_text())["calibrate"]["data"]
    model = make_qwen3(tmp_path / "moe", "qwen3_moe")  # which cannot be trained
    recipe, run = tmp_path / "weights.yaml", tmp_path / "out"
    fidelity = {"data": text, "tokens": 128, "seq_len": 64}
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": str(model),
                "dtype": "float32",
                "quantize": {"format": "W4A16_NVFP4"},
                "measure": {"engine": "transformers", "fidelity": fidelity},
            }
        )
    )
    assert main(["plan", str(recipe)]) == 0
    assert "train" not in capsys.readouterr().out
    assert main(["run", str(recipe), "--out", str(run)]) == 0
    assert sorted(p.name for p in (run / "export").iterdir()) == ["ptq"]
    assert json.loads((run / "arms" / "ptq" / "qad_manifest.json").read_text())["inputs"].keys() == {"source"}
    missing = json.loads((run / "report" / "report.json").read_text())["not_measured"]
    assert {"what": "Training curve", "why": "there is none: the recipe has no train"} in missing
    assert not [entry for entry in missing if "qad" in entry["what"].lower() or "Text of" in entry["what"]]
    assert main(["ptq", str(recipe), "--out", str(tmp_path / "arms" / "ptq")]) == 0
    capsys.readouterr()
    assert main(["train", str(recipe), "--out", str(tmp_path / "arms" / "qad")]) == 2
    assert "the recipe has no train" in capsys.readouterr().err
