"""What lm-eval calls to read a shipped task: the JSONL file beside this module, held in memory, nothing cached."""

from __future__ import annotations

from pathlib import Path

import datasets

from qad.untrusted import json_lines


def load(*, file: str, **_metadata: object) -> dict[str, object]:
    """One split, `test`. lm-eval passes the task's metadata along with `dataset_kwargs`; it is not used here."""
    return {"test": datasets.Dataset.from_list([row for _, row in json_lines(Path(__file__).parent / file)])}
