"""A run folder as `qad run` leaves it, with invented numbers of a realistic size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.records import record as record_files
from harness.records.record import (
    AccuracyData,
    Data,
    Engine,
    FidelityData,
    FidelitySequence,
    Item,
    MemoryData,
    Record,
    TaskScore,
    ThroughputData,
    ThroughputPoint,
)

MODEL = "SmolLM2-135M-Instruct, dequantized from Q4_1"
PROVENANCE = {
    "producer": {"name": "nvfp4-qad", "version": "0.1.0", "commit": "8d1f0c2b7e5a4c3d9b8a7f6e5d4c3b2a19081726", "dirty": True},
    "environment": {
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "transformers": "5.24.0", "lm_eval": "0.4.13"},
        "os": "Linux x86_64",
        "cpu": "Example 3 GHz avx2 avx512f",
        "cores": 2,
        "memory_bytes": 24 * 2**30,
        "gpus": [],
    },
    "argv": ["qad", "run", "recipe.yaml", "--out", "RUN"],
}
RECIPE = """model: models/SmolLM2-135M-Instruct
seed: 0
quantize:
  format: NVFP4
  exclude: [lm_head]
train:
  method: qad
  data: python-docs
  tokens: 51200
  lr: 1.0e-4
"""
# arm -> (share of a cluster's margin that quantization moves, KL per token, nats above the teacher)
LOSS = {"bf16": (0.0, 0.0, 0.0), "ptq": (0.45, 0.41, 0.32), "qad": (0.22, 0.19, 0.07)}


def make_record(arm: str, data: Data, **changes: Any) -> Record:
    emulated = arm != "bf16" and not isinstance(data, MemoryData)
    path = ("NVFP4 dequantized, then " if emulated else "") + "torch float32 matmul, sdpa attention"
    engine = Engine("transformers", "5.24.0", "float32", "cpu", path, emulated)
    if isinstance(data, MemoryData):
        engine = Engine("files", "", "", "", "safetensors headers", False)
    fields: dict[str, Any] = {
        "arm": arm,
        "model": MODEL,
        "checkpoint": (arm * 32)[:64],
        "engine": engine,
        "settings": {"seed": 0},
        "provenance": PROVENANCE,
        "created": "2026-01-15T10:20:30Z",
        "seconds": 61.5,
        "data": data,
    }
    return Record(**{**fields, **changes})


def make_accuracy(arm: str) -> AccuracyData:
    tasks = []
    for number, (name, n, right, chance) in enumerate((("qad_agreement", 300, 0.82, 0.5), ("qad_facts", 306, 0.68, 0.25))):
        rng = np.random.default_rng(number)
        cluster = np.arange(n) // 10
        margin = right - 0.5 + 0.15 * rng.standard_normal(n // 10 + 1)[cluster] + 0.35 * rng.standard_normal(n)
        moved = LOSS[arm][0] * (0.16 * rng.standard_normal(n) - 0.06)
        scores = (margin + moved > 0).astype(float)
        items = [
            Item(f"d{i}", f"p{i}", f"t{i}", f"template {c}", float(s))
            for i, (c, s) in enumerate(zip(cluster, scores, strict=True))
        ]
        tasks.append(TaskScore(name, "1", "acc", "none", 0, True, chance, None, items))
    return AccuracyData(tasks)


def make_fidelity(arm: str) -> FidelityData:
    rng = np.random.default_rng(7)
    _, kl, loss = LOSS[arm]
    sequences = []
    for i in range(24):
        level, size, shift = (2.9 + 0.25 * rng.standard_normal(), math.exp(0.35 * rng.standard_normal()), rng.standard_normal())
        size *= math.exp(0.12 * rng.standard_normal() * (arm == "qad"))
        nll = level + loss * size * (1 + 0.3 * shift) + (arm != "bf16") * 0.03 * rng.standard_normal()
        sequences.append(
            FidelitySequence(f"doc {i}", 255, 255 * kl * size, round(255 * (1 - 0.55 * kl * size)), 255 * level, 255 * nll)
        )
    return FidelityData(
        "python-docs", sequences, {"p50": 0.4 * kl, "p90": 2.4 * kl, "p99": 8 * kl, "p99_9": 17 * kl, "max": 31 * kl}
    )


def make_memory(arm: str) -> MemoryData:
    classes = {"bf16": 269_030_016}
    if arm != "bf16":
        classes = {"fp4_codes": 53_084_160, "block_scales": 6_635_520, "global_scales": 1_680, "bf16": 56_693_376}
    tensors = sum(classes.values())
    return MemoryData(classes, tensors, tensors + 30_184, 134_515_008, 0 if arm == "bf16" else 106_168_320)


def make_throughput(arm: str) -> ThroughputData:
    slow = {"bf16": 1.0, "ptq": 0.71, "qad": 0.70}[arm]
    return ThroughputData(
        [
            ThroughputPoint("prefill", 1, 256, 16, [412.0 * slow, 398.5 * slow * (1.04 - slow / 25), 405.2 * slow]),
            ThroughputPoint("decode", 1, 256, 16, [13.1 * slow, 12.7 * slow, 12.9 * slow * (0.9 + slow / 10)]),
        ]
    )


def make_steps() -> list[dict[str, Any]]:
    rng = np.random.default_rng(11)
    steps: list[dict[str, Any]] = [{"step": 0, "tokens": 0, "kl": None, "lr": 1e-4, "tokens_per_s": None, "val_kl": 0.442}]
    for step in range(1, 51):
        level = 0.19 + 0.25 * math.exp(-step / 11)
        steps.append(
            {
                "step": step,
                "tokens": 1024 * step,
                "kl": level * math.exp(0.08 * rng.standard_normal()),
                "lr": 1e-4 * min(1, step / 5),
                "tokens_per_s": 61.0,
                "val_kl": level + 0.0004 * max(0, step - 40) if step % 10 == 0 else None,
            }
        )
    return steps


def make_records(arms: tuple[str, ...] = ("bf16", "ptq", "qad")) -> list[Record]:
    return [make_record(arm, make(arm)) for arm in arms for make in (make_accuracy, make_fidelity, make_memory, make_throughput)]


def write_run(run: Path, records: list[Record]) -> None:
    for record in records:
        record_files.write(record, run / "measure" / record.arm / f"{record.kind}.json")
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in make_steps()), encoding="utf-8")
    (run / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    manifest = {"kind": "arm", "digest": "5c" * 32, "producer": PROVENANCE["producer"]}
    for name in ("arms/ptq", "arms/qad", "export/qad"):
        (run / name).mkdir(parents=True, exist_ok=True)
        (run / name / "qad_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def write_samples(run: Path, records: list[Record], text: str = "Is {0} right?") -> None:
    """What an accuracy measurement keeps of every answer; the columns that a report reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for record in records:
        if not isinstance(record.data, AccuracyData):
            continue
        rows = [
            {
                "task": task.task,
                "filter": task.filter,
                "doc_hash": item.doc_hash,
                "prompt_hash": item.prompt_hash,
                "repeat": 0,
                "prompt": text.format(item.doc_hash),
                "target": "yes",
                "text": f"{text.format(record.arm)} {'yes' if item.score else 'no'}",
            }
            for task in record.data.tasks
            for item in task.items
        ]
        path = run / "measure" / record.arm / "accuracy.samples.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def keep_samples() -> Callable[..., None]:
    """Writes the samples of a run's records: (run, records, text with a place for what is asked)."""
    return write_samples


@pytest.fixture
def record_of() -> Callable[..., Record]:
    """Makes a record of an arm and its data."""
    return make_record


@pytest.fixture(scope="session")
def _made() -> list[Record]:
    return make_records()


@pytest.fixture
def records(_made: list[Record]) -> list[Record]:
    """Twelve records: three arms, four kinds."""
    return list(_made)


@pytest.fixture
def run(tmp_path: Path, records: list[Record]) -> Path:
    """The finished run folder of those records."""
    write_run(tmp_path / "run", records)
    return tmp_path / "run"


@pytest.fixture
def drawn() -> None:
    """Asks for real figures; without it `_undrawn` saves the second that drawing eight of them takes."""


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("reports.figures.drawing._svg", lambda prefix, *_args, **_kwargs: f'<svg id="{prefix}"></svg>')
