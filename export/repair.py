"""`qad check --fix`: a repaired copy, where nothing that was trained is touched.

What is repaired follows from the tensors alone: metadata (algorithm, exclude list, config groups, nested keys), the index,
stale files, NaN or negative scales over blocks whose codes are all zero, buffers that leaked. What would need quantizing
again is taken from the arm the folder was exported from, never from the BF16 original: that would undo the training.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from export.check import errors_of, in_one_line
from export.convert import REWRITTEN, excluded_names, folder_digest, in_model_order, require_computed
from export.files.json_files import read_json
from export.files.safetensors_writer import write_file
from export.folder import Folder, open_folder
from export.layouts.config_files import CONFIG, INDEX, NESTED, quantization_blocks, write_index, write_json
from export.layouts.layout import LAYOUTS, Layout
from export.layouts.scheme import Scheme
from export.rules.against_arm import modules_of_arm
from export.rules.findings import Finding
from export.writer import KIND, export_arm, require_room
from qad.arms.arm import open_arm
from qad.arms.kv_cache import CAST
from qad.arms.origin import origin_of
from qad.artifact import MANIFEST, open_artifact, run_stage
from qad.errors import BrokenCheckpointError, UsageError
from qad.model.beside import beside
from qad.numerics.formats import BLOCK_SCALE, CODES, FORMATS, GLOBAL_SCALE, KV_FORMATS, MIXED, NVFP4, algorithm_of
from qad.place import require_apart
from qad.untrusted import mapping

_ONE = 0x38  # 1.0 in E4M3: what the weight rule stores for an all-zero block


@dataclasses.dataclass(frozen=True)
class _Plan:
    """done: what is said about it. block_scales: tensors with bytes to replace. dropped: tensors left out. config, nested:
    written in place of the folder's (None: the folder has none). index: the index is written anew."""

    folder: Folder
    done: list[str]
    block_scales: dict[str, Callable[[], Tensor]]
    dropped: set[str]
    config: dict[str, object]
    nested: dict[str, object] | None
    index: bool


def repair(folder: Path, out: Path, source: Path | None = None) -> list[str]:
    """Write a repaired copy of `folder` to `out`; returns what was done, empty where there was nothing to repair and
    nothing was written.

    source: the arm it was exported from, for what needs quantizing again. Raises BrokenCheckpointError where errors would
    remain, UsageError where `source` is not the arm the folder came from or the folder asks for more than is computed here,
    StorageError when writing fails.
    """
    require_apart(out, {"checkpoint": folder, **({"arm": source} if source else {})})
    if source is not None:
        _require_arm(source)
    errors = errors_of(folder)
    if not errors:
        return []
    plan = _plan(folder, errors)
    try:
        if plan.done:
            inputs, config = {"checkpoint": folder_digest(folder)}, {"repaired": plan.done}
            cast = {"kv_cache": CAST} if plan.folder.casts_kv_cache else {}  # what tells it from a loss of scales
            origin = origin_of(folder)
            run_stage(KIND, out, {**config, **cast}, inputs, lambda partial: _write(plan, partial), origin=origin)
            return plan.done
        raise BrokenCheckpointError(_remaining(folder, errors))
    except BrokenCheckpointError:
        shutil.rmtree(out.with_name(out.name + ".partial"), ignore_errors=True)
        if source is None:
            raise
    return _quantize_again(plan.folder, source, out)


def _remaining(folder: Path, errors: list[Finding]) -> str:
    return (
        f"{folder}: {in_one_line(errors)}. That cannot be repaired without quantizing again or copying files anew: export or "
        "copy it again with what made it; of this tool's own exports --source ARM_DIR, the arm, is enough"
    )


# --- the plan ---


def _plan(path: Path, errors: list[Finding]) -> _Plan:
    folder = open_folder(path)
    require_computed(folder, "repaired")
    done: list[str] = []
    stale = _stale_files(folder)
    if stale:
        done.append(f"left out {', '.join(stale)}: not in the index, and every tensor of it lies in a listed file")
        folder = open_folder(path, skip=stale)
    layout = _layout_of_tensors(folder)
    block_scales = dict(_block_scales(folder, layout, done)) if layout else {}
    dropped = _leaked(folder, layout, done) if layout else set()
    config, nested = folder.config, folder.nested
    if layout and {finding.rule for finding in errors} & {"E1", "E2", "E7"}:
        config, nested = _metadata(folder, layout, done)
    index = (len(folder.files) > 1 or folder.index is not None) and not _index_is_right(folder, dropped)
    if index:
        done.append(f"wrote {INDEX} anew from the files' headers")
    return _Plan(folder, done, block_scales, dropped, config, nested, index)


