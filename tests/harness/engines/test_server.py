"""Servers start, say what they are, and are gone afterwards, however the harness ends. The engines are fake executables."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import urllib.error
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.engines.process import ServerProcess
from harness.engines.server import get, serve
from qad.errors import EngineError, LoadToolError, UsageError

Executable = Callable[[str, str], Path]
Marked = Callable[[], list[int]]
WaitFor = Callable[[Callable[[], object]], None]

METRICS = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    'vllm:cache_config_info{block_size="16",cache_dtype="fp8",kv_cache_size_tokens="1642240",'
    'kv_cache_max_concurrency="50.1171875",num_gpu_blocks="102640"} 1.0\n'
)


def test_a_server_answers_and_is_gone(
    executable: Executable, model_dir: Path, tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_METRICS", METRICS)
    python, log = executable("python", "vllm-0.32-blackwell.log"), tmp_path / "serve.log"
    with serve(
        "vllm", model_dir, log=log, python=str(python), dtype="bfloat16", max_model_len=32768, options=["--enforce-eager"]
    ) as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        assert server.model == "m"
        assert get(server.base_url.removesuffix("/v1") + "/health") == ""
        assert (server.engine.name, server.engine.version, server.engine.dtype) == ("vllm", "0.32.0", "bfloat16")
        assert server.engine.native_fp4 is True
        assert server.facts.kv_cache_tokens == 1_642_240, "exact from /metrics, not the log's"
        assert len(marked()) >= 3, "supervisor, server and its worker"
        printed = log.read_text()
    for argument in ('"--dtype", "bfloat16"', '"--max-model-len", "32768"', '"--enforce-eager"', '"--host", "127.0.0.1"'):
        assert argument in printed
    assert "trust" not in printed.split("arguments:")[1], "no remote code unless it is asked for"
    assert marked() == []
    with pytest.raises(OSError):
        get(server.base_url.removesuffix("/v1") + "/health")


def test_an_exception_ends_the_server(executable: Executable, model_dir: Path, tmp_path: Path, marked: Marked) -> None:
    python = executable("python", "vllm-0.32-blackwell.log")
    with pytest.raises(KeyboardInterrupt), serve("vllm", model_dir, log=tmp_path / "log", python=str(python)):
        raise KeyboardInterrupt
    assert marked() == []


@pytest.mark.parametrize("raised", [LoadToolError("the load tool ended with code 1"), None])
def test_a_server_that_dies_while_it_is_asked_is_no_fault_of_the_load_tool(
    raised: LoadToolError | None, executable: Executable, model_dir: Path, tmp_path: Path, marked: Marked, wait_for: WaitFor
) -> None:
    def ask() -> None:
        with serve("vllm", model_dir, log=tmp_path / "log", python=str(python)) as server:
            port = server.base_url.rpartition(":")[2].removesuffix("/v1")
            for process in map(psutil.Process, marked()):
                with contextlib.suppress(psutil.Error):
                    if port in process.cmdline() and "supervisor" not in str(process.cmdline()):
                        process.kill()
            wait_for(lambda: not any(c.laddr.port == int(port) and c.status == "LISTEN" for c in psutil.net_connections("tcp")))
            if raised:
                raise raised

    python = executable("python", "vllm-0.32-blackwell.log")
    with pytest.raises(EngineError, match=r"the server ended while it was asked, see .*log; its last lines:\n(.|\n)*arguments"):
        ask()
    assert marked() == []


def test_an_early_end_shows_the_log(
    executable: Executable, model_dir: Path, tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "ValueError: no kernel for this")
    python = executable("python", "vllm-0.32-fallback.log")
    with (
        pytest.raises(EngineError, match=r"ended with code 1 before it was ready(.|\n)*no kernel for this"),
        serve("vllm", model_dir, log=tmp_path / "log", python=str(python)),
    ):
        pass
    assert marked() == [], "its worker had left the session and is found all the same"


def test_a_server_that_does_not_get_ready_is_ended(
    executable: Executable, model_dir: Path, tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DELAY_S", "600")
    python = executable("python", "vllm-0.32-blackwell.log")
    with (
        pytest.raises(EngineError, match=r"not ready after 1 s; its last lines:\n"),
        serve("vllm", model_dir, log=tmp_path / "log", python=str(python), ready_s=1),
    ):
        pass
    assert marked() == []


def test_a_taken_port_is_tried_again(
    executable: Executable, model_dir: Path, tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "OSError: [Errno 98] Address already in use")
    starts: list[list[str]] = []
    start = ServerProcess.__init__

    def counted(self: ServerProcess, command: list[str], **others: object) -> None:
        starts.append(command)
        if len(starts) == 2:
            monkeypatch.delenv("FAKE_FAIL")
            others["environment"] = dict(os.environ)
        start(self, command, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerProcess, "__init__", counted)
    python = executable("python", "vllm-0.32-blackwell.log")
    with serve("vllm", model_dir, log=tmp_path / "log", python=str(python)) as server:
        assert len(starts) == 2
        assert f":{starts[1][starts[1].index('--port') + 1]}/" in server.base_url
    assert marked() == []


@pytest.mark.parametrize(
    ("engine", "python", "message"),
    [
        ("sglang", None, "is not started as a server"),
        ("vllm", "/no/such/python", "no executable file"),
        ("trtllm", sys.executable, "trtllm-serve beside it"),
    ],
)
def test_what_cannot_be_started_is_said(engine: str, python: str | None, message: str, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message), serve(engine, model_dir, log=tmp_path / "log", python=python):
        pass
    with pytest.raises(UsageError, match=r"no config\.json"), serve("vllm", tmp_path / "x", log=tmp_path / "log"):
        pass


HARNESS = """
    import sys, time
    from pathlib import Path
    from harness.engines.server import serve
    with serve("vllm", Path(sys.argv[1]), log=Path(sys.argv[2]), python=sys.argv[3]) as server:
        print("ready", flush=True)
        sys.stdin.read(1)
    print("stopped", flush=True)
