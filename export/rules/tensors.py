"""E3, E4, E5, E6, W1, W2: shapes, dtypes, bytes and scale groups of the quantized modules."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from export.folder import Folder
from export.layouts.layout import LAYOUTS
from export.rules.findings import Finding, error, warning
from qad.model.families import experts_of
from qad.numerics.finite import amax
from qad.numerics.formats import BLOCK_SCALE, CODES, FORMATS, GLOBAL_SCALE, INPUT_SCALE

_AGAIN = "export the arm again"


# A global scale above this decodes to weights beyond FP16's range, which no model has: its reciprocal was stored.
_LARGEST_WEIGHT = 65504.0
_LARGEST_INPUT = 1e7  # models have reached some 1e5
_MODULES = 8  # whose input scales are not equal by chance


def e3_modules_whole(folder: Folder) -> Iterator[Finding]:
    """A quantized Linear has exactly the tensors of its format's record, under the names of its layout."""
    for module in folder.packed:
        record, leaf = folder.record_of(module), folder.leaves_of(module)[0]
        codes = folder.entry(f"{module}.{leaf}")
        if codes is None:
            yield error("E3", module, f"has scales but no {leaf}", _AGAIN)
        elif codes.dtype != record.tensors[0].dtype or len(codes.shape) != 2:
            found, wanted = f"{codes.dtype} {list(codes.shape)}", record.tensors[0].words
            told = f"{leaf} is {found} beside its scales, expected {wanted}"
            yield error("E3", module, told, "remove the scales and exclude the module, or " + _AGAIN)
        elif 0 in codes.shape:
            yield error("E3", module, f"{leaf} is empty ({list(codes.shape)})", _AGAIN)
        else:
            yield from _shapes(folder, module, codes.shape[0], codes.shape[1] * (record.tensors[0].per or 1))
        for name in folder.layout.scalars_of(record.name):
            yield from _scalar(folder, module, name)
        inputs = folder.layout.leaf(record.name, INPUT_SCALE)
        if not record.quantizes_inputs and folder.entry(f"{module}.{inputs}"):
            other = next((f.name for f in FORMATS.values() if f.stores_alike(record) and f.quantizes_inputs), "")
            yield error("E3", module, f"has {inputs}, but {record.name} leaves activations alone", f"remove it, or set {other}")
        yield from _unknown(folder, module)
    yield from _calibrated(folder)


def _calibrated(folder: Folder) -> Iterator[Finding]:
    """Input scales that were measured: unlike each other, and of inputs that BF16 models have."""
    found: dict[str, float] = {}
    for module in folder.packed:
        record = folder.record_of(module)
        name = f"{module}.{folder.layout.leaf(record.name, INPUT_SCALE)}"
        entry = folder.tensors.get(name)
        if record.quantizes_inputs and entry is not None and math.prod(entry[1].shape) == 1 and entry[1].dtype == "F32":
            found[name] = float(folder.layout.decode_scale(folder.scalar(name), record.name).reshape(())) * record.largest
    if len(found) >= _MODULES and len(set(found.values())) == 1:
        told = f"input scales of all {len(found)} modules are one number: nothing was calibrated"
        yield warning("E3", next(iter(found)), told, "calibrate, unless one scale for all was meant")
    huge = [name for name, amax in found.items() if amax > _LARGEST_INPUT]
    if huge:
        told = f"stands for inputs up to {found[huge[0]]:.3g} ({len(huge)} modules), which no model has"
        yield warning("E3", huge[0], told, "calibrate again; a reciprocal may have been stored")


def _shapes(folder: Folder, module: str, n: int, k: int) -> Iterator[Finding]:
    """[n, k], as the codes have it, is what the architecture asks for, and what the block scales have."""
    expected = folder.skeleton.linears if folder.skeleton else {}
    if module in expected and tuple(expected[module]) != (n, k):
        yield error("E3", module, f"holds {n} x {k} weights, config.json asks for {list(expected[module])}", _AGAIN)
    record = folder.record_of(module)
    block = record.stored(BLOCK_SCALE)
    if block is None:
        return
    leaf = folder.layout.leaf(record.name, BLOCK_SCALE)
    scale = folder.entry(f"{module}.{leaf}")
    if scale is None:
        yield error("E3", module, f"lacks {leaf}: the engine stops or reads uninitialised memory", _AGAIN)
    elif scale.dtype != block.dtype:
        told = f"{leaf} is {scale.dtype}, expected {block.dtype}: vLLM casts it and serves garbage"
        yield error("E3", module, told, _AGAIN)
    elif scale.shape != block.shape(n, k):
        yield error("E3", module, f"{leaf} is {list(scale.shape)}, expected {list(block.shape(n, k))}", _AGAIN)


