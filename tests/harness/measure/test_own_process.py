"""One process a model."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from harness.measure.own_process import ChildError, run_alone

LEAKY = """
import json, os, pathlib
HELD = []  # an engine that never gives memory back

def measure(out, size):
    import torch
    found = json.loads(pathlib.Path(out).read_text()) if pathlib.Path(out).exists() else []
    HELD.append(torch.ones(size, dtype=torch.uint8))
    found.append({"pid": os.getpid(), "held": sum(len(t) for t in HELD)})
    pathlib.Path(out).write_text(json.dumps(found))

def refuse():
    from qad.errors import DataError
    raise DataError("no such task")

def broken():
    raise RuntimeError("defect")
"""


@pytest.fixture
def leaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "leaky_engine.py").write_text(textwrap.dedent(LEAKY))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    return tmp_path


@pytest.mark.slow
def test_a_leaking_engine_leaks_into_no_other_measurement(leaky: Path) -> None:
    """D13: one process a model, its exit awaited; the second one starts with nothing held, and nothing is held here."""
    import json

    for _ in range(2):
        run_alone("leaky_engine:measure", {"out": str(leaky / "found.json"), "size": 50_000_000})
    first, second = json.loads((leaky / "found.json").read_text())
    assert first["held"] == second["held"] == 50_000_000
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    for pid in (first["pid"], second["pid"]):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_child_that_fails_says_so(leaky: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildError, match="could not do it") as caught:
        run_alone("leaky_engine:refuse", {})
    assert caught.value.exit_code == 2
    assert "qad: error: no such task" in capfd.readouterr().err
    with pytest.raises(ChildError, match="a defect, see above"):
        run_alone("leaky_engine:broken", {})
