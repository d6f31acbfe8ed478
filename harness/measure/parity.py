"""`qad measure parity`: one folder in an engine and in the torch reference, compared into a record."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from harness.engines import transformers, vllm_scores
from harness.engines.environment import engine_python
from harness.engines.vllm import describe
from harness.engines.vllm_scores import Scores
from harness.measure.subject import Found, Subject
from harness.parity import rules as parity
from harness.parity import ties
from harness.records.record import ParityData, ParityPrompt
from qad.artifact import MANIFEST, open_artifact, sha256_file
from qad.errors import UsageError
from qad.model.families import family_of
from qad.model.loader import default_device
from qad.model.source import open_checkpoint
from qad.text.python_docs import python_docs

_GLOBAL = {"weight_scale_2", "weight_global_scale"}
_INPUT = {"input_scale", "input_global_scale"}


def measure_parity(
    folder: Path,
    out: Path,
    *,
    engine: str,
    python: str | None,
    arm: str,
    dtype: str,
    new_tokens: int,
    long_tokens: int,
    convert: Callable[[Path, Path], Path],
    eager: bool = True,
) -> ParityData:
    """Ask the engine, compare, write the record.

    dtype: auto is float32 without a GPU, where the comparison is exact, else bfloat16.
    long_tokens: length of one more prompt, 0 for none.
    convert: (folder, place) -> the folder in the ModelOpt layout, which the reference opens.
    Raises UsageError for what cannot be asked, EngineError where the engine fails on the folder.
    """
    if engine != "vllm":
        raise UsageError(f"parity with {engine!r} cannot be measured: use --engine vllm, which gives its log-probabilities")
    started, device = time.monotonic(), default_device()
    dtype = ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype
    subject, interpreter = Subject.open(arm, folder, dtype, 0), engine_python("vllm", python)
    with tempfile.TemporaryDirectory(prefix="qad-parity-") as scratch:
        readable = convert(folder, Path(scratch) / "modelopt") if _layout(folder) == "compressed-tensors" else folder
        loaded = transformers.load(readable, dtype, device)
        long_text = "\n\n".join(python_docs()[:40]) if long_tokens else ""
        prompts = parity.prompts(subject.tokenizer, new_tokens, long_text, long_tokens)
        inputs, outputs = parity.layer_inputs(loaded.model, prompts[0])
        question = vllm_scores.job(
            folder,
            Path(scratch) / "answer.safetensors",
            prompts,
            new_tokens=new_tokens,
            dtype=dtype,
            eager=eager,
            layers=inputs,
            overrides=plain_cache(folder),
        )
        (scores,) = vllm_scores.ask(interpreter, [question], Path(scratch))
        data = compared(folder, loaded, prompts, outputs, scores)
    settings = {
        "engine": engine,
        "dtype": dtype,
        "eager": eager,
        "new_tokens": new_tokens,
        "long_tokens": long_tokens,
        "kv_cache": "compute dtype",
        "layout": _layout(folder),
    }
    described = dataclasses.replace(describe(scores.log, scores.version, folder), dtype=dtype, device=scores.device)
    subject.write(out, Found(data, described, settings), started)
    return data


def compared(folder: Path, loaded: Any, prompts: list[list[int]], outputs: dict[str, torch.Tensor], scores: Scores) -> ParityData:
    """An engine's answer about `folder` beside the reference `loaded` and its layers' `outputs`."""
    model, dtype, asked = loaded.model, loaded.engine.dtype, range(len(prompts))
    ours = [parity.log_probs(model, prompt, tokens) for prompt, tokens in zip(prompts, scores.tokens, strict=True)]

    def found_with(own: torch.Tensor, number: int) -> ParityPrompt:
        return parity.compare_prompt(prompts[number], scores.tokens[number], scores.log_probs[number], own)

    found = [found_with(ours[number], number) for number in asked]
    family = family_of(model.config)
    hidden = any(ties.input_of(name, inputs, family) is None for inputs in scores.inputs for name in ties.quantizers(model))
    for number in (n for n in asked if not parity.agrees(found[n]) and scores.inputs[n]):
        with ties.taken_from(model, scores.inputs[number]) as taken:
            tied = found_with(parity.log_probs(model, prompts[number], scores.tokens[number]), number)
        untied = found[number].max_difference
        agreed = dataclasses.replace(tied, ties=taken.taken, untied_difference=untied)
        parted = dataclasses.replace(found[number], parts_at=taken.apart)
        found[number] = agreed if parity.agrees(tied) else parted
    apart = [number for number in asked if not parity.agrees(found[number])]
    if apart and not parity.must_agree(dtype, scores.device, hidden):
        with parity.finer(model):
            for number in apart:
                floor = parity.mean_kl(ours[number], parity.log_probs(model, prompts[number], scores.tokens[number]))
                found[number] = dataclasses.replace(found[number], floor_kl=floor)
    return parity.judge(
        found,
        parity.compare_layers(scores.layers, outputs),
        dtype=dtype,
        device=scores.device,
        hides_inputs=hidden,
        log=scores.kernels,
        other=[*changed_files(folder), *unequal_scales(folder)],
        reference_=f"transformers {loaded.engine.version}, torch {torch.__version__}, {loaded.engine.kernel_path}",
    )


def changed_files(folder: Path) -> list[str]:
    """Weight files that are not what this tool wrote, a line each; nothing is known of a folder without its manifest."""
    if not (folder / MANIFEST).is_file():
        return []
    files: dict[str, Any] = open_artifact(folder).manifest["files"]
    return [
        f"{name} was changed after it was exported (its hash differs from {MANIFEST})"
        for name, facts in files.items()
        if name.endswith(".safetensors") and (folder / name).is_file() and sha256_file(folder / name) != facts["sha256"]
    ]


def unequal_scales(folder: Path) -> list[str]:
    """Scale groups whose members have different global or input scales: an engine has one place for them."""
    scales: dict[str, dict[str, float]] = {"global scales": {}, "input scales": {}}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                module, _, leaf = name.rpartition(".")
                kind = "global scales" if leaf in _GLOBAL else "input scales" if leaf in _INPUT else None
                if leaf == "weight_scale" and not any(size != 1 for size in file.get_slice(name).get_shape()):
                    kind = "global scales"  # FP8 has one scale a tensor
                if kind:
                    scales[kind][module] = float(file.get_tensor(name))
    family = open_checkpoint(folder, allow_quantized=True).family
    found = []
    for kind, groups in (("global scales", family.scale_groups), ("input scales", family.input_scale_groups)):
        for group in groups(scales[kind]):
            if len({scales[kind][module] for module in group}) > 1:
                first = next(name for name in family.siblings_of(group[0]) if name in group)
                found.append(f"{first} and its siblings have unequal {kind}: the engine takes one")
    return found


def plain_cache(folder: Path) -> dict[str, object]:
    """What the engine has to read otherwise to keep K and V in the compute dtype, as the reference does."""
    quantization = _quantization(folder)
    return {"quantization_config": quantization} if quantization.pop("kv_cache_scheme", None) else {}


def _layout(folder: Path) -> str:
    """What a checkpoint calls its layout; a folder that is not quantized has none."""
    return str(_quantization(folder).get("quant_method") or "not quantized")


def _quantization(folder: Path) -> dict[str, object]:
    return dict(open_checkpoint(folder, allow_quantized=True).config.get("quantization_config") or {})
