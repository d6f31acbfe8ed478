"""Shared by tests that go from a recipe to an arm on tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def one_eager_thread() -> Iterator[None]:
    """Many calls on tiny tensors: neither a compiler nor a second thread pays."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QAD_COMPILE", "0")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [{"text": f"The heron {i} waits for fish {7 * i}. He counts {i * i} sacks of flour." * 3} for i in range(200)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
