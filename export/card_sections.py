"""Of a model card: how the folder is served, on what, and how it was made, step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Any

import yaml

from export.layouts.layout import MODELOPT, Layout
from qad.arms.arm import BLOCKWISE, GPTQ, KEPT, Arm
from qad.arms.origin import origin_of
from qad.artifact import open_artifact
from qad.numerics.formats import FORMATS
from qad.untrusted import mapping, markdown_text
from qad.version import __version__

SERVE = "\n## Serve\n"
_SECTIONS = ("quantize", "calibrate", "train")


def serve_section(layout: Layout, formats: Collection[str], config: Mapping[str, object], kv_format: str | None) -> str:
    """formats: of its modules. config: config.json. kv_format: of the KV cache it announces."""
    code = "auto_map" in config
    vllm = ["vllm serve .", *[f"--kv-cache-dtype {str(kv_format).lower()}"] * bool(kv_format), *["--trust-remote-code"] * code]
    lines = [" ".join(vllm)]
    if layout is MODELOPT:
        lines.append(" ".join(["trtllm-serve .", *["--trust_remote_code"] * code]))
    needs = ["In this folder, on NVIDIA GPUs."]
    if any(FORMATS[format].bits == 4 for format in formats):
        needs.append(
            "Blackwell (B200, GB200, RTX PRO 6000) multiplies FP4; others decode the weights and multiply in BF16: the "
            "memory is saved, the speed of FP4 is not there."
        )
    if any(FORMATS[format].bits == 8 for format in formats):
        needs.append("FP8 is multiplied from Ada and Hopper on.")
    readers = "vLLM 0.32 and TensorRT-LLM read" if layout is MODELOPT else "vLLM 0.32 reads"
    needs.append(f"Names and metadata are those that {readers}.")
    needs.append("`qad check .` holds the files against what engines expect.")
    return f"{SERVE}\n```\n" + "\n".join(lines) + "\n```\n\n" + " ".join(needs) + "\n"


def made_section(arm: Arm) -> str:
    """The steps from the original to these files, and the recipe as far as it decides the weights. Data are named, not placed."""
    artifact, training = open_artifact(arm.folder), mapping(origin_of(arm.folder).get("training"))
    recipe = mapping(training.get("recipe")) or artifact.config
    steps = [f"Original: {markdown_text(arm.source.display_name)}, content {arm.source.digest[:12]}."]
    if calibrate := mapping(recipe.get("calibrate")):
        tokens = calibrate.get("samples", 0) * calibrate.get("seq_len", 0)
        steps.append(f"Scales of activations from {tokens:,} tokens of {_names(calibrate.get('data'))}.")
    if arm.rounding == GPTQ:
        steps.append("4-bit codes and block scales from the inputs of the same tokens, rounding one column after another (GPTQ).")
    if arm.rounding == BLOCKWISE:
        steps.append("4-bit codes trained on the same tokens, one layer after another, towards the original's.")
    if arm.scales == KEPT:
        done = "Trained and quantized" if arm.trained else "Quantized"
        steps.append(f"{done} by another tool, whose codes and scales are kept to the byte.")
    elif "imported" in arm.facts:
        steps.append("Trained by another tool; its weights are quantized here.")
    progress = mapping(arm.facts.get("training"))
    if arm.trained and progress:
        train = mapping(recipe.get("train"))
        steps.append(
            f"Trained ({arm.name}) for {progress.get('step', 0):,} steps on {mapping(arm.facts.get('tokens')).get('train', 0):,} "
            f"tokens of {_names(train.get('data'))}; kept is step {progress.get('best_step', 0):,}, whose KL divergence from "
            f"the original on held-out text is {progress.get('val_kl_best', 0.0):.4f} nats a token (PTQ: "
            f"{progress.get('val_kl_start', 0.0):.4f})."
        )
    steps.append(f"Exported by nvfp4-qad {__version__}; what is not quantized is BF16.")
    text = "\n## How it was made\n\n" + "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1)) + "\n"
    shown = {key: _without_places(recipe[key]) for key in _SECTIONS if recipe.get(key)}
    shown |= {key: value for key, value in artifact.config.items() if key in ("seed", "dtype")}
    return text + (f"\n```yaml\n{yaml.safe_dump(shown, sort_keys=False)}```\n" if shown else "")


def _names(data: Any) -> str:
    sources = [mapping(source) for source in data] if isinstance(data, list) else []
    found = [markdown_text(PurePath(str(source.get("path") or source.get("source"))).name) for source in sources]
    return ", ".join(found) or "text"


def _without_places(value: object) -> Any:
    """Paths by their last name alone: a card is for others."""
    if isinstance(value, dict):
        return {k: PurePath(v).name if k == "path" and isinstance(v, str) else _without_places(v) for k, v in value.items()}
    return [_without_places(held) for held in value] if isinstance(value, list) else value
