"""The real load tools against the mock server: what they are told is what they do, at more than a hundred connections."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.records.serving import Cell
from harness.serving.drivers import GuideLLM, Load, VllmBench, choose_driver
from harness.serving.mock_server import MockServer, at_once, mock_server
from harness.serving.observe import observe, repeat
from harness.serving.statistics import summarize
from harness.serving.tap import tap
from qad.errors import LoadToolError, UsageError

PYTHONS = [sys.executable, os.environ.get("QAD_VLLM_PYTHON") or ".venv-vllm/bin/python"]
pytestmark = [pytest.mark.engine, pytest.mark.slow]


def tool(name: str) -> GuideLLM | VllmBench:
    try:
        driver = choose_driver(name, [str(Path(python).absolute()) for python in PYTHONS])
    except UsageError as error:
        pytest.skip(str(error))
    assert isinstance(driver, (GuideLLM, VllmBench))
    return driver


@pytest.mark.parametrize("name", ["guidellm", "vllm"])
@pytest.mark.parametrize("concurrency", [2, 256])
def test_a_load_tool_does_what_it_is_told(name: str, concurrency: int, tiny_llama_dir: Path) -> None:
    driver = tool(name)
    servers: list[MockServer] = []
    prompts = [f"the river runs past mill number {i}" for i in range(max(8, concurrency))]

    def script(body: dict[str, Any]) -> Any:
        for _ in range(1200):
            if servers[0].peak >= concurrency:
                break
            yield 0.05, {"choices": []}
        yield from at_once(body)

    with mock_server(script) as mock, tap(mock.base_url) as wire:
        servers.append(mock)
        driver.run(Load(wire.base_url, "mock", tiny_llama_dir, prompts, 4, concurrency))
        measured = repeat(observe(wire.take()), set())
    assert sorted(body["prompt"] for body in mock.bodies) == sorted(prompts), "every prompt once"
    assert {body["max_tokens"] for body in mock.bodies} == {4}
    assert measured.peak_active == mock.peak == concurrency
    summary = summarize(Cell(concurrency, None, 4, [measured]))
    assert (summary.invalid, summary.warnings, summary.failed) == ("", [], 0)


@pytest.mark.parametrize("name", ["guidellm", "vllm"])
def test_a_load_tool_that_fails_says_why(name: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    load = Load("http://127.0.0.1:9", "mock", tmp_path / "no tokenizer", ["a b c"], 4, 1)
    with pytest.raises(LoadToolError, match="ended with code"):
        tool(name).run(load)
