"""`qad import` of a quantized folder: an arm whose export is that folder again, to the byte.

Whoever wrote it (ModelOpt's export, which Megatron-Bridge and NeMo call, or compressed-tensors), its codes and scales are kept as
they are, and what differs from the BF16 original (norms, embeddings that were trained) comes along.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.check import require_sound
from export.convert import folder_digest, require_computed
from export.files.safetensors_writer import write_file
from export.folder import FLOATING, Folder, open_folder
from export.layouts.layout import KV_LEAVES, bits_of
from export.rules.metadata import checked
from export.stored_tensors import units
from qad.arms.arm import KEPT, KEPT_FILE, KIND, Arm, write_arm
from qad.arms.kv_cache import CALIBRATED, CAST, OFF
from qad.arms.origin import origin_of
from qad.arms.selection import Selection, given_selection
from qad.artifact import Artifact, run_stage
from qad.errors import ArtifactError, UsageError
from qad.model.loader import load_skeleton
from qad.model.source import Checkpoint, open_checkpoint
from qad.numerics.formats import FORMATS, INPUT_SCALE
from qad.place import require_apart
from qad.untrusted.safetensors_header import Entry

_FAR = 0.5  # of the norm; rounding alone moves a weight by .095, distillation by little more


def arm_of_folder(folder: Path, source: str, name: str, out: Path, replace: bool = False) -> Artifact:
    """Write the arm `name` (ptq, qad or qat) to `out`; a finished import of the same folder is reused, another replaced only on
    request.

    source: the BF16 original, a folder or a hub name. Peak memory is one scale group, and the unquantized tensors that differ.
    Raises BrokenCheckpointError for a folder that `qad check` refuses, UsageError for one that asks for what is not computed
    here, was made from another original, or holds what that does not; ArtifactError where the arm's export would not be the
    folder's bytes; StorageError when writing fails.
    """
    opened, original = open_folder(folder), open_checkpoint(source)
    require_apart(out, {"checkpoint": folder, "source model": original.folder})
    if opened.algorithm not in checked():
        raise UsageError(f"{folder} is {opened.algorithm}: only {', '.join(checked())} can be imported")
    require_sound(folder)
    require_computed(opened, "imported")
    selection = _selection(opened, original)
    _require_original(opened, original, selection)

    def work(partial: Path) -> None:
        _kept(opened, selection, partial)
        beside = _beside(opened, original, selection)
        kv_scales = _kv_scales(opened)
        format = opened.announced.kv_cache
        policy = (CALIBRATED if kv_scales else CAST) if format else OFF
        facts: dict[str, Any] = {"rounding": KEPT, "kv_cache": policy, "imported": {"layout": opened.layout.name}}
        facts |= {"kv_format": format} if format else {}
        scales = _input_scales(opened, selection)
        write_arm(partial, name, original, selection, scales, beside or None, scales=KEPT, kv_scales=kv_scales, **facts)
        described = {"scales": KEPT, **facts}
        _require_same(Arm(partial, name, original, selection, scales, described, kv_scales), opened)

    config = {"arm": name, "imported": "codes"}
    inputs = {"source": original.digest, "folder": folder_digest(folder)}
    return run_stage(KIND, out, config, inputs, work, replace=replace, origin={**origin_of(folder), "source": original.digest})


def _selection(folder: Folder, source: Checkpoint) -> Selection:
    """What the folder quantizes, in the order of the model, and why the rest is not."""
    unknown = next((module for module in folder.packed if f"{module}.weight" not in source.tensors), None)
    if unknown is not None:
        raise UsageError(
            f"{folder.path} quantizes {unknown}, which {source.folder} does not hold: give the original it was made from"
        )
    shapes = {module: shape for module in folder.packed if (shape := folder.shape_of(module))}
    other = next((m for m, shape in shapes.items() if source.tensors[f"{m}.weight"].shape != shape), None)
    if other is not None:
        raise UsageError(
            f"{other} is {list(shapes[other])} in {folder.path} and another size in {source.folder}: give its original"
        )
    formats = {module: folder.format_of(module) for module in shapes}
    return given_selection(load_skeleton(source), formats, "not quantized in the folder")


def _require_original(folder: Folder, source: Checkpoint, selection: Selection) -> None:
    """By the manifest where there is one; else the first and the last module decode to something near the original's."""
    made_from = origin_of(folder.path).get("source")
    modules = list(selection.modules)
    far = made_from not in (None, source.digest)
    for module in (modules[0], modules[-1]) if made_from is None else ():
        weight = source.get(f"{module}.weight").float()
        far |= not bool((folder.quantized(module).dequantize() - weight).norm() <= _FAR * weight.norm())
    if far:
        raise UsageError(f"{folder.path} was not made from {source.folder}: give its BF16 original with --source")


