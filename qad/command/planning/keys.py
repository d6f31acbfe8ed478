"""`qad keys`: every key of a recipe with its type, default and sentence, from the models that validate recipes."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator
from typing import Any

from qad.errors import UsageError
from qad.recipes.recipe import Recipe
from qad.text.data import SOURCES

SECTION, SOURCE = "section", "source of text"
_NAMES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true | false", "null": "none"}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a recipe.

    name: dotted, as `--set` takes it.
    kind: what its value may be, in words.
    default: as YAML shows it; None where the key is required.
    text: what it means.
    """

    name: str
    kind: str
    default: str | None
    text: str


def recipe_keys(section: str = "") -> list[Key]:
    """Keys of a recipe, of one section (`train`, `measure.fidelity`), or of the sources of text (`data`).

    Raises UsageError for a section that is not there.
    """
    keys = [*_keys(Recipe.model_json_schema(), ""), *_source_keys()]
    found = [key for key in keys if not section or key.name == section or key.name.startswith(f"{section}.")]
    if not found:
        sections = sorted({key.name.rpartition(".")[0] for key in keys} - {""})
        near = difflib.get_close_matches(section, sections, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"sections are {', '.join(sections)}"
        raise UsageError(f"a recipe has no section {section!r}: {hint}")
    return found


def keys_text(keys: list[Key]) -> str:
    """A paragraph a key, for a terminal."""
    return "\n".join(f"{key.name}: {key.kind}{_default(key, ' (required)', ' (default: {})')}\n    {key.text}" for key in keys)


def keys_markdown(keys: list[Key]) -> str:
    """A table, for the documentation."""
    cells = [(f"`{key.name}`", key.kind, _default(key, "required", "`{}`"), key.text) for key in keys]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])


def _default(key: Key, required: str, form: str) -> str:
    if key.kind in (SECTION, SOURCE):
        return ""
    return required if key.default is None else form.format(key.default)


def _source_keys() -> Iterator[Key]:
    for name, model in SOURCES.items():
        schema = model.model_json_schema()
        yield Key(f"data.{name}", SOURCE, "", " ".join(schema.get("description", "").split()))
        yield from (key for key in _keys(schema, f"data.{name}.") if not key.name.endswith(".source"))


def _keys(schema: dict[str, Any], prefix: str, definitions: dict[str, Any] | None = None) -> Iterator[Key]:
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    required = schema.get("required", [])
    for name, part in schema["properties"].items():
        default = None if name in required else _yaml(part.get("default"))
        section = _section(part, definitions)
        text = " ".join(part.get("description", "").split())
        if section:
            yield Key(f"{prefix}{name}", SECTION, "", text)
            yield from _keys(section, f"{prefix}{name}.", definitions)
        else:
            yield Key(f"{prefix}{name}", _kind(part, definitions), default, text)


def _section(part: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of a key that holds keys of its own."""
    for option in (part, *part.get("anyOf", ())):
        found: dict[str, Any] = definitions.get(str(option.get("$ref")).rpartition("/")[2], {})
        if "properties" in found:
            return found
    return None


def _kind(part: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "anyOf" in part:
        return " | ".join(dict.fromkeys(_kind(option, definitions) for option in part["anyOf"]))
    if "$ref" in part or "oneOf" in part:
        return "source, or a list of them"  # of text, the only such thing outside of sections
    if "enum" in part:
        return " | ".join(map(str, part["enum"]))
    if "const" in part:
        return str(part["const"])
    if part.get("type") == "array":
        items = part.get("items") or (part.get("prefixItems") or [{}])[0]
        return f"list of {_kind(items, definitions)}"
    if part.get("type") == "object":
        return f"mapping to {_kind(part.get('additionalProperties', {}), definitions)}"
    return _NAMES.get(str(part.get("type")), "value") + _bounds(part)


def _bounds(part: dict[str, Any]) -> str:
    limits = {"exclusiveMinimum": "above", "minimum": "from", "maximum": "to", "exclusiveMaximum": "below"}
    return "".join(f" {word} {part[key]:g}" for key, word in limits.items() if key in part)


def _yaml(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
