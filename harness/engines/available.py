"""What this machine can run, engine by engine, and why not the rest."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util

from harness.engines.environment import engine_python, installed
from harness.engines.registered import ENGINES, HERE
from qad.errors import QadError


@dataclasses.dataclass(frozen=True)
class Availability:
    """here: whether it can be started. native: whether it computes on a GPU here, so that speed and memory are its own."""

    engine: str
    here: bool
    native: bool
    text: str


def availability(python: str | None = None) -> list[Availability]:
    """Every engine, and GuideLLM. python: of the first that is served, where it is not in its usual place."""
    pythons = [python, *[None] * len(ENGINES)]
    return [_transformers(), *map(served, ENGINES, pythons), _guidellm()]


def served(engine: str, python: str | None = None) -> Availability:
    """One engine that is started as a server."""
    try:
        interpreter = engine_python(engine, python)
        found = installed(engine, interpreter)
    except QadError as error:
        return Availability(engine, False, False, f"not here: {error}")
    where = f"{found.version} in {interpreter}"
    if found.gpus:
        text = f"{where}: serves on {', '.join(found.gpus)}; which NVFP4 kernel it takes is read from its log when it serves"
        return Availability(engine, True, True, text)
    if ENGINES[engine].plugin is None:
        return Availability(engine, False, False, f"not here: {where} sees no NVIDIA GPU, which it needs")
    nvfp4 = "NVFP4 emulated by our plugin" if found.cpu_plugin else "NVFP4 not: our plugin is missing, `make vllm-env` adds it"
    return Availability(engine, True, False, f"{where}: serves on the CPU; {nvfp4}")


def best_engine(choice: str) -> str:
    """The engine a run measures with: `choice`, or for auto the first that computes on a GPU, else this process."""
    if choice != "auto":
        return choice
    return next((row.name for row in ENGINES.values() if row.automatic and served(row.name).native), HERE)


def _transformers() -> Availability:
    import torch  # a preflight without this engine starts sooner

    count = torch.cuda.device_count()
    device = torch.cuda.get_device_name(0) if count else "the CPU"
    version = importlib.metadata.version("transformers")
    text = f"{version}: runs in this process on {device}; NVFP4 weights are decoded, activations quantized: emulated"
    return Availability(HERE, True, False, text)


def _guidellm() -> Availability:
    if importlib.util.find_spec("guidellm") is None:
        return Availability("guidellm", False, False, "not here: pip install guidellm, to measure the speed of a server")
    return Availability("guidellm", True, False, f"{importlib.metadata.version('guidellm')}: drives requests to a server")


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """An engine to start as a server, in the environment of `python` (default: its usual place)."""

    name: str
    python: str | None = None
    max_model_len: int | None = None
    options: tuple[str, ...] = ()


def run_engine(choice: str) -> EngineChoice | None:
    """The engine a run serves its arms with; None: this process."""
    name = best_engine(choice)
    return None if name == HERE else EngineChoice(name)
