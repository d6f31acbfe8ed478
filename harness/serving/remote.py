"""A server that somebody else started: found by its address. What computes its numbers is read from its log, if given."""

from __future__ import annotations

from pathlib import Path

from harness.engines.answers import served_models, version_told
from harness.engines.registered import engine_named
from harness.engines.server import Server
from harness.records.record import Engine
from qad.errors import UsageError

UNKNOWN_KERNELS = "unknown: the server was started elsewhere and no log was given"


def running_server(url: str, folder: Path, engine: str | None = None, log: Path | None = None) -> Server:
    """Ask what it serves. engine, log: the engine's name and what it printed, for its kernels.

    Raises UsageError where nothing answers, or the server offers no or several models and none is named like `folder`.
    """
    root = url.rstrip("/").removesuffix("/v1")
    try:
        models = [str(model["id"]) for model in served_models(root)]
    except (OSError, ValueError) as error:
        raise UsageError(f"{url} does not answer as an OpenAI server ({error}): check --server") from error
    named = [name for name in models if Path(name).name == folder.name]
    chosen = named[:1] or models
    if len(chosen) != 1:
        raise UsageError(f"{url} serves {', '.join(models) or 'no model'}: serve {folder.name} alone, or under that name")
    version = version_told(root)
    if log is None or engine is None:
        return Server(root, chosen[0], Engine(engine or "server", version or "", "", "", UNKNOWN_KERNELS, emulated=False))
    printed = log.read_text(encoding="utf-8", errors="replace")
    return Server(root, chosen[0], engine_named(engine).adapter.describe(printed, version, folder))
