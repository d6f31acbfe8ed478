"""examples/: every script does what its README says, on a tiny model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pipeline

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDED = Path(__file__).parents[1] / "harness" / "imported" / "recorded"
SMALL = [
    "dtype=float32",
    "train.tokens=2048",
    "train.seq_len=128",
    "train.warmup_steps=0",
    "calibrate.seq_len=128",
    "measure.accuracy.limit=20",
]


def example(name: str, *arguments: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    """What the script of a folder printed."""
    script = next(path for path in (EXAMPLES / name).iterdir() if path.name in ("run.sh", "run.py"))
    command = [sys.executable, script] if script.suffix == ".py" else ["bash", script]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "QAD_COMPILE": "0", "PYTHONPATH": str(EXAMPLES.parent)}
    words = [str(word) for word in (*command, *arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in codes, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def deployed(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run of examples/deploy, its recipe beside it, and what was printed."""
    folder = tmp_path_factory.mktemp("examples")
    said = (
        ("user", "How many sacks of flour does the miller count on day {0}?"),
        ("assistant", "{0} sacks, and then {0} more. " * 4),
    )
    chats = [[{"role": role, "content": text.format(i)} for role, text in said] for i in range(400)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    small = [word for setting in SMALL for word in ("--set", setting)]
    return folder / "run", example("deploy", tiny_llama_dir, folder / "chats.jsonl", folder / "run", *small)


def test_deploy(deployed: tuple[Path, str]) -> None:
    run, told = deployed
    assert (run / "export" / "qad" / "config.json").is_file()
    assert "next: qad gate" in told


def test_validate(deployed: tuple[Path, str], tiny_llama_dir: Path, tmp_path: Path) -> None:
    run, _ = deployed
    small = ["--measure", "memory,fidelity", "--data", run.parent / "chats.jsonl", "--tokens", "512", "--dtype", "float32"]
    told = example("validate", tiny_llama_dir, run / "export" / "qad", tmp_path / "out", *small, codes=(0, 1, 3))
    assert "KL divergence" in told
    shutil.copytree(run / "export" / "qad", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    example("validate", tiny_llama_dir, tmp_path / "broken", tmp_path / "none", *small, codes=(1,))
    assert not (tmp_path / "none").exists()


def test_servers(tmp_path: Path) -> None:
    told = example("servers", RECORDED / "vllm.json", RECORDED / "vllm.json", tmp_path)
    assert "CONCURRENCY 4" in told
    assert (tmp_path / "comparison" / "report" / "report.html").is_file()


@pytest.mark.slow
def test_seeds(deployed: tuple[Path, str], tmp_path: Path) -> None:
    told = example("seeds", f"{deployed[0]}.yaml", tmp_path, *SMALL)
    assert [line.split()[0] for line in told.splitlines()[-3:]] == ["0", "1", "2"]


@pytest.mark.slow
def test_torchrun(deployed: tuple[Path, str], tmp_path: Path) -> None:
    small = [word for setting in (*SMALL, "measure.accuracy=null") for word in ("--set", setting)]
    told = example("torchrun", "2", f"{deployed[0]}.yaml", tmp_path / "run", *small)
    assert told.splitlines()[-1] == f"serve: vllm serve {tmp_path / 'run' / 'export' / 'qad'}"


def test_policy(deployed: tuple[Path, str]) -> None:
    verdict = json.loads(example("policy", deployed[0], "ptq", codes=(0, 1, 3)))
    assert (verdict["policy"], verdict["arm"]) == ("mine", "ptq")
    assert [check["threshold"] for check in verdict["checks"]] == ["median_recovery", "kl", "memory_ratio"]


def test_import(tmp_path: Path) -> None:
    told = example("import", tmp_path / "out", codes=(0, 1, 3))
    assert "Nemotron 3 Nano 30B-A3B" in (tmp_path / "out" / "report" / "report.html").read_text()
    assert "Worst benchmark" in told


def test_the_notebook_runs(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, one after the other, without a server."""
    small = (
        "dtype=float32 train.tokens=1024 train.seq_len=128 calibrate.samples=4 measure.accuracy.limit=20 measure.throughput=null"
    )
    for name, value in {"MODEL": str(tiny_llama_dir), "OUT": str(tmp_path / "run"), "SMALL": small, "QAD_COMPILE": "0"}.items():
        monkeypatch.setenv(name, value)
    notebook = json.loads((EXAMPLES / "first_hour.ipynb").read_text(encoding="utf-8"))
    shown: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), shown)
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    assert shown["verdict"].outcome in ("PASS", "FAIL", "INCONCLUSIVE")
    assert len(shown["changed"]) > 0
