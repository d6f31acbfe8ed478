"""Where a command writes and what it only reads, held apart before it works: one rule for all of them.

Imported by the command line at its start: what is heavy is imported where it is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from qad.place import place_of, require_apart

if TYPE_CHECKING:
    from qad.recipes.recipe import Recipe

_WRITTEN = ("out", "fix")
# Arguments that are read -> what a message calls them.
_READ = {
    "folder": "checkpoint",
    "arm": "arm",
    "source": "arm",
    "teacher": "teacher",
    "ptq": "PTQ arm",
    "arms": "measurement",
    "folders": "folder",
    "noise_floor": "measurement",
    "suite_data": "suite's data",
    "file": "result file",
    "server_log": "log",
}
_NAMED = ("arms", "folders")  # [NAME=]PATH


def decide(args: argparse.Namespace) -> None:
    """Follow a symbolic link that is to be written to, once and for all, and refuse one that leads nowhere and a place that is,
    holds or lies inside what the command only reads. Raises UsageError."""
    for name in _WRITTEN:
        if isinstance(given := getattr(args, name, None), Path):
            out = place_of(given)
            for what, path in _read(args):
                require_apart(out, {what: path})
            setattr(args, name, out)


def _read(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for name, what in _READ.items():
        value = getattr(args, name, None)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Path) or (isinstance(one, str) and name in (*_NAMED, "suite_data")):
                yield what, Path(str(one).partition("=")[2] or one) if name in _NAMED else Path(one)


def require_place(out: Path, kind: str, apart: Mapping[str, Path], known: Mapping[str, object]) -> None:
    """Refuse a place that cannot become what is asked, before anything is computed. apart: what it is -> folder that is only
    read. known: of the stage's config. Raises QadError."""
    from qad import artifact

    require_apart(out, apart)
    artifact.require_place(out, kind, known)


def require_arm_place(recipe: Recipe, arm: str, out: Path, apart: Mapping[str, Path] = MappingProxyType({})) -> None:
    """The same for an arm that a recipe makes."""
    from qad.arms.arm import KIND
    from qad.training.stages import arm_settings

    settings = arm_settings(recipe, arm)
    if recipe.quantize.search or recipe.quantize.recipe or recipe.quantize.by != "qad":
        settings = {"arm": arm}  # the rest is decided later
    require_place(out, KIND, {**models(recipe), **apart}, settings)


def models(recipe: Recipe) -> dict[str, Path]:
    """The folders of models that a recipe names."""
    named = {"source model": recipe.model, "teacher": recipe.train and recipe.train.teacher}
    folders = {what: Path(name).expanduser() for what, name in named.items() if name}
    return {what: folder for what, folder in folders.items() if folder.is_dir()}