"""


@pytest.mark.parametrize("moment", ["starting", "loading", "ready", "stopping"])
def test_killing_the_harness_leaves_nothing(
    moment: str,
    executable: Executable,
    model_dir: Path,
    tmp_path: Path,
    marked: Marked,
    wait_for: WaitFor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kill -9: no handler runs, so what ends the tree cannot be the harness."""
    if moment == "loading":
        monkeypatch.setenv("FAKE_DELAY_S", "600")
    python, log = executable("python", "vllm-0.32-blackwell.log"), tmp_path / "log"
    harness = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HARNESS), str(model_dir), str(log), str(python)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        text=True,
    )
    assert harness.stdin
    assert harness.stdout
    with harness.stdin, harness.stdout:
        if moment == "starting":
            wait_for(lambda: len(marked()) >= 2)  # the supervisor, perhaps not yet the server
        elif moment == "loading":
            wait_for(lambda: len(marked()) >= 4)
        else:
            assert harness.stdout.readline() == "ready\n"
            assert len(marked()) >= 4
        if moment == "stopping":
            harness.stdin.write("x")
            harness.stdin.flush()
        harness.send_signal(signal.SIGKILL)
        harness.wait()
    wait_for(lambda: marked() == [])


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
# The parent ends at once: its child has no parent in the tree any more.
ORPHAN = (
    "import subprocess, sys; "
    f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True); import time; time.sleep(1)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans come back to the supervisor on Linux")
@pytest.mark.parametrize("stop", ["asked", "by its own end"])
def test_a_stubborn_orphan_is_killed(stop: str, tmp_path: Path, marked: Marked, wait_for: WaitFor) -> None:
    code = ORPHAN if stop == "by its own end" else ORPHAN.replace("time.sleep(1)", "time.sleep(600)")
    log = tmp_path / "log"
    process = ServerProcess([sys.executable, "-c", code], log=log, environment=dict(os.environ), grace_s=0.5)
    wait_for(lambda: "up" in log.read_text())
    if stop == "by its own end":
        wait_for(lambda: process.exit_code is not None)
        assert process.exit_code == 0
    process.stop()
    process.stop()
    assert marked() == []


def test_a_killed_supervisor_takes_the_server_with_it(tmp_path: Path, marked: Marked, wait_for: WaitFor) -> None:
    code = "print('up', flush=True); import time; time.sleep(600)"
    log = tmp_path / "log"
    process = ServerProcess([sys.executable, "-c", code], log=log, environment=dict(os.environ))
    wait_for(lambda: "up" in log.read_text())
    psutil.Process(process.pid).kill()
    wait_for(lambda: marked() == [])
    process.stop()
    assert process.exit_code == -signal.SIGKILL


def test_get_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")
    with pytest.raises(urllib.error.URLError, match="refused"):
        get("http://127.0.0.1:9/health", timeout_s=1)
