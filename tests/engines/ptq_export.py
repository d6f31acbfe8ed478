"""A checkpoint from a source folder in one call, calibrated on random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from export.writer import export_arm
from qad.arms.arm import write_arm
from qad.arms.kv_cache import OFF
from qad.arms.selection import select
from qad.artifact import run_stage
from qad.model.loader import load_model, load_skeleton
from qad.model.source import open_checkpoint
from qad.text.windows import Windows
from qad.training.calibrate import calibrate


def export_ptq(
    source: Path, out: Path, format: str, *, kv_cache: str = OFF, formats: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """`out`, in ModelOpt's layout; the arm lies beside it. formats: pattern -> format of modules that have another."""
    checkpoint = open_checkpoint(source)
    selection = select(load_skeleton(checkpoint), format, formats=formats)
    ids = torch.randint(0, 512, (8, 32), generator=torch.Generator().manual_seed(5))
    windows = Windows.of(ids, torch.arange(ids.shape[1]).expand(ids.shape).contiguous())
    found = calibrate(load_model(checkpoint, "float32", "cpu"), selection, windows, kv_cache=kv_cache)
    arm = out.with_name(f"{out.name}_arm")
    run_stage(
        "arm",
        arm,
        {},
        {},
        lambda folder: write_arm(
            folder, "ptq", checkpoint, selection, found.input_scales, kv_scales=found.kv_scales, kv_cache=kv_cache
        ),
    )
    return export_arm(arm, out).path
