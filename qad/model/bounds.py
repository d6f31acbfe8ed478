"""How large a model a config.json may ask for: no larger than its tensors can fill. Held before and while transformers builds it,
which otherwise takes whatever number it is given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

_COUNTS = re.compile(r"layer|expert|block|depth|stage|label|codebook")  # of what transformers makes one by one
_LARGEST = 100_000  # of any such count; the largest published are some hundreds
_FREE = 10_000  # modules that cost next to nothing
_MODULES = 4  # for each place of a tensor: containers, activations and dropouts have none


class OversizedError(ValueError):
    """A config.json asks for more than its tensors can fill."""


def require_bounded(config: Mapping[str, object]) -> None:
    """Raises OversizedError where a count is beyond all models: lists are made of it before any module is."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            require_bounded(value)
        elif isinstance(value, int) and abs(value) > _LARGEST and _COUNTS.search(key):
            raise OversizedError(f"{key} is {value:,}")


def places(shapes: Iterable[tuple[int, ...]]) -> int:
    """How many modules' tensors there are: fused experts count one by one."""
    return sum(shape[0] if len(shape) == 3 else 1 for shape in shapes)


@contextmanager
def built_for(shapes: Iterable[tuple[int, ...]]) -> Iterator[None]:
    """Within the block, building ends with OversizedError where it makes many more modules than tensors of these shapes fill."""
    most = _FREE + _MODULES * places(shapes)
    made = 0

    def count(_module: nn.Module, _name: str, _child: nn.Module | None) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise OversizedError(f"it asks for more than {most:,} modules")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
