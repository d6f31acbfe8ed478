"""`qad check`: refuse a broken quantized checkpoint before an engine silently serves garbage.

Reads headers, scales and metadata; packed codes only where a scale is zero, whole files where a manifest
lists them. Works on anybody's folder in the ModelOpt or the compressed-tensors layout.
The rules and what each engine does with a fault are in docs/reference/rules.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from export.folder import Folder, open_folder
from export.layouts.layout import COMPRESSED_TENSORS
from export.rules import coverage, draft_heads, expert_modules, files, metadata, tensors
from export.rules.against_arm import against_arm
from export.rules.as_written import e12_as_written
from export.rules.findings import Finding, error, to_json, warning
from qad.errors import BrokenCheckpointError, UsageError

__all__ = ["Finding", "check", "looked_at", "to_json"]

ENGINES = ("all", "vllm", "trtllm")


def check(folder: Path, source: Path | None = None, tp: int = 1, engine: str = "all") -> list[Finding]:
    """All findings, errors first.

    source: the arm it was exported from. tp: planned tensor parallelism. engine: all, vllm or trtllm. Raises UsageError
    for what is no NVFP4 folder, ArtifactError where `source` is no arm.
    """
    if tp < 1 or engine not in ENGINES:
        raise UsageError(f"tp {tp}, engine {engine!r}: expected tp >= 1 and one of {', '.join(ENGINES)}")
    opened = open_folder(folder)
    findings = list(_findings(opened, tp))
    if engine == "trtllm" and opened.layout is COMPRESSED_TENSORS:
        told = "TensorRT-LLM reads the compressed-tensors layout only in part"
        findings.append(warning("E1", "config.json", told, "qad convert DIR --layout modelopt", "trtllm"))
    if source is not None and not any(f.severity == "error" for f in findings):
        findings += against_arm(opened, source)
    if not any(f.severity == "error" for f in findings):
        findings += e12_as_written(opened)
    if engine != "all":
        findings = [f for f in findings if f.engine in (engine, "all")]
    return sorted(dict.fromkeys(findings), key=lambda f: (f.severity != "error", f.rule, f.module))


def errors_of(folder: Path) -> list[Finding]:
    """The errors among them; what `check` raises."""
    return [finding for finding in check(folder) if finding.severity == "error"]


def in_one_line(errors: list[Finding]) -> str:
    """How many, and the first."""
    first, count = errors[0], len(errors)
    return f"{count} error{'s' if count > 1 else ''}, first {first.rule} {first.module}: {first.message}"


def require_sound(folder: Path) -> None:
    """Raises BrokenCheckpointError for a folder that `check` refuses."""
    if errors := errors_of(folder):
        raise BrokenCheckpointError(
            f"{folder} does not pass `qad check` ({in_one_line(errors)}): repair it first (`qad check {folder} --fix OUT`)"
        )


def looked_at(folder: Path) -> str:
    """How much a check of the folder covers, in words."""
    opened = open_folder(folder)
    modules = f"{len(opened.packed):,} quantized modules" if opened.packed else "no quantized module"
    return f"{len(opened.tensors):,} tensors in {len(opened.files)} files, {modules}"


def _findings(folder: Folder, tp: int) -> Iterator[Finding]:
    yield from files.e11_files(folder)
    yield from metadata.e1_places_agree(folder)
    yield from metadata.e1_dtype(folder)
    yield from metadata.e2_algorithm(folder)
    yield from metadata.e2_not_computed(folder)
    if (folder.algorithm is not None and folder.algorithm not in metadata.checked()) or metadata.unchecked_layers(folder):
        return
    if not folder.packed and not folder.unreadable:
        yield error("E3", "config.json", f"announces {folder.algorithm} but no module is quantized", "export the arm again")
        return
    yield from tensors.e3_modules_whole(folder)
    if not folder.unreadable:
        yield from tensors.e4_bytes(folder)
    yield from tensors.e5_dimensions(folder, tp)
    yield from tensors.e6_scale_groups(folder)
    yield from tensors.w2_absorbed(folder)
    yield from coverage.e7_exclusion(folder)
    yield from coverage.e8_excluded_modules(folder)
    yield from draft_heads.e13_draft_heads(folder)
    yield from expert_modules.e9_experts(folder)
    yield from coverage.e10_kv_scales(folder)
