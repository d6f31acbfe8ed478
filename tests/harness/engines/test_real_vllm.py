"""Real vLLM: served, asked, gone; and gone when the harness is killed while it loads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines.environment import engine_python, installed
from harness.engines.server import serve
from qad.errors import QadError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

READY_S = 1500


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        found = engine_python("vllm")
        installed("vllm", found)
    except QadError as error:
        pytest.skip(str(error))
    return found


def test_vllm_serves_and_says_what_it_is(
    python: Path, make_llama: Callable[..., Path], tmp_path: Path, marked: Callable[[], list[int]]
) -> None:
    model = make_llama(tmp_path / "llama", head_dim=32)  # vLLM's attention on CPUs knows no heads of 16
    with serve(
        "vllm", model, log=tmp_path / "log", python=str(python), max_model_len=256, options=["--enforce-eager"], ready_s=READY_S
    ) as server:
        body = {"model": server.model, "prompt": "The river", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.base_url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 4
        assert server.engine.version != "unknown"
        assert server.engine.native_fp4 is None
        assert server.engine.device.startswith(("cpu", "cuda"))
        facts = server.facts
        assert facts.max_model_len == 256
        assert facts.kv_cache_bytes
        assert facts.kv_cache_tokens
        assert facts.max_concurrency == pytest.approx(facts.kv_cache_tokens / 256, rel=0.02)
        per_token = 2 * 2 * 2 * 32 * 2  # layers, K and V, heads, width, BF16
        assert facts.kv_cache_tokens * per_token == pytest.approx(facts.kv_cache_bytes, rel=0.05)
        assert facts.process_bytes is None or facts.process_bytes > facts.kv_cache_tokens
    assert marked() == []


HARNESS = """
    import sys
    from pathlib import Path
    from harness.engines.server import serve
    with serve("vllm", Path(sys.argv[1]), log=Path(sys.argv[2]), python=sys.argv[3], ready_s=1500):
        pass
"""


def test_killing_the_harness_while_vllm_loads_leaves_nothing(
    python: Path, tiny_llama_dir: Path, tmp_path: Path, marked: Callable[[], list[int]]
) -> None:
    """At the moment where the engine's own processes have just been made."""
    log = tmp_path / "log"
    harness = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HARNESS), str(tiny_llama_dir), str(log), str(python)],
        cwd=Path(__file__).parents[3],
    )
    deadline = time.monotonic() + READY_S
    while len(marked()) < 4 and harness.poll() is None:  # harness, supervisor, API server, and its engine
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert harness.poll() is None, log.read_text()
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    while marked():
        assert time.monotonic() < deadline + 120
        time.sleep(0.2)
