"""`qad measure throughput` against a server that is up, end to end with a load client of a few lines."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_client import TinyDriver

from harness.records.record import read
from harness.records.serving import ServingData
from harness.serving import drivers
from harness.serving.mock_server import Script, mock_server, tokens
from harness.serving.statistics import summarize
from qad.command.cli import main


def measure(folder: Path, out: Path, url: str, *more: str) -> int:
    return main(
        [
            "measure",
            "throughput",
            str(folder),
            "--server",
            url,
            "--arm",
            "bf16",
            "--concurrency",
            "2",
            "--isl",
            "40",
            "--osl",
            "4",
            "--repeats",
            "2",
            "--requests",
            "4",
            "--out",
            str(out),
            *more,
        ]
    )


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.measure.throughput.choose_driver", lambda name, pythons: TinyDriver())


def failing(body: dict[str, Any]) -> Any:
    yield from list(tokens(body, delay_s=0, first_s=0))[:2]
    yield 0.0, {"error": {"message": "out of memory"}}
    yield 0.0, "[DONE]"


def answering(body: dict[str, Any]) -> Any:
    """Slow enough that two requests are under way together on any machine."""
    yield from tokens(body, delay_s=0.05, first_s=0.2)


@pytest.mark.parametrize(("script", "code"), [(answering, 0), (failing, 1)])
def test_a_running_server(
    script: Script, code: int, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock_server(script) as mock:
        assert measure(tiny_llama_dir, tmp_path / "serving.json", mock.base_url) == code
    record = read(tmp_path / "serving.json")
    data = record.data
    assert isinstance(data, ServingData)
    summary = summarize(data.cells[0])
    assert record.engine.kernel_path.startswith("unknown"), "nothing is inferred from a server without its log"
    assert (summary.requests, summary.failed) == ((8, 0) if code == 0 else (8, 8))
    assert data.cells[0].repeats[0].prompts_seen_before == 0
    said = capsys.readouterr().out
    if code:
        assert summary.tokens_per_s == [None, None]
        assert "invalid: bf16, concurrency 2, 40 + 4 tokens: none of 8 requests succeeded" in said
        assert "out of memory" in said
    else:
        assert all(rate and rate > 0 for rate in summary.tokens_per_s)
        assert {r.input_tokens is not None for repeat in data.cells[0].repeats for r in repeat.requests} == {True}
    assert [cost.concurrency for cost in data.overhead] == [2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arm", "a,b"], "names 2 arms, 1 folders"),
        (["--concurrency", "8"], "never keep 8 under way"),
        (["--server", "https://127.0.0.1:1"], "does not answer"),
        (["--server-log", "absent.log"], "add --server URL and --engine"),
        (["--engine", "vllm", "--server-log", "absent.log"], "absent.log is no file"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], message: str, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock_server() as mock:
        assert measure(tiny_llama_dir, tmp_path / "serving.json", mock.base_url, *argv) == 2
        assert mock.bodies == []
    assert message in capsys.readouterr().err
    assert not (tmp_path / "serving.json").exists()


def test_an_environment_without_a_load_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from qad.errors import UsageError

    monkeypatch.undo()
    with pytest.raises(UsageError, match="--driver-python"):
        drivers.choose_driver("guidellm", ["/nowhere/python"])
    with pytest.raises(UsageError, match="unknown"):
        drivers.choose_driver("ab", [sys.executable])


def test_arms_are_served_by_an_engine_in_turn(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's adapter is replaced: what it is asked for, and that its kernels travel with the record."""
    from harness.records.record import Engine

    kernels = Engine("vllm", "0.32", "bfloat16", "cpu", "EmulationKernel (FP4 emulated)", True)
    asked: list[tuple[str, Path, Path, dict[str, Any]]] = []

    @contextlib.contextmanager
    def serve(name: str, folder: Path, *, log: Path, **settings: Any) -> Any:
        asked.append((name, folder, log, settings))
        with mock_server() as mock:
            yield SimpleNamespace(base_url=f"{mock.base_url}/v1", model=folder.name, engine=kernels)

    monkeypatch.setattr("harness.measure.throughput.serve", serve)
    argv = [
        "measure",
        "throughput",
        str(tiny_llama_dir),
        str(tiny_llama_dir),
        "--engine",
        "vllm",
        "--max-model-len",
        "64",
        "--engine-option=--enforce-eager",
        "--dtype",
        "float32",
        "--concurrency",
        "1",
        "--isl",
        "40",
        "--osl",
        "4",
        "--repeats",
        "2",
        "--requests",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert main(argv) == 0
    assert [log.parent.name for _, _, log, _ in asked] == ["bf16", "ptq", "bf16"]
    assert asked[0][3] == {
        "python": None,
        "dtype": "float32",
        "max_model_len": 64,
        "options": ("--enforce-eager",),
        "ready_s": 600.0,
    }
    records = [read(tmp_path / arm / "serving.json") for arm in ("bf16", "ptq")]
    assert [record.arm for record in records] == ["bf16", "ptq"]
    assert {record.engine for record in records} == {kernels}
    assert records[0].settings == records[1].settings
    assert "EmulationKernel (FP4 emulated)" in capsys.readouterr().out