def _stale_files(folder: Folder) -> list[str]:
    """Files that the index does not list and that hold nothing of their own."""
    weight_map = mapping((folder.index or {}).get("weight_map"))
    listed = {str(file) for file in weight_map.values()}
    if not listed or not listed <= {*folder.files}:
        return []
    held = {file: header.tensors.keys() for file, header in folder.headers.items()}
    return [file for file in folder.files if file not in listed and held.get(file, set()) <= weight_map.keys()]


def _layout_of_tensors(folder: Folder) -> Layout | None:
    """The layout whose names all global scales have, where layouts share them the one whose scalars have that shape, whatever
    the metadata says; None where it is none or both."""
    found = folder.named_layouts
    if not found and folder.packed:
        names = {layout.leaf(format, GLOBAL_SCALE) for layout in LAYOUTS.values() for format in FORMATS}
        scalars = (folder.entry(f"{module}.{leaf}") for module in folder.packed for leaf in names)
        shapes = {entry.shape for entry in scalars if entry is not None}
        found = [layout for layout in LAYOUTS.values() if shapes == {layout.scalar}]
    return found[0] if len(found) == 1 else None


def _block_scales(folder: Folder, layout: Layout, done: list[str]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for module in folder.packed:
        packed, name = (f"{module}.{layout.leaf(NVFP4, role)}" for role in (CODES, BLOCK_SCALE))
        scale, codes = folder.entry(name), folder.entry(packed)
        if scale is None or codes is None or scale.dtype != "F8_E4M3" or codes.dtype != "U8" or len(codes.shape) != 2:
            continue
        if scale.shape != (codes.shape[0], codes.shape[1] // 8):
            continue
        bad = _bad_over_zeros(folder, name, packed)
        if bad.any():
            done.append(f"{module}: {int(bad.sum())} block scales that were NaN or negative over all-zero codes became 1.0")
            yield name, functools.partial(_with_ones, folder, name, bad)


def _bad_over_zeros(folder: Folder, scale: str, codes: str) -> Tensor:
    stored = folder.get(scale).view(torch.uint8)
    bad = ((stored & 0x7F) == 0x7F) | (stored > 0x80)
    if not bad.any():
        return bad
    zero = ~((folder.get(codes).view(stored.shape[0], -1, 8) & 0x77) != 0).any(-1)
    return bad & zero


def _with_ones(folder: Folder, name: str, where: Tensor) -> Tensor:
    scale = folder.get(name)
    return torch.where(where, torch.tensor(_ONE, dtype=torch.uint8), scale.view(torch.uint8)).view(scale.dtype)


def _leaked(folder: Folder, layout: Layout, done: list[str]) -> set[str]:
    """Private buffers of a calibrator beside a packed weight, such as `_amax`; no engine reads them."""
    packed = set(folder.packed)
    parts = ((name, *name.rpartition(".")[::2]) for name in folder.tensors)
    dropped = {name for name, module, leaf in parts if module in packed and leaf.startswith("_")}
    if dropped:
        done.append(f"left out {len(dropped)} buffers that leaked, such as {sorted(dropped)[0]}")
    return dropped


def _index_is_right(folder: Folder, dropped: set[str]) -> bool:
    index = folder.index or {}
    expected = {name: file for name, (file, _) in folder.tensors.items() if name not in dropped}
    total = sum(entry.bytes for name, (_, entry) in folder.tensors.items() if name not in dropped)
    return index.get("weight_map") == expected and mapping(index.get("metadata")).get("total_size", total) == total


def _metadata(folder: Folder, layout: Layout, done: list[str]) -> tuple[dict[str, object], dict[str, object] | None]:
    """Both places from the tensors; keys that say nothing about the scheme stay as they are."""
    layers = _formats(folder, layout)
    if layers is None:
        return folder.config, folder.nested  # a calibration is missing
    kv_cache = folder.announced.kv_cache if folder.announced.kv_cache in KV_FORMATS else None
    scheme = Scheme(algorithm_of(layers.values()), excluded_names(folder), kv_cache, layers)
    outer, nested = quantization_blocks(layout, scheme)
    before = folder.announced.outer or {}
    kept = {key: value for key, value in before.items() if key not in ("kv_cache_scheme", "group_size", "quantized_layers")}
    merged = {**kept, **outer, **({"producer": kept["producer"]} if "producer" in kept else {})}
    done += _differences("quantization_config", before, merged)
    if nested is not None:
        old = folder.nested or {}
        done += _differences(NESTED, folder.announced.inner, mapping(nested["quantization"]))
        nested = {**nested, **{key: value for key, value in old.items() if key != "quantization"}}
    elif folder.nested is not None:
        done.append(f"left out {NESTED}, which belongs to another layout")
    return {**folder.config, "quantization_config": merged}, nested


def _formats(folder: Folder, layout: Layout) -> dict[str, str] | None:
    """Module -> format, by the tensors. None where of modules with weights stored alike some have an input scale and others
    not, unless the metadata say so of each: else neither W4A4 nor W4A16 is known to be what was meant."""
    found = {module: folder.format_in(module, layout) for module in in_model_order(folder)}
    said = {module: folder.announced_format(module) for module in found} if folder.algorithm == MIXED else {}
    present = {*found.values()}
    unsure = {f for f in present if any(o != f and FORMATS[o].stores_alike(FORMATS[f]) for o in present)}
    if any(said.get(module) != format for module, format in found.items() if format in unsure):
        return None
    return found


def _differences(place: str, before: dict[str, object], after: dict[str, object]) -> list[str]:
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) or (key in before) != (key in after)]
    return [f"{place}: {key} {_short(before.get(key))} -> {_short(after.get(key))}" for key in keys]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- writing ---


