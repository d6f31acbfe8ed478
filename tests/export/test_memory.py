"""Peak memory of an export, measured in a process of its own: it does not grow with the source."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BuildArm = Callable[..., Path]
_HIDDEN, _INTERMEDIATE = 256, 1024
_LARGEST_GROUP = 2 * _INTERMEDIATE * _HIDDEN * 2  # bytes of gate_proj and up_proj in BF16
_CONSTANT = 8_000_000  # what the allocator keeps, and the 64 Ki weights that are quantized at a time

_MEASURE = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from export.writer import export_arm
import qad.numerics.nvfp4
qad.numerics.nvfp4._CHUNK = 1 << 12
def peak():  # of this process alone: getrusage's would hold that of the one that started it
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
peaks = []
for arm in sys.argv[1:]:
    export_arm(Path(arm), Path(arm + "-out"))
    peaks.append(peak())
print(json.dumps(peaks))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads Linux's own count of peak memory")
@pytest.mark.parametrize("format", ["W4A16_NVFP4"])
def test_peak_memory_stays_below_two_scale_groups(
    make_llama: Callable[..., Path], build_arm: BuildArm, tmp_path: Path, format: str
) -> None:
    sizes = {"hidden_size": _HIDDEN, "intermediate_size": _INTERMEDIATE}
    arms = []
    for layers in (1, 24):
        source = make_llama(tmp_path / f"source-{layers}", num_hidden_layers=layers, **sizes)
        arms.append(build_arm(source, tmp_path / f"arm-{layers}", format))
    assert (tmp_path / "source-24" / "model.safetensors").stat().st_size > 20 * _LARGEST_GROUP
    done = subprocess.run([sys.executable, "-c", _MEASURE, *map(str, arms)], capture_output=True, text=True, check=True)
    small, large = json.loads(done.stdout)
    assert large - small < 2 * _LARGEST_GROUP + _CONSTANT
