"""Small YAML files that decide something (suites, policies): one's own by path, or one that comes with the tool by name."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import TypeVar

import pydantic

from qad.errors import UsageError
from qad.untrusted import clean
from qad.untrusted.yaml_text import read_yaml

Model = TypeVar("Model", bound=pydantic.BaseModel)


class Strict(pydantic.BaseModel):
    """Unknown keys are errors, nothing is converted, nothing changes."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def shipped_names(folder: Path) -> list[str]:
    """Names that `read_shipped` takes without a file."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_shipped(model: type[Model], name: str, folder: Path, what: str, several: str, hint: str = "") -> tuple[Model, Path]:
    """A YAML file, or by its name one of `folder`; and the file that was read.

    what, several: what it is to its user, such as policy and policies. hint: said behind what is wrong with its contents.
    Raises UsageError, in one line, for anything that is no such file.
    """
    path = Path(name)
    if not isfile(path):
        names = shipped_names(folder)
        if name not in names:
            raise UsageError(f"{what} {name!r} is neither a file nor shipped: shipped {several} are {', '.join(names)}")
        path = folder / f"{name}.yaml"
    try:
        return model.model_validate(read_yaml(path)), path
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read ({error.strerror}): check the path") from error
    except pydantic.ValidationError as error:
        raise UsageError(f"{what} {path}: {first_fault(error, f'the {what}')}{hint}") from error
    except ValueError as error:
        raise UsageError(f"{what} {path} is not YAML: {error}") from error


def first_fault(error: pydantic.ValidationError, whole: str) -> str:
    """Where the first fault is, what is wrong and what was given, in one line. whole: what to call the whole."""
    first = error.errors(include_url=False)[0]
    where, given = ".".join(map(str, first["loc"])) or whole, first["input"]
    if first["type"] == "extra_forbidden":
        return f"{clean(where)}: unknown key"
    message = clean(f"{where}: {first['msg'].removeprefix('Value error, ')}", 400)
    return message + (f" (got {clean(repr(given))})" if isinstance(given, (str, int, float, type(None))) else "")