def _write(plan: _Plan, partial: Path) -> None:
    folder = plan.folder
    require_room(partial, sum(entry.bytes for _, entry in folder.tensors.values()))
    for file in folder.files:
        names = [name for name, (where, _) in folder.tensors.items() if where == file]
        if plan.dropped.isdisjoint(names) and not {*plan.block_scales} & {*names}:
            shutil.copyfile(folder.path / file, partial / file)
        else:
            _rewrite(plan, file, [name for name in names if name not in plan.dropped], partial)
    kept = {name: file for name, (file, _) in folder.tensors.items() if name not in plan.dropped}
    if plan.index:
        write_index(partial, kept, sum(folder.tensors[name][1].bytes for name in kept))
    elif folder.index is not None:
        shutil.copyfile(folder.path / INDEX, partial / INDEX)
    write_json(partial / CONFIG, plan.config)
    if plan.nested is not None:
        write_json(partial / NESTED, plan.nested)
    beside(folder.path, REWRITTEN).copy(partial)
    errors = errors_of(partial)
    if folder.casts_kv_cache:  # the manifest, which says so, is written last
        errors = [finding for finding in errors if (finding.rule, finding.module) != ("E10", CONFIG)]
    if errors:
        raise BrokenCheckpointError(_remaining(folder.path, errors))


def _rewrite(plan: _Plan, file: str, names: list[str], partial: Path) -> None:
    make = plan.block_scales
    tensors = ((name, make[name]() if name in make else plan.folder.get(name)) for name in names)
    entries = [plan.folder.tensors[name][1] for name in names]
    write_file(partial / file, entries, tensors, metadata=plan.folder.headers[file].metadata)


# --- from the arm ---


def _require_arm(source: Path) -> None:
    if not (source / MANIFEST).is_file() and (source / CONFIG).is_file():
        raise UsageError(
            f"{source} is a model, not an arm: quantizing an original again would undo what was trained. Give the arm folder "
            "the checkpoint was exported from (RUN/arms/NAME)"
        )
    if open_arm(source).selection is None:
        raise UsageError(
            f"{source} is the BF16 arm: quantizing the original again would undo what was trained. Give the arm "
            "the checkpoint was exported from"
        )


def _quantize_again(folder: Folder, source: Path, out: Path) -> list[str]:
    """Export the arm again, once what is whole in the folder shows that it came from it."""
    layout = _layout_of_tensors(folder) or folder.layout
    recorded = mapping(mapping(read_json(folder.path / MANIFEST)).get("inputs")).get("arm")
    if recorded == open_artifact(source).digest:
        evidence = f"its {MANIFEST} names this arm"
    else:
        same, whole = modules_of_arm(folder, layout, open_arm(source))
        evidence = f"{same} of {whole} whole modules are what this arm exports"
        if 2 * same <= whole:
            raise UsageError(
                f"{source} is not known to be the arm {folder.path} was exported from ({evidence}): another one's "
                "weights would undo what was trained; `qad export` the right one"
            )
    export_arm(source, out, layout=layout.name)
    return [f"exported {source} again, as some modules needed quantizing or copying: {evidence}"]