def _scalar(folder: Folder, module: str, leaf: str) -> Iterator[Finding]:
    entry = folder.entry(f"{module}.{leaf}")
    if entry is None:
        yield error("E3", module, f"lacks {leaf}: vLLM does not notice and serves garbage or NaN", _AGAIN)
        return
    if entry.dtype != "F32" or math.prod(entry.shape) != 1 or len(entry.shape) > 1:
        yield error("E3", module, f"{leaf} is {entry.dtype} {list(entry.shape)}, expected an F32 scalar", _AGAIN)
        return
    stored = folder.scalar(f"{module}.{leaf}")
    record = folder.record_of(module)
    value, scale = float(stored.reshape(())), float(folder.layout.decode_scale(stored, record.name))
    tiny = torch.finfo(torch.float32).tiny
    if not (math.isfinite(value) and value >= tiny and math.isfinite(scale) and scale >= tiny):
        yield error("E3", module, f"{leaf} is {value}: it must be a normal positive number", _AGAIN)
    elif leaf == folder.layout.leaf(record.name, GLOBAL_SCALE) and scale >= 1:
        largest = scale * record.largest
        told = f"{leaf} is {value:g}, so that weights reach {largest:g}: the reciprocal was stored"
        if largest > _LARGEST_WEIGHT:
            reciprocal = folder.layout.of(record.name).reciprocal
            yield error("E3", module, told, "store " + ("1 / scale" if reciprocal else "the scale itself"))
        else:
            yield warning("E3", module, told + ", or weights are very large", "compare with the source's weights")


def _unknown(folder: Folder, module: str) -> Iterator[Finding]:
    known = {*folder.layout.of(folder.format_of(module)).leaves.values(), "bias", "k_scale", "v_scale"}
    for leaf in folder.leaves.get(module, ()):
        if leaf not in known:
            names = ((layout.name, layout.leaves_of(format)) for layout in LAYOUTS.values() for format in FORMATS)
            other = next((name for name, leaves in names if leaf in leaves), None)
            why = f"belongs to the {other} layout" if other else "is an internal buffer that leaked"
            yield error("E3", module, f"has an unknown tensor {leaf}, which {why}", "remove it, or " + _AGAIN)


def e4_bytes(folder: Folder) -> Iterator[Finding]:
    """No NaN and no negative weight scale; a zero scale over non-zero codes loses weights. No NaN or Inf elsewhere."""
    for module in folder.packed:
        yield from _nan_values(folder, module)
        yield from _block_scales(folder, module)
    for name, (_, entry) in folder.tensors.items():
        checked = entry.dtype in ("BF16", "F16") or (entry.dtype == "F32" and len(entry.shape) > 0)
        if checked and entry.bytes and not torch.isfinite(amax(folder.get(name))):
            remedy = "the source is damaged: start again from it"
            yield error("E4", name.rpartition(".")[0], f"{name} holds NaN or Inf", remedy)


def _nan_values(folder: Folder, module: str) -> Iterator[Finding]:
    name = f"{module}.{folder.leaves_of(module)[0]}"
    weight = folder.entry(name)
    if weight is not None and weight.dtype == folder.record_of(module).tensors[0].dtype == "F8_E4M3" and weight.bytes:
        nan = (folder.get(name).view(torch.uint8) & 0x7F) == 0x7F
        if nan.any():
            yield error("E4", module, f"{int(nan.sum())} FP8 weights are NaN", _AGAIN)


