"""What lm-eval calls to read a shipped task: the JSONL file beside this module, held in memory, nothing cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets


def load(*, file: str, **_metadata: object) -> dict[str, Any]:
    """One split, `test`. lm-eval passes the task's metadata along with `dataset_kwargs`; it is not used here."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
