"""Quantization-aware distillation of BF16 language models to NVFP4. __all__ is the interface for Python, qad.command.interface.

Each name is imported when it is first asked for, so that `import qad` takes no time and no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from qad.version import __version__ as __version__

if TYPE_CHECKING:
    from qad.command.interface import Results, check, compare, gate, load_recipe, plan, run, validate

__all__ = ["Results", "check", "compare", "gate", "load_recipe", "plan", "run", "validate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("qad.command.interface"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
