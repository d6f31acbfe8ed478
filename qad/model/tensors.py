"""Where the tensors of a checkpoint lie, and how they are read: whole, or the part of one expert."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from qad.errors import SourceError
from qad.model.families import Family
from qad.model.stacked import Stored
from qad.numerics import mxfp4
from qad.untrusted import clean


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    dtype: in safetensors' words: BF16, F16, F32, F8_E4M3, U8 ...; BF16 where it is stored in MXFP4.
    stored: its name in the file, where that is another one.
    part: which part of the stored tensor it is, where that holds all experts of a layer.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    stored: str | None = None
    part: Part | None = None

    def read(self, name: str) -> Tensor:
        """The tensor, memory-mapped; of a part of one, no more than the expert's."""
        if self.part is not None:
            return self.part.read(self)
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.stored or name)

    def expert(self, number: int) -> Tensor:
        """Of a tensor of all experts."""
        with safe_open(self.file, framework="pt") as file:
            return file.get_slice(self.stored)[number]


@dataclasses.dataclass(frozen=True)
class Part:
    """One projection of one expert.

    whole: name of the tensor of all experts as engines and transformers know it.
    scales: of MXFP4 blocks.
    """

    whole: str
    form: Stored
    parameter: str
    expert: int
    place: int
    scales: TensorInfo | None = None

    def read(self, info: TensorInfo) -> Tensor:
        """[N, K] or, of a bias, [N], contiguous."""
        one = info.expert(self.expert)
        if self.scales is not None:
            one = mxfp4.decode(one, self.scales.expert(self.expert))
        return self.form.layout.parts(self.parameter, one)[self.place].contiguous()


def expert_by_expert(family: Family, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by name, those of the family that hold all experts of a layer as one of each projection and expert.

    Raises SourceError for MXFP4 blocks without scales that fit.
    """
    found = {name: held for name in tensors if (held := family.whole(name)) is not None}
    scales = {form.scales(name) for name, (form, _, _) in found.items() if form.mxfp4}
    named: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name not in found:
            named |= {} if name in scales else {name: info}
            continue
        form, block, parameter = found[name]
        info = dataclasses.replace(info, stored=name)
        whole, beside, shape = family.stacked[0].name(block, parameter), None, info.shape
        if form.mxfp4:
            beside, shape = _scales(tensors, name, form.scales(name))
            info = dataclasses.replace(info, dtype="BF16")
        places = form.layout.parts(parameter, torch.empty(shape[1:], device="meta"))
        for expert in range(shape[0]):
            for place, (leaf, like) in enumerate(zip(form.parts(parameter), places, strict=True)):
                part = Part(whole, form, parameter, expert, place, beside)
                named[f"{block}.{expert}.{leaf}"] = dataclasses.replace(info, shape=tuple(like.shape), part=part)
    return named


def _scales(tensors: dict[str, TensorInfo], name: str, scales: str) -> tuple[TensorInfo, tuple[int, ...]]:
    """Of blocks [E, N, G, 16]: the scales [E, N, G], and the shape [E, N, 32 G] of what they decode to."""
    blocks, found = tensors[name], tensors.get(scales)
    if blocks.dtype != "U8" or found is None or found.dtype != "U8" or blocks.shape != (*found.shape, mxfp4.BLOCK_SIZE // 2):
        told = f"{found.dtype} {list(found.shape)}" if found else "missing"
        raise SourceError(
            f"{clean(name)} is {blocks.dtype} {list(blocks.shape)} and {clean(scales)} is {told}: MXFP4 has U8 blocks of 16 "
            "bytes and one U8 scale for each; fetch the files again"
        )
    *rows, groups = found.shape
    return dataclasses.replace(found, stored=scales), (*rows, groups * mxfp4.BLOCK_SIZE)
