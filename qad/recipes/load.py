"""Reading a recipe: by path or shipped name, with overrides, and its first fault in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import resources
from os.path import exists, isfile  # Path's raise OSError for a name that no file system takes
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from qad.errors import UsageError
from qad.recipes.recipe import Accuracy, Fidelity, Measure, Recipe, Throughput
from qad.text.data import SOURCES
from qad.untrusted import clean
from qad.untrusted.yaml_text import read_yaml, strict_yaml

MODELOPT = "modelopt:"  # before the name of one of ModelOpt's recipes
_MESSAGE = 600  # characters, whatever was given
_PATHS = ("model", "teacher", "data", "validation_data", "prompts", "path", "suite", "suite_data")  # keys that may hold one
_SECTIONS = ("quantize", "search", "calibrate", "train", "export", "measure", "fidelity", "accuracy", "throughput")


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with the tool."""
    return {path.stem: path for path in sorted(Path(str(resources.files("qad.recipes"))).glob("*/*.yaml"))}


def load_recipe(recipe: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe by path or shipped name, on top of its base where it names one, and apply `key.sub=value` overrides.
    Raises UsageError, one line."""
    raw, path = _read(recipe)
    for override in overrides:
        _override(raw, override)
    return parse_recipe(raw, str(path))


def _read(recipe: str, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Path]:
    """Plain data and the file they are from. above: the files whose base this is."""
    path = Path(recipe)
    if recipe.startswith(MODELOPT):
        from qad.recipes.modelopt import read_recipe  # which validates what it makes here

        read_recipe(recipe)
        return {"quantize": {"recipe": recipe}}, path
    if above and not path.is_absolute() and isfile(beside := above[-1].parent / path):
        path = beside
    if not isfile(path):
        shipped = shipped_recipes()
        if recipe not in shipped:
            if path.suffix in (".yaml", ".yml") and not exists(path):
                raise UsageError(f"recipe {recipe} does not exist: check the path, or write one with `qad init`")
            near = difflib.get_close_matches(recipe, shipped, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"shipped recipes: {', '.join(sorted(shipped))}"
            raise UsageError(f"recipe {recipe} is neither a file nor a shipped recipe: {hint}")
        path = shipped[recipe]
    try:
        raw = read_yaml(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path} is not a recipe: expected keys such as model, calibrate, train")
    raw = _beside(raw, path.parent)
    base = raw.pop("base", None)
    if base is None:
        return raw, path
    if not isinstance(base, str) or path in above:
        raise UsageError(f"{path}: base is {clean(repr(base))}: give the name or path of another recipe, not in a circle")
    return _on_top(_read(base, (*above, path))[0], raw), path


def _beside(value: Any, folder: Path, key: str = "") -> Any:
    """The recipe with its paths that lie beside its file as that place; others are the working folder's."""
    if isinstance(value, dict):
        return {name: _beside(item, folder, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_beside(item, folder, key) for item in value]
    if key in _PATHS and isinstance(value, str) and value and not Path(value).is_absolute() and folder != Path():
        return str(folder / value) if exists(folder / value) else value
    return value


def _on_top(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key; anything else, a source of text or a mapping of globs included, is the recipe's own."""
    merged = dict(base)
    for key, value in own.items():
        both = key in _SECTIONS and isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _on_top(base[key], value) if both else value
    return merged


def parse_recipe(raw: dict[str, Any], where: str) -> Recipe:
    """Validate plain data. Raises UsageError naming the first fault by its dotted key."""
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise UsageError(f"{where}: {clean(_explain(error, raw), _MESSAGE)}") from error


def parse_measure(values: dict[str, Any]) -> Measure:
    """The section `measure`, given by hand. Raises UsageError."""
    try:
        return Measure.model_validate(values)
    except ValidationError as error:
        raise UsageError(clean(_explain(error, values, Measure), _MESSAGE)) from error


def parse_section(kind: str, values: dict[str, Any]) -> Fidelity | Accuracy | Throughput:
    """Settings of one kind of measurement, given by hand. Raises UsageError."""
    value: Fidelity | Accuracy | Throughput = getattr(parse_measure({kind: values}), kind)
    return value


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {clean(override)}: expected key=value, such as train.lr=1e-5")
    node = raw
    *parents, leaf = key.split(".")
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    try:
        node[leaf] = strict_yaml(value)
    except ValueError as error:
        raise UsageError(f"--set {clean(override)}: the value is not valid YAML: {error}") from error


def _explain(error: ValidationError, raw: Any, root: type[BaseModel] = Recipe) -> str:
    """The first fault in one line: which key, what is wrong, the nearest known key."""
    faults = error.errors(include_url=False)
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])  # a typo beside a missing key
    kind = first["type"]
    dotted, model = _place(first["loc"], raw, root)
    if kind == "extra_forbidden":
        known = list(model.model_fields)
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {dotted!r}: {hint}"
    if kind == "missing":
        return f"key {dotted!r} is missing"
    if kind == "model_type":
        return f"{dotted}: expected its keys, such as {', '.join([*model.model_fields][:3])} (got {clean(repr(first['input']))})"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        key, kinds = f"{dotted}.source", ", ".join(sorted(SOURCES))
        given = first["input"].get("source") if isinstance(first["input"], dict) else None
        return f"key {key!r} is missing: one of {kinds}" if given is None else f"{key}: one of {kinds} (got {clean(repr(given))})"
    message = first["msg"].removeprefix("Value error, ")
    if not dotted or kind == "value_error":  # of a section: names what does not fit together
        return f"{dotted}: {message}" if dotted else message
    return f"{dotted}: {message} (got {clean(repr(first['input']))})"


def _place(location: tuple[int | str, ...], raw: Any, model: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """pydantic's location as the user wrote it, and the section it lies in: the name of a kind of source is no key, nor is
    the 0 of a source that was written without its list."""
    keys: list[str] = []
    for part in location:
        if isinstance(part, int):
            if isinstance(raw, list):
                keys.append(str(part))
                raw = raw[part] if part < len(raw) else None  # a list that is too short
        elif part in SOURCES and part not in model.model_fields:
            model = SOURCES[part]
        elif isinstance(raw, dict) or part in model.model_fields:  # else a member of a union, such as literal['qad','qat']
            keys.append(part)
            raw = raw.get(part) if isinstance(raw, dict) else None
            annotation = model.model_fields[part].annotation if part in model.model_fields else None
            nested = [t for t in (annotation, *getattr(annotation, "__args__", ())) if isinstance(t, type)]
            model = next((t for t in nested if issubclass(t, BaseModel)), model)
    return ".".join(keys), model
