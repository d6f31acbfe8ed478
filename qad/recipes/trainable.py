"""Which parameters train: the globs of a recipe, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from qad.errors import UsageError
from qad.model.families import DEFAULT
from qad.recipes.recipe import Train


def trainable_names(config: Train, parameters: Iterable[str], linears: Iterable[str]) -> set[str]:
    """Parameters that train: all of the language model, those of the quantized Linears, or those a glob names. What lies beside
    the language model (towers, projectors) trains where a glob names it.

    Raises UsageError for a pattern that matches nothing.
    """
    names = list(parameters)
    if config.trainable == "all":
        return {name for name in names if not any(part in DEFAULT.towers for part in name.split("."))}
    if config.trainable == "linears":
        modules = set(linears)
        return {name for name in names if name.rpartition(".")[0] in modules}
    chosen: set[str] = set()
    for pattern in config.trainable:
        chosen |= _matching(pattern, names, "train.trainable")
    return chosen


def check_patterns(config: Train, parameters: Iterable[str], linears: Iterable[str]) -> None:
    """Find a pattern that matches nothing before anything is loaded. Raises UsageError."""
    chosen = sorted(trainable_names(config, parameters, linears))
    for pattern in config.lr_scale:
        _matching(pattern, chosen, "train.lr_scale")


def _matching(pattern: str, names: list[str], key: str) -> set[str]:
    found = {name for name in names if fnmatchcase(name, pattern)}
    if not found:
        raise UsageError(
            f"{key}: pattern {pattern!r} matches no trainable parameter; patterns are globs on full names such as "
            f"{names[0] if names else '*.mlp.*'}"
        )
    return found
