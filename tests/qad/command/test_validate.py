"""`qad validate`: folders that any tool made, checked, measured, judged, in one command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from export.writer import export_arm
from qad.command.cli import main

FAST = ["--tasks", "qad_agreement", "--limit", "40", "--tokens", "512", "--seq-len", "64", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folders(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, ptq (ModelOpt layout), other (W4A16), text.txt."""
    place = tmp_path_factory.mktemp("validate")
    lines = (f"{i}: the river runs past {i} old mills and under a stone bridge, {i} boats on it." for i in range(300))
    (place / "text.txt").write_text("\n\n".join(lines))
    for name, format in (("ptq", "NVFP4"), ("other", "W4A16_NVFP4")):
        recipe = {
            "model": str(tiny_llama_dir),
            "dtype": "float32",
            "quantize": {"format": format},
            "calibrate": {"data": str(place / "text.txt"), "samples": 4, "seq_len": 32},
        }
        (place / f"{name}.yaml").write_text(json.dumps(recipe))
        assert main(["ptq", str(place / f"{name}.yaml"), "--out", str(place / "arms" / name)]) == 0
        export_arm(place / "arms" / name, place / name)
        for path in (place / name).glob("qad_manifest.json"):
            path.unlink()  # as if another tool had made it
    shutil.copytree(tiny_llama_dir, place / "model")
    return place


def validate(place: Path, out: Path, *arms: str) -> int:
    named = [f"{arm}={place / folder}" for arm, folder in (part.split("=") for part in arms)]
    return main(["validate", *named, "--out", str(out), "--data", str(place / "text.txt"), *FAST])


@pytest.mark.pipeline
def test_folders_are_checked_measured_and_judged(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    code = validate(folders, out, "bf16=model", "ptq=ptq", "w4a16=other")
    told = capsys.readouterr().out
    assert code in (0, 1, 3)
    assert "check  ptq: ok (" in told
    assert "KL divergence" in told
    assert "nothing tells which model" in told
    for arm in ("bf16", "ptq", "w4a16"):
        assert {p.name for p in (out / "measure" / arm).glob("*.json")} == {"memory.json", "fidelity.json", "accuracy.json"}
    report = json.loads((out / "report" / "report.json").read_text())
    unmeasured = json.dumps(report["not_measured"])
    assert "Throughput of w4a16" in unmeasured
    assert "of qad" not in unmeasured
    assert yaml.safe_load((out / "recipe.yaml").read_text())["arms"]["ptq"] == str(folders / "ptq")
    verdict = main(["gate", str(out), "--arm", "ptq"])
    assert verdict == code
    before = {p: p.stat().st_mtime_ns for p in (out / "measure").rglob("*")}
    assert validate(folders, out, "bf16=model", "ptq=ptq", "w4a16=other") == code
    assert {p: p.stat().st_mtime_ns for p in (out / "measure").rglob("*")} == before


def test_a_broken_folder_stops_it_before_anything_is_measured(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders / "ptq", tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    for name in [n for n in tensors if n.endswith("weight_scale_2")]:
        del tensors[name]
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    named = [f"bf16={folders / 'model'}", f"ptq={folders / 'ptq'}", f"qad={tmp_path / 'broken'}"]
    assert main(["validate", *named, "--out", str(tmp_path / "run"), *FAST]) == 1
    captured = capsys.readouterr()
    assert "check  ptq: ok" in captured.out
    assert "check  qad: broken" in captured.out
    assert "error: E3 x14, such as model.layers.0" in captured.out
    assert "qad would be served wrong, so nothing was measured" in captured.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["bf16=model"], "at least one quantized folder"),
        (["ptq=ptq", "qad=other"], "give the original as bf16=DIR"),
        (["bf16=model", "ptq=ptq", "ptq=other"], "ptq is given twice"),
        (["bf16=ptq", "ptq=other"], "is quantized: give the BF16 original"),
    ],
)
def test_a_mistake_is_one_line(
    folders: Path, tmp_path: Path, arms: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate(folders, tmp_path / "run", *arms) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_another_folder_and_an_unknown_kind_are_refused(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert validate(folders, tmp_path / "mine", "bf16=model", "ptq=ptq") == 2
    assert "is no validation's folder" in capsys.readouterr().err
    named = [f"bf16={folders / 'model'}", f"ptq={folders / 'ptq'}", "--out", str(tmp_path / "run"), "--measure", "speed"]
    assert main(["validate", *named]) == 2
    assert "'speed' is unknown: use memory, fidelity, accuracy, throughput" in capsys.readouterr().err
