"""A model whose parameters lie in shards: every rank holds its rows of each, and a layer is whole only while it runs.

torch's FSDP2 gathers and frees; what is done here is to give it parameters that were never whole. A skeleton's parameters become
empty memory one layer at a time and are cut at once, so that only the rows of this rank are ever touched; then they are read,
row by row of the memory-mapped source.

    teacher   shards in the compute dtype, gathered as they are
    student   shards in FP32 that hold BF16 values, gathered in the compute dtype, gradients reduced in FP32

Embedding, head and last norm belong to no layer: they are gathered around whatever `gathered` runs, which is all that a model
computes here, the loss in chunks included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from qad.errors import SourceError
from qad.model.loader import DTYPES, load_skeleton, stays_wide
from qad.model.names import StoredNames, names_of
from qad.model.source import Checkpoint
from qad.model.streamed import stored_name
from qad.training.ranks.group import Ranks, here

_T = TypeVar("_T")
_ROOT = "sharded_root"  # of a model: the module that gathers what belongs to no layer


class _Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        """Called where all parameters outside of layers are whole."""
        return function()


def gathered(model: nn.Module, function: Callable[[], _T]) -> _T:
    """What `function` returns, run where the model can compute; on all ranks, as often on each."""
    root = getattr(model, _ROOT, None)
    if root is None:
        return function()
    here().calls += 1
    found: _T = root(function)
    return found


def released(model: nn.Module) -> None:
    """What `gathered` made whole is in shards again, so that it is read anew after a change."""
    root = getattr(model, _ROOT, None)
    if root is not None:
        root.reshard()


def own_rows(tensor: Tensor) -> Tensor:
    """Of a parameter or gradient, what this rank holds: a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """Of a tensor of the checkpoint what this rank holds: a view, and which rows of the stored tensor it is."""

    view: Tensor
    rows: slice | EllipsisType


def parts(names: StoredNames, parameter: str, local: Tensor, length: int, ranks: Ranks) -> dict[str, Part]:
    """As StoredNames.parts, of this rank's rows of a parameter with `length` rows; experts that lie elsewhere are left out."""
    if ranks.alone:
        return {stored: Part(view, ...) for stored, view in names.parts(parameter, local).items()}
    rows = ranks.rows(length)
    whole = torch.empty((length, *local.shape[1:]), device="meta")
    row = local.shape[1:].numel()
    found = {}
    for stored, view in names.parts(parameter, whole).items():
        if view.shape == whole.shape:
            found[stored] = Part(local, rows)
        elif rows.start <= view.storage_offset() // row < rows.stop:  # of an expert, which is a row
            start = view.storage_offset() - rows.start * row + local.storage_offset()
            found[stored] = Part(local.as_strided(view.shape, view.stride(), start), ...)
    return found


def sharded_teacher(source: Checkpoint, dtype: str, ranks: Ranks, split: bool = False) -> Any:
    """The source's model for passes without gradients. split: its experts under the checkpoint's names."""
    model = skeleton(source, dtype, ranks, split)
    names = names_of(model)
    shard(model, dtype, False, ranks)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for stored, part in parts(names, name, own_rows(parameter), len(parameter), ranks).items():
                part.view.copy_(source.get(stored)[part.rows])
    return model


def skeleton(source: Checkpoint, dtype: str, ranks: Ranks, split: bool = False) -> Any:
    """The source's model as it is before `shard`: buffers as loaded, parameters on the meta device.

    Raises SourceError where a parameter or buffer is not stored under a name and in a shape of its own, or where transformers has
    no layers that one can tell from the rest.
    """
    model = load_skeleton(source, dtype, str(ranks.device), split).requires_grad_(False).eval()
    model.tie_weights()
    names, wide = names_of(model), stays_wide(model, dtype)
    for name, parameter in model.named_parameters():
        found = names.parts(name, parameter)
        odd = next((stored for stored in found if stored_name(source, stored, found[stored]) is None), name if not found else "")
        if odd or not parameter.dim():
            raise SourceError(f"{source.folder}: {odd or name} cannot be read by rows, which several ranks need: run one process")
    for name, value in dict(model.named_buffers()).items():
        stored = stored_name(source, names.tensor(name), value)
        if stored is not None:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = source.get(stored).to(torch.float32 if wide(name) else value.dtype)
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        raise SourceError(
            f"{source.folder}: transformers does not say what its layers are: several ranks need that, run one process"
        )
    return model


def shard(model: Any, dtype: str, trains: bool, ranks: Ranks) -> None:
    """Give a skeleton its parameters, uninitialized, this rank's rows of each. trains: in FP32, whatever they are computed in."""
    wide = stays_wide(model, dtype)
    computed = {parameter: torch.float32 if wide(name) else DTYPES[dtype] for name, parameter in model.named_parameters()}
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for module in reversed([*model.modules()]):  # what is inside first
        own = {computed[parameter] for parameter in module._parameters.values() if parameter in computed}
        apart = trains and own == {torch.float32} != {DTYPES[dtype]}  # a router in FP32 is gathered by itself
        if apart or isinstance(module, GradientCheckpointingLayer):
            _shard(module, computed, trains, mesh)
    root = _Root(model)
    _shard(root, computed, trains, mesh)
    object.__setattr__(model, _ROOT, root)


def _shard(module: nn.Module, computed: Mapping[nn.Parameter, torch.dtype], trains: bool, mesh: DeviceMesh) -> None:
    """What of the module lies in no shard yet."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # what modules share stays shared
    for part in module.modules():
        for leaf, old in part._parameters.items():
            if old is not None and old in computed:
                empty = torch.empty(old.shape, dtype=torch.float32 if trains else computed[old], device=mesh.device_type)
                part._parameters[leaf] = made.setdefault(old, nn.Parameter(empty, requires_grad=False))
    policy, dtypes = MixedPrecisionPolicy(), {computed[old] for old in made}
    if len(dtypes) > 1 and trains:
        raise SourceError(f"{type(module).__name__} computes with parameters of several dtypes: run one process")
    if dtypes and trains:
        policy = MixedPrecisionPolicy(param_dtype=dtypes.pop(), reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not isinstance(module, _Root))
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)  # losses are sums
    module.set_force_sum_reduction_for_comms(True)  # the one reduction that gloo knows
