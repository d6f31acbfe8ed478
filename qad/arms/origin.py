"""Where a checkpoint comes from: its BF16 original, and what its arm was trained with. Kept in manifests under "origin", which is
no part of a stage's key and goes along from an arm to its exports and their conversions:

    source     digest of the BF16 original
    training   of a trained arm: `seed`, and `recipe`, everything else that decided its weights
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qad.artifact import MANIFEST, Artifact
from qad.errors import UsageError
from qad.model.source import Checkpoint
from qad.untrusted import mapping

_ALIKE = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size")  # of a model and what was made from it


def origin_of(folder: Path) -> dict[str, Any]:
    """What the manifest of a folder says of its origin; {} where it has none, or none that can be read."""
    try:
        return mapping(mapping(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))).get("origin"))
    except (OSError, ValueError):
        return {}


def origin_of_arm(arm: Artifact) -> dict[str, Any]:
    """For what is exported from an arm; arms of earlier versions tell their source among their inputs."""
    return {"source": arm.manifest["inputs"].get("source"), **arm.manifest.get("origin", {})}


def training_of(folder: Path) -> dict[str, Any] | None:
    """seed and recipe of the training behind a folder; None: it was not trained, or nothing tells both."""
    found = mapping(origin_of(folder).get("training"))
    seed, recipe = found.get("seed"), found.get("recipe")
    whole = isinstance(seed, int) and not isinstance(seed, bool) and isinstance(recipe, dict)
    return {"seed": seed, "recipe": recipe} if whole else None


def reference_of(folder: Checkpoint, teacher: Checkpoint, other: bool) -> tuple[str | None, str]:
    """Whether `teacher` is the BF16 original of `folder`: the name of another reference (None: it is the original), and what a
    reader has to be told ("": nothing). other: that another one is used on purpose.

    Raises UsageError for another reference that is not used on purpose, and for an original that is called another one.
    """
    unquantized = not folder.config.get("quantization_config")
    own = folder.digest if unquantized else origin_of(folder.folder).get("source")
    unlike = [name for name in _ALIKE if folder.config.get(name) != teacher.config.get(name)]
    if own == teacher.digest:
        if other:
            raise UsageError(f"--other-teacher: {teacher.folder} is the original of {folder.folder}: leave the option out")
        return None, ""
    if own is None and not unlike and not other:
        return (None, f"nothing tells which model {folder.folder} was made from: {teacher.folder} is taken for its original")
    if not other:
        why = f"their {unlike[0]} differ" if own is None else f"it was made from {own[:12]}, that is {teacher.digest[:12]}"
        why = "it is a BF16 model itself" if unquantized else why
        raise UsageError(
            f"{teacher.folder} is not the original of {folder.folder} ({why}): give the original, or add --other-teacher to "
            "measure the distance from another model on purpose"
        )
    return teacher.display_name, f"distance from {teacher.display_name}, which is not the original of {folder.folder}"
