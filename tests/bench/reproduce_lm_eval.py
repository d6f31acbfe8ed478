"""ARC-Easy, PIQA and LAMBADA of BF16, PTQ and QAD in one report, and every score again by plain lm-eval.

Plain: `lm_eval.simple_evaluate` on the same folder after `import qad.hf`, in a process of its own. Items have to agree
one by one: document, target, score. Exit code 1 names the first that does not.

    python tests/bench/reproduce_lm_eval.py DATA --out RUN --limit 100 bf16=DIR ptq=DIR qad=DIR

DATA holds arc_easy.jsonl, piqa.jsonl (query, choices, gold) and lambada_openai.jsonl (context, continuation); without
it nothing is done. A part whose result is in RUN already is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))  # what tests share
TASKS = {"qad_arc_easy": "arc_easy.jsonl", "qad_piqa": "piqa.jsonl", "qad_lambada": "lambada_openai.jsonl"}
SHIPPED = Path(harness.__file__).parent / "suites" / "tasks"


def main() -> int:
    args = _arguments()
    files = [args.data / name for name in TASKS.values()]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        print(f"skipped: {', '.join(missing)} are not there")
        return 0
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    folder = _task_folder(args.out / "tasks", files)
    differing = 0
    for arm, _, path in (entry.partition("=") for entry in args.arms):
        path = str(Path(path).resolve())  # the other process starts in the tasks' folder
        ours, plain = args.out / "measure" / arm / "accuracy.json", args.out / "plain" / f"{arm}.json"
        if not ours.is_file():
            measure(Path(path), arm, folder, args.limit, ours)
        if not plain.is_file():
            command = [
                sys.executable,
                str(Path(__file__).resolve()),
                "--plain",
                str(plain),
                "--limit",
                str(args.limit),
                str(folder),
                path,
            ]
            subprocess.run(command, check=True, cwd=folder)
        differing += compare(arm, ours, plain)
    if not differing:
        from qad.command.run import report_run

        print(f"report: {report_run(args.out, print)}")
    return 1 if differing else 0


def measure(model: Path, arm: str, tasks: Path, limit: int, out: Path) -> None:
    """The record that `qad measure accuracy` would write."""
    from scored import score_tasks

    from harness.measure.subject import Found, Subject

    started, subject = time.monotonic(), Subject.open(arm, model, "float32", 0)
    loaded = subject.loaded
    data = score_tasks(loaded.model, loaded.tokenizer, list(TASKS), limit=limit, batch_size=1, seed=0, task_path=tasks)
    settings = {"tasks": list(TASKS), "limit": limit, "batch_size": 1, "seed": 0, "dtype": "float32"}
    named = dataclasses.replace(subject, model=subject.model.partition(", NVFP4 (")[0])
    named.write(out, Found(data, loaded.engine, settings), started)


def plain_lm_eval(model: str, tasks: Path, limit: int, out: Path) -> None:
    """What a user of lm-eval gets who knows nothing of this tool but `import qad.hf`."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    import qad.hf  # noqa: F401  (opens NVFP4 folders)

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": model, "dtype": "float32", "device": "cpu"},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=[str(tasks)], include_defaults=False),
        limit=limit,
        batch_size=1,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert results is not None
    metrics = {task: [m for m in ("acc", "acc_norm") if m in found[0]] for task, found in results["samples"].items()}
    items = {
        f"{task} {metric}": [[s["doc_hash"], s["target_hash"], float(s[metric])] for s in results["samples"][task]]
        for task, names in metrics.items()
        for metric in names
    }
    means = {f"{task} {m}": results["results"][task][f"{m},none"] for task, names in metrics.items() for m in names}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"means": means, "items": items}))


def compare(arm: str, ours: Path, plain: Path) -> int:
    """Number of scores that are not exactly the same; prints one line a task."""
    from harness.records import record as records

    data: Any = records.read(ours).data
    other = json.loads(plain.read_text())
    differing = 0
    for task in data.tasks:
        mine = [[item.doc_hash, item.target_hash, item.score] for item in task.items]
        name = f"{task.task} {task.metric}"
        unlike = sum(a != b for a, b in zip(mine, other["items"][name], strict=True))
        mean = sum(item.score for item in task.items) / len(task.items)
        differing += unlike + (mean != other["means"][name])
        verdict = f"{unlike} items differ" if unlike else "every item equal"
        print(f"{arm:5} {name:22} n={len(mine):4}  {mean!r} here, {other['means'][name]!r} plain: {verdict}")
    return differing


def _task_folder(folder: Path, files: list[Path]) -> Path:
    """The task files with their data beside them, where both sides find it by its relative name."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*(SHIPPED / f"{task}.yaml" for task in TASKS), *files]:
        link = folder / path.name
        if not link.exists():
            link.symlink_to(path.resolve())
    return folder.resolve()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("arms", nargs="+", metavar="ARM=DIR")
    parser.add_argument("--out", type=Path, default=Path("runs/lm-eval"))
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.resolve()
    return args


if __name__ == "__main__":
    arguments = _arguments()
    if arguments.plain:
        plain_lm_eval(arguments.arms[0], arguments.data, arguments.limit, arguments.plain)
    else:
        sys.exit(main())
