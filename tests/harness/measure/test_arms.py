"""What a run does where its engine cannot serve an arm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.engines.available import EngineChoice
from harness.engines.transformers import FILES
from harness.measure import arms as measuring
from harness.measure.arms import Measuring
from harness.measure.subject import Found, Subject
from harness.records import record as records
from harness.records.record import Engine, EngineMemory, MemoryData
from qad.errors import EngineError
from qad.recipes.recipe import Measure

ON_DISK = MemoryData({"bf16": 10}, 10, 12, 5, 0)
SERVED = MemoryData({"bf16": 10}, 10, 12, 5, 0, serving=EngineMemory(kv_cache_tokens=7))


def run_of(folder: Path, engine: str, said: list[str]) -> Measuring:
    source: Any = SimpleNamespace(folder=folder / "source", digest="0" * 64, display_name="m")
    subject = Subject("bf16", source, "m", "float32", "cpu", 0)
    return Measuring([subject], Measure.model_validate({"engine": engine}), list, folder, said.append)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[EngineChoice | None]:
    """An engine that is there and serves nothing; the choices that were tried."""
    tried: list[EngineChoice | None] = []

    def memory_of(folder: Path, choice: EngineChoice | None, log: Path) -> tuple[MemoryData, Engine]:
        tried.append(choice)
        if choice is not None:
            raise EngineError("out of memory")
        return ON_DISK, Engine("files", "", "", "", "", False)

    monkeypatch.setattr(measuring, "memory_of", memory_of)
    monkeypatch.setattr(measuring, "run_engine", lambda name: EngineChoice("vllm"))
    return tried


def test_auto_measures_the_files_where_its_engine_fails(broken: list[EngineChoice | None], tmp_path: Path) -> None:
    said: list[str] = []
    run_of(tmp_path, "auto", said).memory()
    assert records.read(tmp_path / "measure" / "bf16" / "memory.json").data == ON_DISK
    assert broken == [EngineChoice("vllm"), None]
    assert "vllm does not serve it, so its files are measured: out of memory" in said[0]


def test_an_engine_that_was_asked_for_may_not_fail(broken: list[EngineChoice | None], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        run_of(tmp_path, "vllm", []).memory()


def test_a_record_of_another_engine_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Engine("vllm", "0.32.0", "bfloat16", "cuda", "CutlassNvFp4LinearKernel (native FP4)", False, True)
    path = tmp_path / "measure" / "bf16" / "memory.json"
    for choice, data in ((None, ON_DISK), (EngineChoice("vllm"), SERVED)):
        monkeypatch.setattr(measuring, "run_engine", lambda name, choice=choice: choice)
        monkeypatch.setattr(measuring, "memory_of", lambda *_, data=data: (data, engine))
        run_of(tmp_path, "auto", []).memory()
        assert records.read(path).data == data
    before = path.read_bytes()
    run_of(tmp_path, "auto", []).memory()
    assert path.read_bytes() == before, "the same engine, weights and settings: reused"
    assert records.read(path).engine.native_fp4 is True


def test_other_weights_under_the_same_path_are_measured_again(tmp_path: Path) -> None:
    """A record counts for the weights it was made of, not for the folder's name; and for its settings."""
    run = run_of(tmp_path, "transformers", [])
    (subject,) = run.subjects.values()
    assert run._missing("memory", {}) == [subject]
    subject.write(tmp_path / "measure" / "bf16" / "memory.json", Found(ON_DISK, FILES, {}), 0.0)
    assert run._missing("memory", {}) == []
    assert run._missing("memory", {"limit": 3}) == [subject]
    subject.__dict__["identity"] = "another export"
    assert run._missing("memory", {}) == [subject]
