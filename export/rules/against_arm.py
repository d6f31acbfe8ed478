"""W3: the folder against the arm it was exported from. Our own export of an arm equals it to the bit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from export.folder import FLOATING, Folder
from export.layouts.layout import ROTARY, Layout, bits_of
from export.rules.against_source import against_source
from export.rules.findings import Finding, error, warning
from qad.arms.arm import Arm, open_arm
from qad.numerics.formats import FORMATS, INPUT_SCALE, Quantized
from qad.numerics.groups import quantize_group


def against_arm(folder: Folder, source: Path) -> Iterator[Finding]:
    """Decoded weights, input scales and unquantized tensors against the arm's own, config and prompts against its
    source's. Assumes a folder without errors. Raises ArtifactError where `source` is no finished arm."""
    arm = open_arm(source)
    known = {*arm.source.tensors, *arm.source.wholes, *arm.trained_shapes()}
    lost = [module for module in folder.packed if f"{module}.weight" not in known]
    for module in lost:
        yield error("W3", module, f"is not in the arm {arm.name}", f"give the arm it was exported from, not {source}")
    modules = [module for module in folder.packed if f"{module}.weight" in known]
    other: list[str] = []
    for group in folder.family.scale_groups(modules):
        yield from _group(folder, arm, group, other)
    yield from _quantized_otherwise(arm, other, len(modules))
    yield from _input_scales(folder, arm, modules)
    yield from _kv_scales(folder, arm)
    for name, (_, entry) in folder.tensors.items():
        if entry.dtype in FLOATING and name in known and name.rpartition(".")[0] not in folder.packed:
            stored, own = folder.get(name).to(torch.bfloat16), arm.weight(name).to(torch.bfloat16)
            if stored.shape != own.shape or not torch.equal(bits_of(stored), bits_of(own)):
                told = f"{name} is not {arm.name}'s, rounded to BF16"
                yield error("W3", name.rpartition(".")[0], told, f"export {source} again")
    yield from _lost(folder, arm)
    yield from against_source(folder, arm.source, arm.config)


def _lost(folder: Folder, arm: Arm) -> Iterator[Finding]:
    """What the arm's source stores beyond what the architecture asks for, such as a head that drafts tokens, is here."""
    for name, info in arm.source.tensors.items():
        module, dtype = name.rpartition(".")[0], info.dtype
        stored = name if info.part is None else info.part.whole
        here = {name, stored} & folder.tensors.keys() or module in folder.packed or (folder.tied and module == folder.head)
        if not here and dtype in FLOATING and not name.endswith(ROTARY):
            told = f"{name} is missing: the source holds it, and an engine that builds it makes it up"
            drafts = " (a head that drafts tokens: no draft is accepted)" if folder.drafts.holds(name) else ""
            yield error("W3", module, told + drafts, f"export {arm.folder} again")


def modules_of_arm(folder: Folder, layout: Layout, arm: Arm) -> tuple[int, int]:
    """(same, whole): packed modules of a folder that may be broken whose tensors are well-formed under the layout's names,
    and how many of them are to the bit what the arm exports."""
    same = whole = 0
    assert arm.selection is not None
    for group in arm.selection.groups:
        for module, own in arm.quantize(group).items():
            format = arm.selection.format_of(module)
            wanted = layout.tensors(module, own, None, format)
            found = {name: folder.get(name) for name in wanted if name in folder.tensors}
            if all(n in found and found[n].dtype == t.dtype and found[n].shape == t.shape for n, t in wanted.items()):
                whole += 1
                same += all(
                    torch.equal(bits_of(found[f"{module}.{leaf}"]), bits_of(wanted[f"{module}.{leaf}"]))
                    for leaf in _exact_leaves(layout, format)
                )
    return same, whole


def _exact_leaves(layout: Layout, format: str) -> tuple[str, ...]:
    """What no conversion changes."""
    record = FORMATS[format]
    kept = (t for t in record.tensors if t.role != INPUT_SCALE and (t.per is not None or not _converted(format)))
    return tuple(layout.leaf(format, tensor.role) for tensor in kept)


def _converted(format: str) -> bool:
    """True where a layout stores reciprocals of the format's scales: a conversion may change their last bit."""
    return any(own.reciprocal for own in FORMATS[format].layouts.values())


