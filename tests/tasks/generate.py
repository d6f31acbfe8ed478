"""Write the JSONL files of the tasks in harness/tasks: `python tests/tasks/generate.py`. The same bytes every time.

The files are package data, so that a task's items are fixed by the release, not by the machine that runs it. A
change of any item is a new version in the task's YAML file: scores of two versions do not compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import agreement
import facts
import phrases
from item import Question, records

TASKS: dict[str, Callable[[], list[Question]]] = {
    "qad_agreement": agreement.questions,
    "qad_facts": facts.questions,
    "qad_phrases": phrases.questions,
}


def render(task: str) -> str:
    """The content of TASK.jsonl: one row {query, choices, gold, cluster} a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records(TASKS[task]()))


def main(folder: Path) -> None:
    for task in TASKS:
        (folder / f"{task}.jsonl").write_bytes(render(task).encode())


if __name__ == "__main__":
    main(Path(__file__).parents[2] / "harness" / "tasks")
