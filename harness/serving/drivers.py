"""The tools that make load, each as a process of its own: GuideLLM and `vllm bench serve`.

Both send the prompts of a file once each, greedily and past any end token, over `concurrency` connections. What
they print is not used: the tap reads what happened. Prompts go into one file a run, so no run can share one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from harness.engines.process import options
from qad.errors import LoadToolError, UsageError

STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_LONGEST_S = 6 * 3600


@dataclasses.dataclass(frozen=True)
class Load:
    """One run. model: the served name. tokenizer: a folder. endpoint: a key of ENDPOINTS."""

    base_url: str
    model: str
    tokenizer: Path
    prompts: list[str]
    output_tokens: int
    concurrency: int
    endpoint: str = "completions"


class Driver(Protocol):
    """name: tool and version."""

    @property
    def name(self) -> str: ...

    def run(self, load: Load) -> None:
        """Raises LoadToolError with the end of the tool's output where it fails."""


@dataclasses.dataclass(frozen=True)
class VllmBench:
    """`vllm bench serve` of the environment of `python`. Started by its module: in CPU builds of vLLM the command asks
    for package metadata that are not there. It reads prompt files with pandas, which vLLM does not bring."""

    python: str

    @property
    def name(self) -> str:
        return f"vllm bench serve {_ask(self.python, 'import vllm; print(vllm.__version__)', 'vllm')}"

    def run(self, load: Load) -> None:
        start = (
            "from vllm.benchmarks.serve import add_cli_args, main\n"
            "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
            "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())"
        )
        with tempfile.TemporaryDirectory(prefix="qad-load-") as folder:
            given = {
                "--backend": "openai-chat" if load.endpoint == "chat" else "openai",
                "--base-url": load.base_url,
                "--endpoint": ENDPOINTS[load.endpoint],
                "--model": load.model,
                "--tokenizer": load.tokenizer,
                "--dataset-name": "custom",
                "--dataset-path": _prompt_file(Path(folder), load),
                "--custom-output-len": load.output_tokens,
                "--num-warmups": 0,
                "--num-prompts": len(load.prompts),
                "--max-concurrency": load.concurrency,
                "--request-rate": "inf",
                "--temperature": 0,
                "--extra-body": json.dumps({"stream_options": STREAM_OPTIONS}),
            }
            flags = ["--skip-chat-template", "--disable-shuffle", "--no-oversample", "--ignore-eos", "--disable-tqdm"]
            _process([self.python, "-c", start, *options(given), *flags])


@dataclasses.dataclass(frozen=True)
class GuideLLM:
    """GuideLLM of the environment of `python`, by a scenario file. Its results are written to the run's folder only."""

    python: str

    @property
    def name(self) -> str:
        code = "import importlib.metadata; print(importlib.metadata.version('guidellm'))"
        return f"GuideLLM {_ask(self.python, code, 'guidellm')}"

    def run(self, load: Load) -> None:
        with tempfile.TemporaryDirectory(prefix="qad-load-") as folder:
            scenario = Path(folder) / "scenario.json"
            scenario.write_text(json.dumps(self._scenario(load, Path(folder))), encoding="utf-8")
            environment = {
                **os.environ,
                "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING",
                "GUIDELLM__LOGGING__LOG_FILE": str(Path(folder) / "log"),
                "GUIDELLM__MAX_WORKER_PROCESSES": str(min(10, os.cpu_count() or 1)),
                "HF_DATASETS_CACHE": str(Path(folder) / "cache"),
                "HF_HUB_OFFLINE": "1",
            }
            command = [self.python, "-m", "guidellm", "run", "--disable-console", "-c", str(scenario)]
            _process(command, environment, Path(folder))

    def _scenario(self, load: Load, folder: Path) -> dict[str, object]:
        asked = {"temperature": 0, "ignore_eos": True, "stream_options": STREAM_OPTIONS}
        spec = {
            "backend": {
                "kind": "openai_http",
                "target": load.base_url,
                "model": load.model,
                "http2": False,
                "request_format": ENDPOINTS[load.endpoint],
                "extras": {"body": asked},
            },
            "profile": {"kind": "concurrent"},
            "constraints": [{"kind": "max_requests", "count": len(load.prompts)}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(load.tokenizer)},
            "data": [{"kind": "json_file", "path": str(_prompt_file(folder, load))}],
            "outputs": [{"kind": "json", "path": str(folder / "result.json")}],
        }
        return {"spec": spec, "benchmarks": [{"profile.streams": load.concurrency}]}


def choose_driver(name: str | None, pythons: Sequence[str]) -> Driver:
    """The first of `pythons` that has the tool. name: guidellm, vllm, or None for the first of them that any has.

    Raises UsageError for an unknown name, and where none has it.
    """
    known: dict[str, type[GuideLLM] | type[VllmBench]] = {"guidellm": GuideLLM, "vllm": VllmBench}
    if name is not None and name not in known:
        raise UsageError(f"load tool {name!r} is unknown: use one of {', '.join(known)}")
    for package in [name] if name else known:
        for python in pythons:
            if _has(python, package):
                return known[package](python)
    raise UsageError(
        f"no {name or 'guidellm or vllm'} in {', '.join(pythons)}: install guidellm (the extra `serving`), or name an "
        "environment that has a load tool with --driver-python"
    )


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _prompt_file(folder: Path, load: Load) -> Path:
    path = folder / "prompts.jsonl"
    lines = (json.dumps({"prompt": text, "output_tokens_count": load.output_tokens}) for text in load.prompts)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _process(command: Sequence[str], environment: dict[str, str] | None = None, folder: Path | None = None) -> None:
    """Run to the end; the tool dies with us where we are interrupted."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_LONGEST_S,
            env=environment,
            cwd=folder,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadToolError(f"the load tool cannot be run ({error}): check --driver and --driver-python") from error
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        tail = " | ".join(lines[-3:])[-600:]
        raise LoadToolError(f"the load tool ended with code {done.returncode}: {tail}")


def _ask(python: str, code: str, package: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LoadToolError(f"{package} of {python} cannot be imported: {done.stderr.strip()[-300:]}")
    return done.stdout.split()[-1]