def _kept(folder: Folder, selection: Selection, partial: Path) -> None:
    """KEPT_FILE: streamed, one tensor in memory."""
    entries, sources = [], {}
    for module, (n, k) in selection.modules.items():
        format = selection.format_of(module)
        reciprocal = folder.layout.of(format).reciprocal
        for place in FORMATS[format].tensors:
            if place.role == INPUT_SCALE:
                continue
            stored, scalar = f"{module}.{place.role}", place.per is None
            entries.append(Entry(stored, "F64" if scalar and reciprocal else place.dtype, () if scalar else place.shape(n, k)))
            sources[stored] = (f"{module}.{folder.layout.leaf(format, place.role)}", format if scalar else None)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for stored, (name, scalar_of) in sources.items():
            yield stored, _decoded(folder, folder.get(name), scalar_of) if scalar_of else folder.get(name)

    write_file(partial / KEPT_FILE, entries, tensors())


def _decoded(folder: Folder, stored: Tensor, format: str) -> Tensor:
    """A decode scale of one element: FP32 as it is stored, or FP64 of a stored reciprocal."""
    scale = stored.float().reshape(())
    return 1.0 / scale.double() if folder.layout.of(format).reciprocal else scale


def _input_scales(folder: Folder, selection: Selection) -> dict[str, Tensor]:
    scales = {}
    for module in selection.with_input_scale:
        format = selection.format_of(module)
        scales[module] = _decoded(folder, folder.get(f"{module}.{folder.layout.leaf(format, INPUT_SCALE)}"), format)
    return scales


def _kv_scales(folder: Folder) -> dict[str, Tensor]:
    """`ATTENTION.k_scale` and `.v_scale`, FP32 scalars."""
    found = {}
    for name in folder.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf in KV_LEAVES:
            attention = module.removesuffix(f".{leaf[0]}_proj")
            if name == folder.layout.kv_scale(attention, leaf[0]):
                found[f"{attention}.{leaf}"] = folder.get(name).float().reshape(())
    return found


def _beside(folder: Folder, source: Checkpoint, selection: Selection) -> dict[str, Tensor]:
    """Floating-point tensors that are not quantized and differ from the original's, rounded to BF16, by name."""
    differ = {}
    for name, (_, entry) in folder.tensors.items():
        module, _, leaf = name.rpartition(".")
        if (module in selection.modules and leaf in folder.leaves_of(module)) or leaf in KV_LEAVES:
            continue
        if name not in source.tensors or source.tensors[name].shape != entry.shape:
            raise UsageError(f"{folder.path} holds {name}, which {source.folder} does not hold in this shape: give its original")
        if entry.dtype in FLOATING:
            stored, own = folder.get(name), source.get(name)
            if not torch.equal(bits_of(stored.to(torch.bfloat16)), bits_of(own.to(torch.bfloat16))):
                differ[name] = stored
    return differ


def _require_same(arm: Arm, folder: Folder) -> None:
    """The arm's export, tensor by tensor, against the folder."""
    left = set(folder.tensors)
    for unit in units(arm, folder.layout):
        for name, tensor in unit.make().items():
            left.discard(name)
            if name not in folder.tensors:
                raise ArtifactError(f"{folder.path} has no {name}, which its original holds: the folder is not whole")
            stored = folder.get(name)
            rounded = (
                stored.to(torch.bfloat16)
                if folder.tensors[name][1].dtype in FLOATING and tensor.dtype != stored.dtype
                else stored
            )
            if tensor.shape != rounded.shape or not torch.equal(bits_of(tensor), bits_of(rounded)):
                raise ArtifactError(
                    f"{name} of {folder.path} would be exported with other bytes, so this folder cannot be kept; report this"
                )
    if left:
        raise ArtifactError(f"{folder.path} holds {sorted(left)[0]}, which the arm's export would lose")
