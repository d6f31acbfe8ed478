"""The PTQ arm by ModelOpt itself (`quantize.by: modelopt`): its calibration and its export, on our model, text and selection.

What it exports is kept to the byte in an arm (export.arm_of_folder), which is exported, checked and measured like any other. The
one module that imports nvidia-modelopt.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from export.arm_of_folder import arm_of_folder
from qad.arms.arm import DYNAMIC
from qad.arms.kv_cache import CAST, OFF
from qad.artifact import Artifact, run_stage
from qad.errors import UsageError
from qad.model.families import experts_of
from qad.model.loader import load_model, load_skeleton
from qad.model.names import names_of
from qad.numerics.formats import FORMATS
from qad.progress import Progress
from qad.recipes.job import Job

_BLOCKS = {-1: 16, "scale_bits": (4, 3)}
_NVFP4 = {"num_bits": (2, 1), "block_sizes": {**_BLOCKS, "type": "dynamic"}}
_FP8 = {"num_bits": (4, 3), "axis": None}
_ALGORITHM: dict[str, Any] = {
    "dynamic": "max",
    "mse": {"method": "mse", "fp8_scale_sweep": True},
    "four_over_six": {
        "method": "mse",
        "fp8_scale_sweep": False,
        "start_multiplier": 1.0,
        "stop_multiplier": 1.5,
        "step_size": 0.5,
    },
}


def modelopt_arm(job: Job, settings: dict[str, Any], exported: Path, out: Path, replace: bool = False) -> Artifact:
    """Write the PTQ arm to `out`. exported: where ModelOpt's own folder is kept, and reused. settings: of the arm, for its key.

    Raises UsageError where ModelOpt is not installed, or where its codes would be trained from; BrokenCheckpointError where `qad
    check` refuses what it exported.
    """
    if job.recipe.train:
        raise UsageError("quantize.by modelopt keeps its codes, from which nothing is trained: leave train out, or by")
    return arm_of_folder(_exported(job, settings, exported), str(job.source.folder), "ptq", out, replace)


def quantization(job: Job) -> dict[str, Any]:
    """ModelOpt's configuration that says the same as the job's section `quantize`: every selected module by name."""
    section, names = job.recipe.quantize, names_of(load_skeleton(job.source))
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    told = set()
    for module in job.selection.modules:
        layer = experts_of(module)
        inner = names.inner(layer or module)
        if inner in told:
            continue
        told.add(inner)
        format = FORMATS[job.selection.format_of(module)]
        within = "*" if layer else "."
        weights, inputs = (_weights(section.scales), _NVFP4) if format.nvfp4_weights else (_FP8, _FP8)
        entries.append({"quantizer_name": f"{inner}{within}weight_quantizer*", "cfg": weights})
        if format.quantizes_inputs:
            entries.append({"quantizer_name": f"{inner}{within}input_quantizer*", "cfg": inputs})
    if section.kv_cache != OFF:
        cast = {"use_constant_amax": True} if section.kv_cache == CAST else {}
        cache = {**(_FP8 if section.kv_format == "FP8" else _NVFP4), **cast}
        entries.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": cache})
    return {"quant_cfg": entries, "algorithm": _ALGORITHM[section.scales]}


def _weights(scales: str) -> dict[str, Any]:
    if scales == DYNAMIC:
        return _NVFP4
    over = {"four_over_six": True} if scales == "four_over_six" else {}
    return {"num_bits": (2, 1), "block_sizes": {**_BLOCKS, "type": "static", **over}}


def _exported(job: Job, settings: dict[str, Any], out: Path) -> Path:
    try:
        version = importlib.metadata.version("nvidia-modelopt")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("quantize.by modelopt needs it: pip install nvidia-modelopt==0.47.0") from None
    if job.recipe.quantize.scales != DYNAMIC and importlib.util.find_spec("triton") is None:
        raise UsageError(
            f"quantize.by modelopt: ModelOpt needs triton for {job.recipe.quantize.scales} scales (a GPU machine has it); set "
            "quantize.scales to dynamic, or leave by out"
        )
    windows = job.calibration_windows()
    config = {**settings, **job.compute, "modelopt": version}
    if job.recipe.quantize.kv_cache == CAST:  # as in an export of our own: nothing else tells it from scales that are lost
        config["kv_cache"] = CAST
    inputs = {"source": job.source.digest} | ({"text": windows.digest} if windows else {})

    def work(folder: Path) -> None:
        _make(job, folder)

    return run_stage("modelopt", out, config, inputs, work, replace=True).path


def _make(job: Job, folder: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model, windows = load_model(job.source, "bfloat16", job.device), job.calibration_windows()

    def forward(quantized: Any) -> None:
        if windows is None:
            return
        with torch.no_grad(), Progress("modelopt", windows.tokens, "tok") as bar:
            for batch in windows.batches(8):
                quantized(**batch.model_inputs(job.device))
                bar.update(batch.tokens)

    with _quiet():
        mtq.quantize(model, quantization(job), forward)
        export_hf_checkpoint(model, export_dir=folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt prints what it inserted, module by module, and warns of its own code."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
