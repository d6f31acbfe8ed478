"""Executables that look like an engine's, and what tells one test's processes from all others."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
LOGS = HERE / "logs"


@pytest.fixture
def read_log() -> Callable[[str], str]:
    return lambda name: (LOGS / name).read_text()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A folder that declares NVFP4; no weights."""
    folder = tmp_path / "m"
    folder.mkdir()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def executable(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes an executable that runs the fake server with a log: executable("trtllm-serve", "trtllm-1.2.log"). Asked for
    its packages (-c), it answers `FAKE_INSTALLED`."""

    def write(name: str, log: str) -> Path:
        path = tmp_path / name
        path.write_text(
            f'#!/bin/sh\nif [ "$1" = -c ]; then echo "$FAKE_INSTALLED"; exit; fi\n'
            f'exec "{sys.executable}" "{HERE / "fake_server.py"}" "{LOGS / log}" "$@"\n'
        )
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """The processes that inherited this test's mark, as a function; whatever is left at the end is killed."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("QAD_TEST_MARK", mark)

    def find() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                inherited = process.pid != psutil.Process().pid and process.environ().get("QAD_TEST_MARK") == mark
                if inherited and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    yield lambda: [process.pid for process in find()]
    for process in find():
        process.kill()


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object]], None]:
    """Waits until a condition holds, a minute at most: the machine may be busy."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.05)

    return wait
