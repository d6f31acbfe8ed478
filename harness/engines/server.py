"""Serve a checkpoint folder with an engine: `with serve("vllm", folder, log=...) as server`.

The server is a child process in the engine's own environment, on 127.0.0.1 and a free port, and is gone when the block is
left, however that happens. What computes the numbers is read from what the engine says, never inferred from the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.engines.answers import ask, served_models, version_told
from harness.engines.environment import engine_python
from harness.engines.process import ServerProcess
from harness.engines.registered import Adapter, engine_named
from harness.engines.tree_memory import tree_memory
from harness.records.record import Engine, EngineMemory
from qad.errors import EngineError, QadError, UsageError

HOST = "127.0.0.1"
PORT_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that answers. base_url: of the OpenAI API. model: the name requests give. facts: of one that was started here."""

    base_url: str
    model: str
    engine: Engine
    facts: EngineMemory | None = None


@contextlib.contextmanager
def serve(
    engine_name: str,
    folder: Path,
    *,
    log: Path,
    python: str | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    options: Sequence[str] = (),
    ready_s: float = 600,
) -> Iterator[Server]:
    """Start a server for `folder`, wait until it is ready, and end its process tree when the block is left.

    log: file for what the server prints. python: interpreter of the engine's environment (default: see `engine_python`).
    dtype: auto, bfloat16 or float32. options: further arguments of the engine's own command line. No remote code is run
    unless an option says so. ready_s: seconds until it must answer.

    Raises UsageError where the engine or the folder is not there, EngineError with the log's last lines where the server
    ends early, is not ready in time or ends within the block.
    """
    adapter = engine_named(engine_name).adapter
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: give a Hugging Face model folder")
    interpreter = engine_python(engine_name, python)
    for attempt in range(PORT_TRIES):
        port = _free_port()
        command = adapter.command(interpreter, folder.absolute(), port, dtype, max_model_len, options)
        process = ServerProcess(command, log=log, environment={**os.environ, **adapter.environment(interpreter)})
        try:
            if not _ready(process, port, ready_s, retry=attempt + 1 < PORT_TRIES):
                continue
            server = _server(adapter, process, port, folder)
            try:
                yield server
            except QadError as error:  # what asked it failed: it may have ended
                _require_alive(process, port, error)
                raise
            _require_alive(process, port)
            return
        finally:
            process.stop()


def get(url: str, timeout_s: float = 10.0) -> str:
    """The body of an HTTP GET on this machine, without any proxy. Raises OSError, or ValueError where it has no end."""
    return ask(url, timeout_s=timeout_s).decode("utf-8", errors="replace")


def _server(adapter: Adapter, process: ServerProcess, port: int, folder: Path) -> Server:
    root = f"http://{HOST}:{port}"
    try:
        model = served_models(root)[0]["id"]
    except (OSError, ValueError, IndexError) as error:
        raise EngineError(f"the server does not say which model it serves ({error}): see {process.log}") from error
    log = process.text()
    facts = adapter.memory(log, _said(f"{root}/metrics") or "")
    engine = adapter.describe(log, version_told(root), folder)
    measured = tree_memory(process.tree(), gpu=engine.device.startswith("cuda"))
    facts = dataclasses.replace(facts, process_bytes=measured.bytes, process_method=measured.method)
    return Server(f"{root}/v1", model, engine, facts)


def _ready(process: ServerProcess, port: int, ready_s: float, retry: bool) -> bool:
    """Wait until the server answers. False: another program took the port meanwhile, and `retry` allows another one."""
    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        code = process.exit_code
        if code is not None:
            if retry and re.search("address already in use", process.tail(), re.IGNORECASE):
                return False
            raise EngineError(f"the server ended with code {code} before it was ready; its last lines:\n{process.tail()}")
        if _said(f"http://{HOST}:{port}/health") is not None and process.exit_code is None:
            return True
        time.sleep(0.2)
    raise EngineError(f"the server was not ready after {ready_s:g} s; its last lines:\n{process.tail()}")


def _require_alive(process: ServerProcess, port: int, cause: QadError | None = None) -> None:
    """Raises EngineError where the server died while it was asked: what its clients then said is no measurement."""
    if process.exit_code is None and _said(f"http://{HOST}:{port}/health") is not None:
        return
    raise EngineError(f"the server ended while it was asked, see {process.log}; its last lines:\n{process.tail()}") from cause


def _said(url: str) -> str | None:
    """None where nothing answers."""
    try:
        return get(url)
    except (OSError, ValueError):
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
