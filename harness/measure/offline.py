"""Measure arms by an engine's own benchmark, which runs the engine in its process: no server, no wire, no load tool.

Cells, prompts and the order of arms are those of `sweep`. Each run starts the engine anew, so no cache outlives it. What was
asked and what came back stays beside the record: REPEAT-CELL.jsonl, .json, .json.requests, .json.log.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.engines import trtllm
from harness.engines.trtllm_bench import WARM_UP, BenchRun, check_bench, run_bench
from harness.imported.load_tools import import_results
from harness.records.record import Engine
from harness.records.serving import ServingData
from harness.serving.prompts import random_prompts
from harness.serving.sweep import Plan, Runs

WARM_UP_NOTE = f"trtllm-bench warms up with {WARM_UP} requests of the run itself"
STATISTICS_NOTE = "trtllm-bench latency saves no single requests: what it printed is all there is"


@dataclasses.dataclass(frozen=True)
class Offline:
    """How trtllm-bench is run. python: of its environment. options: further arguments of its own command line."""

    python: Path
    mode: str = "throughput"
    max_model_len: int | None = None
    options: tuple[str, ...] = ()
    timeout_s: float = 3600.0


def measure_offline(
    arms: Mapping[str, tuple[Path, Path]],
    plan: Plan,
    offline: Offline,
    tokenizer: Any,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, tuple[ServingData, Engine]]:
    """Every arm's cells, and what computed them. arms: name -> its checkpoint, and the folder for its files.

    Raises UsageError for a plan or a folder that cannot be measured, EngineError where trtllm-bench fails, DataError where
    it leaves what cannot be imported or computes in another way than before.
    """
    runs = Runs(arms, plan, say)
    for folder, _ in arms.values():
        check_bench(folder, offline.mode, max(plan.concurrency))
    notes: dict[str, None] = {}
    for turn, arm in runs.order:
        for cell in range(len(plan.cells())):
            done = _run(arms[arm], plan, offline, tokenizer, turn, cell)
            runs.computed(arm, _engine(done, arms[arm][0]))
            data, _ = import_results(done.results, "trtllm")
            notes |= dict.fromkeys(data.notes)
            runs.add(arm, turn, cell, dataclasses.replace(data.cells[0].repeats[0], prompts_seen_before=WARM_UP))
    notes |= dict.fromkeys([WARM_UP_NOTE, *([STATISTICS_NOTE] if offline.mode == "latency" else [])])
    tools = {arm: f"trtllm-bench {offline.mode} {engine.version}" for arm, engine in runs.engines.items()}
    return {arm: (runs.data(arm, tools[arm], notes=list(notes)), runs.engines[arm]) for arm in arms}


def _run(place: tuple[Path, Path], plan: Plan, offline: Offline, tokenizer: Any, turn: int, cell: int) -> BenchRun:
    folder, out = place
    concurrency, input_tokens, output_tokens = plan.cells()[cell]
    texts = random_prompts(tokenizer, plan.count(concurrency), input_tokens, [plan.seed, turn, cell])
    lines = [{"task_id": number, "prompt": text, "output_tokens": output_tokens} for number, text in enumerate(texts)]
    out.mkdir(parents=True, exist_ok=True)
    dataset = out / f"{turn}-{cell}.jsonl"
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run_bench(
        offline.python,
        folder.absolute(),
        dataset.absolute(),
        dataset.with_suffix(".json").absolute(),
        mode=offline.mode,
        concurrency=concurrency,
        max_model_len=offline.max_model_len,
        options=offline.options,
        timeout_s=offline.timeout_s,
    )


def _engine(done: BenchRun, folder: Path) -> Engine:
    engine = trtllm.describe(done.log, str(done.report["engine"]["version"]), folder)
    dtype = str(done.report["engine"].get("dtype") or engine.dtype).removeprefix("torch.")
    return dataclasses.replace(engine, dtype=dtype)