def _block_scales(folder: Folder, module: str) -> Iterator[Finding]:
    """Bytes of E4M3 block scales, over 4-bit codes."""
    record, layout = folder.record_of(module), folder.layout
    names = [f"{module}.{layout.leaf(record.name, role)}" for role in (BLOCK_SCALE, CODES)]
    scale, weight = (folder.entry(name) for name in names)
    if scale is None or weight is None or scale.dtype != "F8_E4M3" or weight.dtype != "U8" or len(weight.shape) != 2:
        return
    if _all_positive_and_finite(folder, names[0]):
        return
    values = folder.get(names[0]).view(torch.uint8)
    nan, zero = (values & 0x7F) == 0x7F, (values & 0x7F) == 0
    negative = (values > 0x80) & ~nan
    if nan.any():
        yield error("E4", module, f"{int(nan.sum())} block scales are NaN: the model emits one token", _AGAIN)
    if negative.any():
        yield error("E4", module, f"{int(negative.sum())} block scales are negative", _AGAIN)
    if zero.any() and zero.shape == (weight.shape[0], weight.shape[1] // 8):
        codes = folder.get(names[1]).view(weight.shape[0], -1, 8)
        lost = zero & ((codes & 0x77) != 0).any(-1)
        if lost.any():
            yield error("E4", module, f"{int(lost.sum())} block scales are zero over non-zero codes", _AGAIN)
        else:
            told = f"{int(zero.sum())} block scales are zero (over zero codes: harmless)"
            yield warning("E4", module, told, "none needed")


def e5_dimensions(folder: Folder, tp: int) -> Iterator[Finding]:
    """K divisible by 16, also after tensor parallelism; W1: what kernels pad."""
    for module in folder.packed:
        shape = folder.shape_of(module)
        if shape is None:
            continue
        n, k = shape
        row = folder.family.is_row_parallel(module)
        if k % 16 or (row and k % (16 * tp)):
            yield error("E5", module, f"K {k} is not divisible by 16 x {tp if row else 1}", "exclude it, or plan another tp")
        if not row and n % tp:
            yield error("E5", module, f"N {n} is not divisible by tp {tp}", "plan another tp")
        shard_n, shard_k = (n, k // tp) if row else (n // tp, k)
        if folder.record_of(module).block and (shard_n % 32 or shard_k % 32):
            told = f"N {shard_n} or K {shard_k} of a shard is not a multiple of 32: some kernels refuse or pad"
            yield warning("W1", module, told, "none needed")


def e6_scale_groups(folder: Folder) -> Iterator[Finding]:
    """Members of a fused group carry bit-equal global and input scales, and are quantized all or none."""
    packed = set(folder.packed)
    for group in folder.family.scale_groups([*folder.packed, *folder.linears]):
        missing = [name for name in group if name not in packed]
        if missing and len(missing) < len(group):
            for name in missing:
                yield error(
                    "E6", name, f"is BF16 while {next(m for m in group if m in packed)} is packed: engines fuse them", _AGAIN
                )
            continue
        if len(group) < 2:
            continue
        formats = {name: folder.format_of(name) for name in group if name in packed}
        if len(set(formats.values())) > 1:
            told = ", ".join(f"{name} is {format}" for name, format in formats.items())
            yield error("E6", ", ".join(formats), f"{told}: engines fuse them, vLLM refuses", _AGAIN)
            continue
        if not formats:
            continue
        record = FORMATS[next(iter(formats.values()))]
        again = None if record.block else folder.layout.leaf(record.name, GLOBAL_SCALE)  # engines quantize with the largest
        for leaf in folder.layout.scalars_of(record.name):
            stored = {name: folder.scalar(f"{name}.{leaf}") for name in group if folder.entry(f"{name}.{leaf}")}
            bits = {name: tuple(scale.reshape(-1).view(torch.uint8).tolist()) for name, scale in stored.items()}
            if len(set(bits.values())) > 1 and leaf == again:
                told = f"{record.name} {leaf} differs in a fused group: engines quantize members again with the largest"
                yield warning("E6", ", ".join(bits), told, "export with one scale for the group")
            elif len(set(bits.values())) > 1:
                told = (
                    f"{leaf} differs within a fused group: TensorRT-LLM refuses, vLLM takes the "
                    "largest and serves the others wrong"
                )
                yield error("E6", ", ".join(bits), told, _AGAIN)
    yield from _w2(folder)


def w2_absorbed(folder: Folder) -> Iterator[Finding]:
    """Inputs of what engines absorb into attention are not quantized, nor experts that no engine serves quantized."""
    experts = next((module for module in folder.packed if experts_of(module)), None)
    if experts and folder.family.unserved:
        yield warning("W2", experts, f"is quantized, but {folder.family.unserved}", "exclude *.experts.*", "vllm")
    for module in folder.packed:
        reason = folder.family.weights_alone.get(module.rpartition(".")[2])
        if reason and folder.record_of(module).quantizes_inputs:
            yield warning("W2", module, f"its inputs are quantized, but {reason}", "give it W4A16_NVFP4, or leave it BF16")


def _w2(folder: Folder) -> Iterator[Finding]:
    for group in folder.family.scale_groups(module for module in folder.packed if folder.record_of(module).block):
        names = [f"{m}.{folder.layout.leaf(folder.format_of(m), BLOCK_SCALE)}" for m in group]
        entries = [folder.entry(name) for name in names]
        if all(e is not None and e.dtype == "F8_E4M3" and e.bytes for e in entries):
            byte = max(_largest_magnitude(folder, name) for name in names)
            largest = float(torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
            if largest < 128 and largest != 1.0:  # 1.0: an all-zero group
                found = f"largest block scale of the group is {largest:g}, far below 448: precision is lost"
                yield warning("W2", group[0], found, "quantize with the group's own global scale")


def _all_positive_and_finite(folder: Folder, block_scale: str) -> bool:
    """Of E4M3 bytes; true of an empty tensor."""
    entry = folder.entry(block_scale)
    if entry is None or not entry.bytes:
        return True
    smallest, largest = folder.byte_range(block_scale)
    return smallest > 0 and largest < 0x7F


def _largest_magnitude(folder: Folder, block_scale: str) -> int:
    """The byte of the largest E4M3 magnitude, without its sign."""
    if _all_positive_and_finite(folder, block_scale):
        return folder.byte_range(block_scale)[1]
    return int((folder.get(block_scale).view(torch.uint8) & 0x7F).max())


def missing_siblings(folder: Folder) -> Iterator[Finding]:
    """E11 without a skeleton: a member of q/k/v or gate/up that is nowhere while its siblings are there. A layer that
    has q_proj alone (latent attention) is another architecture."""
    present = {*folder.packed, *folder.linears}
    for group in folder.family.scale_groups(present):
        siblings = folder.family.siblings_of(group[0])
        part = 1 < len(group) < len(siblings) and not folder.family.is_whole(group)
        if part or (len(group) == 1 and group[0].endswith(("gate_proj", ".w1", ".w3"))):
            for absent in sorted({*siblings} - {*group}):
                yield error("E11", absent, f"is missing while {group[0]} is there", _AGAIN)
