"""YAML that others wrote, in bounded time and memory: recipes, suites, policies, task files, the front matter of cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from qad.untrusted import clean, regular_bytes

_CHARACTERS = 200_000  # of a text; a second of reading
_VALUES = 100_000  # of characters and values, aliases counted as often as they stand for something
_BITS = 64  # of a whole number


def strict_yaml(text: str, *, tags: bool = False) -> Any:
    """The value of one YAML text, of plain types alone.

    tags: values with a tag of their own, such as `!function x.y`, are None; else they are refused. Raises ValueError, in one
    line, for what is no YAML, a key that occurs twice, a text of more than 200,000 characters, nesting that is too deep, aliases
    that stand for themselves or for more than the text could hold, and values that are none: whole numbers beyond 64 bits, dates
    that do not exist, half a character.
    """
    if len(text) > _CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, {_CHARACTERS:,} at the most are read")
    try:
        loader = (_Tagged if tags else _Strict)(text)
        node = loader.get_single_node()
        if node is not None:
            _size(node, {})
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(clean(" ".join(str(error).split()), 400)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_yaml(path: Path, *, tags: bool = False) -> Any:
    """`strict_yaml` of a regular file. Raises OSError beside."""
    return strict_yaml(regular_bytes(path, 4 * _CHARACTERS).decode(), tags=tags)


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Characters and values that a node stands for. known: those of nodes that were met, by identity; 0 while being counted."""
    found = known.get(id(node))
    if found is None:
        known[id(node)] = 0
        if isinstance(node, yaml.ScalarNode):
            found = 1 + len(node.value)
        else:
            children = node.value if isinstance(node, yaml.SequenceNode) else [x for pair in node.value for x in pair]
            found = 1 + sum(_size(child, known) for child in children)
        known[id(node)] = found
    if not 0 < found <= _CHARACTERS + _VALUES:
        what = "itself" if not found else "more than the text could hold"
        raise yaml.YAMLError(f"an alias stands for {what}, near line {node.start_mark.line + 1}")
    return found


class _Strict(yaml.SafeLoader):
    """Two equal keys of one mapping are an error, not the last one; so is a scalar that is no value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if isinstance(name, (str, int, float, bool, type(None))) and name in seen:
                raise yaml.YAMLError(f"key {clean(name)!r} appears twice, near line {node.start_mark.line + 1}")
            seen.add(name if isinstance(name, (str, int, float, bool, type(None))) else id(key))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            sound = not isinstance(node, yaml.ScalarNode) or _is_sound(value)
        except (ValueError, OverflowError, AttributeError):  # what constructors let through: dates, digits, !!float of a word
            sound = False
        if not sound:
            given = clean(node.value, 40) if isinstance(node, yaml.ScalarNode) else node.tag
            raise yaml.YAMLError(f"{given!r} is no value that is taken, near line {node.start_mark.line + 1}")
        return value


def _is_sound(value: object) -> bool:
    """Neither a number that nothing here takes nor text that cannot be written."""
    if isinstance(value, int):
        return value.bit_length() <= _BITS
    return not isinstance(value, str) or not any("\ud800" <= char <= "\udfff" for char in value)


class _Tagged(_Strict):
    """Reads a value with a tag of its own as nothing: no code runs."""


_Tagged.add_multi_constructor("!", lambda _loader, _suffix, _node: None)
