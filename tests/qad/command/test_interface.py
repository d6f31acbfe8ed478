"""`import qad`: the commands as functions, and what they find as data frames."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import qad
from harness.records import record as record_files
from harness.records.record import AccuracyData, Engine, Item, MemoryData, Record, TaskScore
from qad.errors import UsageError

ROOT = Path(__file__).parents[3]


def test_neither_the_package_nor_the_command_imports_what_is_heavy_at_its_start() -> None:
    script = "import sys, qad, qad.command.cli; print(*{'torch', 'pandas', 'numpy', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    with pytest.raises(AttributeError, match="'qad' has no attribute 'trian'"):
        _ = qad.trian
    assert {"run", "plan", "check", "validate", "compare", "gate", "load_recipe"} <= {*dir(qad)}


def write(folder: Path) -> dict[str, Path]:
    """Records of three arms: 400 items of one task, 10 of them lost by ptq, 2 by qad."""
    engine = Engine("transformers", "5", "float32", "cpu", "torch", emulated=False)
    for arm, lost, size in (("bf16", 0, 1000), ("ptq", 10, 350), ("qad", 2, 350)):
        scores = [float(i % 4 > 0 and i >= lost * 4) for i in range(400)]
        items = [Item(f"d{i}", f"p{i}", f"t{i}", f"c{i}", score) for i, score in enumerate(scores)]
        task = TaskScore("facts", "1", "acc", "none", 0, True, 0.25, None, items)
        for data in (AccuracyData([task]), MemoryData({"bf16": size}, size, size, 500, 0)):
            made = Record(arm, "tiny", f"hash-{arm}", engine, {}, {}, "2026-01-01T00:00:00Z", 1.0, data)
            record_files.write(made, folder / arm / f"{made.kind}.json")
    return {arm: folder / arm for arm in ("bf16", "ptq", "qad")}


def test_a_comparison_is_data_frames_and_one_verdict(tmp_path: Path) -> None:
    said: list[str] = []
    found = qad.compare(write(tmp_path), tmp_path / "out", policy="size-first", say=said.append)
    assert "Median recovery" in said[0]
    assert found.report.is_file()
    kept = found.estimates.set_index(["quantity", "arm"]).sort_index()
    assert kept.loc[("size_ratio", "qad"), "value"].item() == 0.35
    assert found.comparison.memory_ratio["qad"].value == 0.35
    assert len(found.items) == 800
    assert (found.items.groupby("arm")["change"].value_counts()["ptq"]["worse"], found.items["repeat"].dtype) == (30, "Int64")
    assert found.memory.groupby("arm")["bytes"].sum().to_dict() == {"bf16": 2000, "ptq": 700, "qad": 700}
    empty = (found.training, found.throughput, found.parity)
    assert [(len(table), isinstance(table, pd.DataFrame)) for table in empty] == [(0, True)] * 3
    assert found.training["val_kl"].dtype == "float64"
    assert found.verdict == qad.gate(found, "size-first")
    assert qad.gate(tmp_path / "out", "size-first", "ptq").arm == "ptq"
    with pytest.raises(UsageError, match="measurement"):
        qad.compare(write(tmp_path), tmp_path / "bf16", say=said.append)
    with pytest.raises(UsageError, match=f"qad report {tmp_path / 'none'}"):
        _ = qad.Results(tmp_path / "none").estimates


def recipe(model: Path, folder: Path) -> Path:
    lines = (f"{i}: the river runs past {i} old mills and under a stone bridge, {i} boats on it." for i in range(300))
    (folder / "text.txt").write_text("\n\n".join(lines))
    raw: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "calibrate": {"data": str(folder / "text.txt"), "samples": 4, "seq_len": 32},
        "train": {"data": str(folder / "text.txt"), "tokens": 256, "seq_len": 32, "validation_tokens": 64},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(raw))
    return folder / "recipe.yaml"


def test_a_recipe_is_loaded_and_planned(tiny_llama_dir: Path, tmp_path: Path) -> None:
    said: list[str] = []
    loaded = qad.load_recipe(recipe(tiny_llama_dir, tmp_path), ["train.lr=3e-4"])
    assert loaded.training.lr == 3e-4
    assert qad.plan(loaded, say=said.append) is None
    assert any("2 steps of 128 tokens" in line for line in said)
    with pytest.raises(UsageError, match="did you mean 'smollm2-135m'"):
        qad.plan("smollm2-135n", say=said.append)


@pytest.mark.pipeline
def test_a_run_is_checked_and_validated_without_a_command_line(tiny_llama_dir: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = qad.run(recipe(tiny_llama_dir, tmp_path), tmp_path / "run", say=said.append)
    assert said[-1] == f"serve: vllm serve {tmp_path / 'run' / 'export' / 'qad'}"
    assert found.training["step"].tolist() == [0, 1, 2]
    assert set(found.memory["arm"]) == {"bf16", "ptq", "qad"}
    exported = tmp_path / "run" / "export" / "qad"
    assert qad.check(exported, source=tmp_path / "run" / "arms" / "qad") == []
    measure = {"fidelity": {"data": str(tmp_path / "text.txt"), "tokens": 256, "seq_len": 32}}
    folders = {"bf16": tiny_llama_dir, "mine": exported}
    validated = qad.validate(folders, tmp_path / "valid", measure=measure, dtype="float32", say=said.append)
    assert set(validated.estimates.query("quantity == 'kl'")["arm"]) == {"bf16", "mine"}
    assert validated.verdict is not None
    with pytest.raises(UsageError, match="unknown key 'fidelty': did you mean 'fidelity'"):
        qad.validate(folders, tmp_path / "other", measure={"fidelty": {}}, say=said.append)


def test_the_page_documents_every_name() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "reference" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = generate.python_page()
    for name in ("plan", "run", "check", "validate", "compare", "gate", "load_recipe"):
        assert f"## qad.{name}" in page
    assert "redo: bool = False" in page
    for table in ("estimates", "items", "memory", "throughput", "parity", "training"):
        assert f"`.{table}`" in page
