"""One process a model."""

from __future__ import annotations

import importlib
import os
import textwrap
from pathlib import Path

import pytest

from harness.measure.own_process import ChildError, run_apart
from qad.errors import DataError

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

def killed():
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def leaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "leaky_engine.py").write_text(textwrap.dedent(LEAKY))
    monkeypatch.syspath_prepend(tmp_path)  # which a spawned child is told
    return tmp_path


@pytest.mark.slow
def test_a_leaking_engine_leaks_into_no_other_measurement(leaky: Path) -> None:
    """One process a model, its exit awaited; the second one starts with nothing held, and nothing is held here."""
    import json

    for _ in range(2):
        run_apart(importlib.import_module("leaky_engine").measure, str(leaky / "found.json"), 50_000_000)
    first, second = json.loads((leaky / "found.json").read_text())
    assert first["held"] == second["held"] == 50_000_000
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    for pid in (first["pid"], second["pid"]):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_child_that_fails_says_so(leaky: Path) -> None:
    engine = importlib.import_module("leaky_engine")
    with pytest.raises(DataError, match="no such task"):
        run_apart(engine.refuse)
    with pytest.raises(RuntimeError, match="defect"):
        run_apart(engine.broken)
    with pytest.raises(ChildError, match="killed was killed, by the system where memory ran out"):
        run_apart(engine.killed)
