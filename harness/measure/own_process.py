"""A model in a process of its own: when the process has ended, its memory is free, whatever an engine holds on to.

    run_alone("harness.measure.arms:accuracy_alone", {...})

runs a function of plain JSON in a child of this interpreter, shows its progress, and waits for its exit.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qad.errors import QadError

_MARGIN = 0.05  # of the card's memory that may be missing behind a child: other processes come and go


class ChildError(QadError):
    """A measurement in a process of its own failed; its own message says why."""


def run_alone(function: str, request: dict[str, Any]) -> None:
    """Run `module:name` with a request of JSON types in a child process and await its exit.

    Raises ChildError, with the child's message and exit code, where it fails. Warns where less memory of the GPU is free
    behind the child than before it.
    """
    before = _free()
    with tempfile.TemporaryDirectory(prefix="qad-alone-") as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "harness.measure.own_process", function, str(file)]
        child = subprocess.run(command, stderr=None, stdout=None, check=False)
    if child.returncode < 0 or child.returncode == 1:
        how = f"signal {-child.returncode}" if child.returncode < 0 else "a defect, see above"
        raise ChildError(f"the process that ran {function} ended by {how}")
    if child.returncode:
        error = ChildError(f"the process that ran {function} could not do it: see the line above")
        error.exit_code = child.returncode
        raise error
    after = _free()
    if before and after and after[0] < before[0] - _MARGIN * before[1]:
        lost = (before[0] - after[0]) / 1e9
        warnings.warn(
            f"{lost:.1f} GB of GPU memory are not free again behind {function}: something else took them", stacklevel=2
        )


def _free() -> tuple[int, int] | None:
    """Bytes free and in all of the current GPU; None without one."""
    import torch

    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None


def main(function: str, file: str) -> int:
    """The child: 0, or the exit code of a QadError after its line on standard error."""
    module, _, name = function.partition(":")
    run: Callable[..., None] = getattr(importlib.import_module(module), name)
    try:
        run(**json.loads(Path(file).read_text(encoding="utf-8")))
    except QadError as error:
        print(f"qad: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
