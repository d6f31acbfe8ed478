"""The quantized form of an arm, computed once: an ordered stream of stored tensors. A layout only names and places it.

Names, dtypes and shapes of everything are known before a tensor is read, so that a file's header can be written
first and the bytes streamed behind it, one scale group in memory at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from export.layouts.layout import Layout
from qad.arms.arm import Arm
from qad.arms.selection import Selection
from qad.errors import ArtifactError
from qad.untrusted.safetensors_header import Entry

_FLOATING = ("BF16", "F16", "F32")
# Added to a router's scores to choose experts, and learned in steps below BF16's resolution; engines hold it in FP32.
_KEPT = "e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class Unit:
    """Tensors that are made together and lie in one shard: a scale group with its biases, or one unquantized tensor."""

    entries: tuple[Entry, ...]
    make: Callable[[], dict[str, Tensor]]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def units(arm: Arm, layout: Layout) -> Iterator[Unit]:
    """Everything a quantized checkpoint of the arm holds, in the source's order.

    Floating-point tensors that are not quantized become BF16, but for a router's correction bias; a tied head is dropped,
    one that was untied by training is written. Raises ArtifactError for an arm
    that quantizes nothing or does not fit its source, before anything is computed. KV scales lie beside their k_proj.
    """
    for unit in _weights(arm, layout):
        names = {entry.name.rpartition(".")[0] for entry in unit.entries}
        scales = [name for name in arm.kv_scales if f"{name.rpartition('.')[0]}.k_proj" in names]
        yield _with_kv_scales(arm, layout, unit, scales) if scales else unit


def _with_kv_scales(arm: Arm, layout: Layout, unit: Unit, scales: list[str]) -> Unit:
    stored = {}
    for name in scales:
        attention, _, leaf = name.rpartition(".")
        stored[layout.kv_scale(attention, leaf[0])] = arm.kv_scales[name].float().reshape(layout.scalar)
    entries = [Entry(name, "F32", layout.scalar) for name in stored]
    return Unit((*unit.entries, *entries), lambda: unit.make() | stored)


def _weights(arm: Arm, layout: Layout) -> Iterator[Unit]:
    selection = _require_fitting(arm)
    group_of = {f"{module}.weight": group for group in selection.groups for module in group}
    head = arm.source.head
    stored = [name for name in arm.source.tensors if name != head or not arm.tied_embeddings]
    if arm.source.tied_embeddings and not arm.tied_embeddings and head not in stored:
        stored.append(head)
    beside: dict[str, list[str]] = {}  # other tensors of quantized modules: biases
    for name in stored:
        module = name.rpartition(".")[0]
        if module in selection.modules and name not in group_of:
            beside.setdefault(module, []).append(name)
    done: set[tuple[str, ...]] = set()
    for name in stored:
        group = group_of.get(name)
        if group is None:
            whole = _stored_with(arm, name)
            if name.rpartition(".")[0] not in selection.modules and (whole,) not in done:
                done.add((whole,))
                yield _plain(arm, whole)
        elif group not in done:
            done.add(group)
            yield _quantized(arm, selection, layout, group, [n for module in group for n in beside.get(module, [])])


def _stored_with(arm: Arm, name: str) -> str:
    """The tensor that holds this one, where experts of a layer stay BF16 as engines and transformers know them: mostly itself."""
    info = arm.source.tensors.get(name)
    return name if info is None or info.part is None else info.part.whole


def _plain(arm: Arm, name: str) -> Unit:
    info = arm.source.tensors.get(name)  # None: a head that the source has no tensor for, or all experts of a layer
    floating = info is None or (info.dtype in _FLOATING and not name.endswith(_KEPT))
    stacked = name in arm.source.wholes
    shape = arm.source.whole_shape(name) if stacked else arm.trained_shapes()[name] if info is None else info.shape
    entry = Entry(name, "BF16" if info is None or floating else info.dtype, shape)

    def make() -> dict[str, Tensor]:
        tensor = arm.weight(name)
        return {name: tensor.to(torch.bfloat16) if floating else tensor}

    return Unit((entry,), make)


def _quantized(arm: Arm, selection: Selection, layout: Layout, group: tuple[str, ...], beside: list[str]) -> Unit:
    plain = [_plain(arm, name) for name in beside]
    entries: list[Entry] = []
    for module in group:
        n, k = selection.modules[module]
        entries += layout.entries(module, n, k, selection.format_of(module))

    def make() -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for module, q in arm.quantize(group).items():
            tensors |= layout.tensors(module, q, arm.input_scales.get(module), selection.format_of(module))
        for unit in plain:
            tensors |= unit.make()
        return tensors

    return Unit((*entries, *(entry for unit in plain for entry in unit.entries)), make)


def _require_fitting(arm: Arm) -> Selection:
    """What the arm holds must be what its source holds: a name that is nowhere would be lost without a word."""
    selection = arm.selection
    if selection is None:
        raise ArtifactError(f"{arm.folder} is a BF16 arm: there is nothing to export, its checkpoint is the source itself")
    known = {name: info.shape for name, info in arm.source.tensors.items()}
    for module, shape in selection.modules.items():
        found = known.get(f"{module}.weight")
        if found != shape:
            raise ArtifactError(
                f"{arm.folder} quantizes {module} {list(shape)}, but {arm.source.folder} "
                + (f"holds {list(found)}" if found else "has no such tensor")
                + ": exclude the module, or make the arm again"
            )
    for name, trained in arm.trained_shapes().items():
        twin = arm.source.embedding if name == arm.source.head and arm.source.tied_embeddings else None
        if known.get(twin or name) != trained:
            raise ArtifactError(
                f"{arm.folder} trained {name} {list(trained)}, which {arm.source.folder} does not hold: make the arm again"
            )
    arm.require_input_scales()
    arm.require_kv_scales()
    return selection
