"""The quantized form of an arm, computed once: an ordered stream of stored modules. Layouts only name and place it.

Names, dtypes and shapes of everything are known before a tensor is read, so that a file's header can be written
first and the bytes streamed behind it, one scale group in memory at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qad.arm import Arm, quantize_group
from qad.errors import ArtifactError

BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "BOOL": 1}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint file. dtype in safetensors' words."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype] * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Tensors that are made together and lie in one shard: a scale group, or one unquantized tensor."""

    entries: tuple[Entry, ...]
    make: Callable[[], dict[str, Tensor]]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def units(arm: Arm) -> Iterator[Unit]:
    """Everything an NVFP4 checkpoint of the arm holds, in the source's order.

    A quantized module X becomes X.weight U8 [N, K/2], X.weight_scale F8_E4M3 [N, K/16], X.weight_scale_2 F32 [] and,
    for W4A4, X.input_scale F32 []. Floating-point tensors that are not quantized become BF16; a tied head is dropped.
    Raises ArtifactError for an arm that quantizes nothing.
    """
    if arm.selection is None:
        raise ArtifactError(
            f"{arm.folder} is a BF16 arm: there is nothing to export, its checkpoint is the source itself"
        )
    group_of = {f"{module}.weight": group for group in arm.selection.groups for module in group}
    done: set[tuple[str, ...]] = set()
    for name, info in arm.source.tensors.items():
        if name == "lm_head.weight" and arm.source.tied_embeddings:
            continue
        group = group_of.get(name)
        if group is None:
            yield _plain(arm, name, info.dtype, info.shape)
        elif group not in done:
            done.add(group)
            yield _quantized(arm, group)


def _plain(arm: Arm, name: str, dtype: str, shape: tuple[int, ...]) -> Unit:
    floating = dtype in ("BF16", "F16", "F32")
    entry = Entry(name, "BF16" if floating else dtype, shape)

    def make() -> dict[str, Tensor]:
        tensor = arm.weight(name)
        return {name: tensor.to(torch.bfloat16) if floating else tensor}

    return Unit((entry,), make)


def _quantized(arm: Arm, group: tuple[str, ...]) -> Unit:
    assert arm.selection is not None
    entries: list[Entry] = []
    for module in group:
        n, k = arm.selection.modules[module]
        entries += [
            Entry(f"{module}.weight", "U8", (n, k // 2)),
            Entry(f"{module}.weight_scale", "F8_E4M3", (n, k // 16)),
            Entry(f"{module}.weight_scale_2", "F32", ()),
        ]
        if arm.selection.quantizes_activations:
            entries.append(Entry(f"{module}.input_scale", "F32", ()))

    def make() -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for module, q in quantize_group({m: arm.weight(f"{m}.weight") for m in group}).items():
            tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"] = q.packed, q.block_scale
            tensors[f"{module}.weight_scale_2"] = q.global_scale
            if module in arm.input_scales:
                tensors[f"{module}.input_scale"] = arm.input_scales[module]
        return tensors

    return Unit(tuple(entries), make)
