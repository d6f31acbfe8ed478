"""A model that reads each module's weights when the module runs and drops them behind it: a forward pass of a checkpoint
of any size, in the memory of its largest module and the activations.

Weights come from the memory-mapped source, in BF16 without a copy. A weight that is not there is NaN, because torch multiplies
by a tensor of the meta device without an error and returns what the memory held (2.13, CPU). The modules, their order and their
numbers are those of the loaded model; only for passes without gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qad.model.loader import load_skeleton, stays_wide
from qad.model.names import names_of
from qad.model.source import Checkpoint

_Hook = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a parameter or buffer is in the source, and the dtype it has in the loaded model."""

    source: Checkpoint
    name: str
    dtype: torch.dtype

    def read(self) -> Tensor:
        return self.source.get(self.name).to(self.dtype)


def streamed_model(source: Checkpoint, dtype: str) -> Any | None:
    """The model on the CPU, in eval mode. None where it cannot be streamed and has to be loaded: a parameter or buffer is not
    stored under its own name, or a module computes with the weights of another one.

    Raises SourceError where transformers does not know the architecture.
    """
    model = load_skeleton(source, dtype).requires_grad_(False).eval()
    names = names_of(model)
    wide = stays_wide(model, dtype)
    stored: dict[str, _Stored] = {}
    for name, value in (*model.named_parameters(), *model.state_dict().items()):
        found = stored_name(source, names.tensor(name), value)
        if found is None:
            return None
        stored[name] = _Stored(source, found, torch.float32 if wide(name) else value.dtype)
    for path, module in model.named_modules():
        _stream(
            module, {leaf: stored.get(f"{path}.{leaf}" if path else leaf) for leaf in (*module._parameters, *module._buffers)}
        )
    return model if _runs(model) else None


def _stream(module: nn.Module, stored: Mapping[str, _Stored | None]) -> None:
    """A module's own parameters come and go, its buffers stay. stored: by name in the module; None: computed, or no tensor."""
    for leaf in module._buffers:
        if found := stored[leaf]:
            module._buffers[leaf] = found.read()
    read = {leaf: found for leaf in module._parameters if (found := stored[leaf])}
    if read:
        absent = {leaf: _absent(module._parameters[leaf], found.dtype) for leaf, found in read.items()}
        module.register_forward_pre_hook(_read(read), prepend=True)
        module.register_forward_hook(_drop(absent), always_call=True)
        module._parameters.update(absent)


def stored_name(source: Checkpoint, name: str, value: Tensor) -> str | None:
    """The source's name of a parameter or buffer, None where it has no such tensor of that shape."""
    found = source.embedding if name == source.head and source.tied_embeddings else name
    info = source.tensors.get(found) if found else None
    return found if info is not None and info.shape == tuple(value.shape) else None


def _absent(parameter: Any, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), float("nan"), dtype=dtype).expand(parameter.shape), requires_grad=False)


def _runs(model: Any) -> bool:
    """No module computes with the weights of another one, in what two tokens reach; one alone may take a decoder's short cut."""
    with torch.no_grad():
        hidden: Tensor = model.base_model(torch.zeros(1, 2, dtype=torch.int64), use_cache=False)[0]
    return bool(torch.isfinite(hidden).all())


def _read(stored: Mapping[str, _Stored]) -> _Hook:
    def hook(module: nn.Module, args: Any) -> None:
        for leaf, found in stored.items():
            module._parameters[leaf] = nn.Parameter(found.read(), requires_grad=False)

    return hook


def _drop(absent: Mapping[str, nn.Parameter]) -> _Hook:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(absent)

    return hook
