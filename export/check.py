"""`qad check`: refuse a broken NVFP4 checkpoint before an engine silently serves garbage.

Reads headers, scales and metadata; packed codes only where a scale is zero. Works on anybody's ModelOpt-layout folder.
The rules and what each engine does with a fault are in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from export.findings import Finding, error, to_json
from export.folder import Folder, open_folder
from export.rules import files, metadata, tensors
from qad.arm import open_arm
from qad.nvfp4 import QuantizedTensor, dequantize

__all__ = ["Finding", "check", "to_json"]

# Gaussian weights have .094-.096 under max calibration.
_RELATIVE_ERROR = 0.15


def check(folder: Path, source: Path | None = None, tp: int = 1, engine: str = "all") -> list[Finding]:
    """All findings, errors first. `source`: the arm it was exported from. Raises UsageError for what is no NVFP4 folder."""
    opened = open_folder(folder)
    findings = list(_findings(opened, tp))
    if source is not None and not any(f.severity == "error" for f in findings):
        findings += _against_arm(opened, source)
    if engine != "all":
        findings = [f for f in findings if f.engine in (engine, "all")]
    return sorted(dict.fromkeys(findings), key=lambda f: (f.severity != "error", f.rule, f.module))


def _findings(folder: Folder, tp: int) -> Iterator[Finding]:
    yield from files.e11_files(folder)
    yield from metadata.e1_places_agree(folder)
    yield from metadata.e2_algorithm(folder)
    if folder.algorithm is not None and folder.algorithm not in metadata.CHECKED:
        return
    if not folder.packed and not folder.unreadable:
        yield error("E3", "config.json", "announces NVFP4 but no module is packed", "export the arm again")
        return
    yield from tensors.e3_modules_whole(folder)
    if not folder.unreadable:
        yield from tensors.e4_bytes(folder)
    yield from tensors.e5_dimensions(folder, tp)
    yield from tensors.e6_scale_groups(folder)
    yield from metadata.e7_exclusion(folder)
    yield from metadata.e8_excluded_modules(folder)
    yield from tensors.e9_experts(folder)
    yield from metadata.e10_kv_scales(folder)


def _against_arm(folder: Folder, source: Path) -> Iterator[Finding]:
    """W3: decoded weights against the arm's own."""
    arm = open_arm(source)
    for module in folder.packed:
        weight = arm.weight(f"{module}.weight").float()
        q = QuantizedTensor(*(folder.get(f"{module}.{leaf}") for leaf in ("weight", "weight_scale", "weight_scale_2")))
        error_ratio = float((dequantize(q) - weight).norm() / weight.norm().clamp(min=1e-30))
        if not error_ratio <= _RELATIVE_ERROR:
            yield error("W3", module, f"decoded weights differ from {arm.name}'s by {error_ratio:.3f} of their norm, expected "
                        "about 0.095", f"export {source} again")  # fmt: skip
