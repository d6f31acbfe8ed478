"""Where a checkpoint comes from: its BF16 original, and what its arm was trained with. Kept in manifests under "origin", which is
no part of a stage's key and goes along from an arm to its exports and their conversions:

    source     digest of the BF16 folder it was quantized from
    original   where that is RUN/balanced (quantize.balance): digest of the original behind it, which has the same bits
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

BALANCED = "balanced"  # kind of a folder that qad.training.balance wrote
_ALIKE = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size")  # of a model and what was made from it


def origin_of(folder: Path) -> dict[str, Any]:
    """What the manifest of a folder says of its origin; {} where it has none, or none that can be read."""
    return mapping(_manifest(folder).get("origin"))


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return mapping(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def origin_of_arm(arm: Artifact, source: Path) -> dict[str, Any]:
    """For what is exported from an arm over the folder `source`; arms of earlier versions tell it among their inputs."""
    behind = _manifest(source)
    original = mapping(behind.get("inputs")).get("source") if behind.get("kind") == BALANCED else None
    found = {"source": arm.manifest["inputs"].get("source"), **arm.manifest.get("origin", {})}
    return found | ({"original": original} if original else {})


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
    origin = origin_of(folder.folder)
    own = folder.digest if unquantized else origin.get("source")
    unlike = [name for name in _ALIKE if folder.config.get(name) != teacher.config.get(name)]
    if teacher.digest in (own, None if unquantized else origin.get("original")):
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
