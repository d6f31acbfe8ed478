"""A decision about single modules, written as the globs of a recipe."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import translate

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def globs_of(decided: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Glob -> value, few of them, each of which takes modules of its value alone and no others of `names`.

    decided: module -> value. names: all modules that a recipe's globs could take, `decided` among them.

    Numbers of layers and of experts become `*` where all modules of that form are decided alike, else the experts' alone, else
    the name stays as it is.
    """
    found: dict[str, str] = {}
    alike: dict[str, bool] = {}
    for name, value in decided.items():
        for pattern in (_NUMBER.sub("*", name), _EXPERT.sub("*", name)):
            if pattern not in alike:
                matches = re.compile(translate(pattern)).match
                alike[pattern] = all(decided.get(other) == value for other in names if matches(other))
            if alike[pattern]:
                found[pattern] = value
                break
        else:
            found[name] = value
    return found