def _group(folder: Folder, arm: Arm, group: tuple[str, ...], other: list[str]) -> Iterator[Finding]:
    weights = {module: arm.weight(f"{module}.weight") for module in group}
    if arm.keeps(group[0]):
        expected = arm.quantize(group)
    else:
        expected = quantize_group(weights, arm.frozen_scales(group), folder.format_of(group[0]))
    for module, weight in weights.items():
        stored = folder.quantized(module)
        if stored.shape != weight.shape:
            told = f"holds {list(stored.shape)} weights, {arm.name} has {list(weight.shape)}"
            yield error("W3", module, told, f"export {arm.folder} again")
            continue
        same = _same(folder, module, expected[module])
        ratio, record = _relative_error(stored.dequantize(), weight), folder.record_of(module)
        if not ratio <= record.error_limit:
            told = f"decoded weights differ from {arm.name}'s by {ratio:.3f} of their norm, expected about {record.error}"
            if same:
                yield warning("W3", module, told + ", as its own quantization does", "keep this module in BF16")
            else:
                yield error("W3", module, told, f"export {arm.folder} again")
        elif not same:
            other.append(module)


def _same(folder: Folder, module: str, own: Quantized) -> bool:
    """The tensors of the file are what this arm's export would hold, bit for bit; a scale that was converted from the other
    layout may differ in its last bit."""
    format = folder.format_of(module)
    for place, ours, theirs in zip(FORMATS[format].tensors, own.tensors, folder.quantized(module).tensors, strict=False):
        near = place.per is None and _converted(format)
        if not (_within_one_ulp(theirs, ours) if near else torch.equal(bits_of(ours), bits_of(theirs))):
            return False
    return True


def _within_one_ulp(a: Tensor, b: Tensor) -> bool:
    """Of two positive FP32 scalars."""
    return abs(int(a.reshape(()).view(torch.int32)) - int(b.float().reshape(()).view(torch.int32))) <= 1


def _quantized_otherwise(arm: Arm, other: list[str], modules: int) -> Iterator[Finding]:
    """Where most modules are the arm's export to the bit, one that is not was damaged; where few are, another tool
    rounded, or another arm was trained further."""
    if 2 * len(other) < modules:
        for module in other:
            told = f"is not what {arm.name} exports, though {modules - len(other)} of {modules} modules are to the bit"
            yield error("W3", module, told, f"export {arm.folder} again")
    elif other:
        told = (
            f"is quantized differently from what {arm.name} exports ({len(other)} modules): another "
            "arm's export, or another tool's rules"
        )
        yield warning("W3", other[0], told, f"compare with an export of {arm.folder}")


def _input_scales(folder: Folder, arm: Arm, modules: list[str]) -> Iterator[Finding]:
    other: list[str] = []
    times: list[float] = []
    for module in modules:
        format = folder.format_of(module)
        name = f"{module}.{folder.layout.leaf(format, INPUT_SCALE)}"
        own = arm.input_scales.get(module)
        if own is None or name not in folder.tensors:
            continue
        stored = folder.layout.decode_scale(folder.get(name), format)
        if not _within_one_ulp(stored, own):
            other.append(module)
            times.append(abs(math.log2(max(float(stored), 1e-38) / float(own))))
    if 2 * len(other) < len(modules):
        for module in other:
            told = f"its input scale is not the one {arm.name} was calibrated with"
            yield error("W3", module, told, f"export {arm.folder} again")
    elif other and statistics.median(times) > 3:
        off = 2 ** statistics.median(times)
        told = f"has an input scale {off:.0f} times off that of {arm.name}, as half of {len(other)} modules"
        yield error("W3", other[0], told, "store the scale itself, amax / (6 * 448), or its reciprocal as the layout says")
    elif other:
        told = f"has another input scale than {arm.name} ({len(other)} modules): another calibration"
        yield warning("W3", other[0], told, f"compare with an export of {arm.folder}")


def _kv_scales(folder: Folder, arm: Arm) -> Iterator[Finding]:
    for name, own in arm.kv_scales.items():
        attention, _, leaf = name.rpartition(".")
        stored = folder.layout.kv_scale(attention, leaf[0])
        if stored not in folder.tensors or float(folder.get(stored).float().reshape(())) != float(own):
            told = f"{stored} is not the KV scale {arm.name} was calibrated with"
            yield error("W3", attention, told, f"export {arm.folder} again")


def _relative_error(decoded: Tensor, weight: Tensor) -> float:
    """||decoded - w|| / ||w||; 0 where both are zero."""
    difference, norm = (decoded - weight.float()).norm(), weight.float().norm()
    return float(difference / norm) if norm > 0 else float(difference)
