"""A user's own `export`, `harness` or `reports`, earlier on Python's path, would be imported in the place of this tool's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def exit_where_hidden() -> None:
    """Ends the process with one line and code 2 where one of this tool's packages is not the one that would be imported."""
    for name in ("export", "harness", "reports"):
        found = hides(name, _ROOT / name)
        if found is not None:
            print(
                f"qad: error: {found} hides the part of this tool that is called {name!r}: run it from another folder, take "
                f"{found.parent} off PYTHONPATH, or rename it",
                file=sys.stderr,
            )
            raise SystemExit(2)


def hides(name: str, ours: Path) -> Path | None:
    """What would be imported as `name` instead of the package `ours`; nothing of it is run.

    A folder without __init__.py hides the modules alone that both have: an editable installation goes on to look for the rest.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.origin is not None:
        found = Path(spec.origin)
        found = found.parent if found.name == "__init__.py" else found
        return None if found.resolve() == ours.resolve() else found
    own = {path.stem for path in ours.iterdir()} - {"__init__", "__pycache__"}
    for folder in map(Path, spec.submodule_search_locations or ()):
        if folder.resolve() != ours.resolve() and own & {path.stem for path in folder.iterdir()}:
            return folder
    return None
