"""Which Python runs an engine. Engines pin their own torch, so each may live in an environment of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from harness.engines.registered import engine_named
from qad.errors import EngineError, UsageError


def engine_python(engine: str, given: str | None = None) -> Path:
    """The interpreter that `engine` runs in.

    In this order: `given`; the environment variable; its place in the current folder; this interpreter, where it has the
    package. Links are kept: a virtual environment's python is a link, and means nothing without its place.

    Raises UsageError for an unknown engine, a path that is no executable file, and where there is none.
    """
    row = engine_named(engine)
    named = given or os.environ.get(row.variable)
    if named:
        return _executable(Path(named).expanduser(), "--python" if given else row.variable)
    if row.place is not None and row.place.is_file():
        return row.place.absolute()
    if importlib.util.find_spec(row.package) is not None:
        return Path(sys.executable)
    raise UsageError(f"no Python with {row.package} was found: {row.remedy}")


def _executable(path: Path, where: str) -> Path:
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UsageError(f"{where} names {path}, which is no executable file: give the python of the engine's environment")
    return path.absolute()


@dataclasses.dataclass(frozen=True)
class Installed:
    """What an interpreter has.

    gpus: names of the CUDA devices its torch sees.
    cpu_plugin: whether the plugin that serves NVFP4 on a CPU is installed.
    """

    version: str
    gpus: list[str]
    cpu_plugin: bool


# Run in the engine's own interpreter, so nothing of this package is there. torch is imported only where it may see a GPU.
_ASK = """
import importlib.metadata as m, json, sys
def version(*names):
    for name in names:
        try:
            return m.version(name)
        except m.PackageNotFoundError:
            pass
gpus = []
if not (version("torch") or "+cpu").endswith("+cpu"):
    import torch
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
plugins = [e.value for e in m.entry_points(group="vllm.general_plugins")]
print(json.dumps({"version": version(*sys.argv[1:]), "gpus": gpus,
                  "cpu_plugin": any(p.startswith("harness.engines.") for p in plugins)}))
"""


def installed(engine: str, python: Path, timeout_s: float = 300) -> Installed:
    """Ask `python` what it has. Raises EngineError where it cannot say or lacks the engine."""
    row = engine_named(engine)
    question = [str(python), "-c", _ASK, *row.distributions]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=timeout_s, check=True)
        facts = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise EngineError(f"{python} does not say whether it has {row.package} ({error}): run it by hand") from error
    if not facts["version"]:
        raise EngineError(f"{python} has no {row.package}: {row.remedy}")
    return Installed(facts["version"], list(facts["gpus"]), bool(facts["cpu_plugin"]))
