"""A model that reads each module's weights when the module runs and drops them behind it: a forward pass of a checkpoint
of any size, in the memory of its largest module and the activations.

Weights come from the memory-mapped source, in BF16 without a copy. A weight that is not there is NaN, because torch multiplies
by a tensor of the meta device without an error and returns what the memory held (2.13, CPU). The modules, their order and their
numbers are those of the loaded model; only for passes without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qad.loader import DTYPES, load_skeleton
from qad.source import HEAD, Checkpoint

_Hook = Callable[..., None]


def streamed_model(source: Checkpoint, dtype: str) -> Any | None:
    """The model on the CPU, in eval mode. None where it cannot be streamed and has to be loaded: a parameter or buffer is not
    stored under its own name, or a module computes with the weights of another one.

    Raises SourceError where transformers does not know the architecture.
    """
    model = load_skeleton(source, with_buffers=True).requires_grad_(False).eval()
    stored = {name: _stored(source, name, parameter) for name, parameter in model.named_parameters()}
    stored |= {name: _stored(source, name, value) for name, value in model.state_dict().items()}
    if any(name is None for name in stored.values()):
        return None
    for path, module in model.named_modules():
        absent = {leaf: _absent(p, DTYPES[dtype]) for leaf, p in module._parameters.items() if p is not None}
        if absent:
            names = {leaf: stored[f"{path}.{leaf}" if path else leaf] for leaf in absent}
            module.register_forward_pre_hook(_read(source, names, DTYPES[dtype]), prepend=True)  # type: ignore[arg-type]
            module.register_forward_hook(_drop(absent), always_call=True)
            module._parameters.update(absent)
    return model if _runs(model) else None


def _stored(source: Checkpoint, name: str, value: Tensor) -> str | None:
    """The source's name of a parameter or buffer, None where it has no such tensor of that shape."""
    found = source.embedding if name == HEAD and source.tied_embeddings else name
    info = source.tensors.get(found) if found else None
    return found if info is not None and info.shape == tuple(value.shape) else None


def _absent(parameter: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), float("nan"), dtype=dtype).expand(parameter.shape), requires_grad=False)


def _runs(model: Any) -> bool:
    """No module computes with the weights of another one, in what one token reaches."""
    with torch.no_grad():
        hidden: Tensor = model.base_model(torch.zeros(1, 1, dtype=torch.int64), use_cache=False)[0]
    return bool(torch.isfinite(hidden).all())


def _read(source: Checkpoint, names: Mapping[str, str], dtype: torch.dtype) -> _Hook:
    def hook(module: nn.Module, args: Any) -> None:
        for leaf, name in names.items():
            module._parameters[leaf] = nn.Parameter(source.get(name).to(dtype), requires_grad=False)

    return hook


def _drop(absent: Mapping[str, nn.Parameter]) -> _Hook:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(absent)

    return hook
