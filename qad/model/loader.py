"""Load a transformers causal LM: whole, as a meta-device skeleton, and its tokenizer.

Code that a folder brings along (*.py, named by `auto_map`) is run only inside `remote_code(True)`, which is what
--trust-remote-code is: a decision of who runs the command, so that no recipe and no folder can make it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from qad.errors import SourceError
from qad.model.announced import not_computed
from qad.model.attention import with_attention_here
from qad.model.bounds import OversizedError, built_for, require_bounded
from qad.model.experts import split_experts
from qad.model.names import name_tensors
from qad.model.source import Checkpoint
from qad.numerics.widened import multiplies_bfloat16
from qad.untrusted import clean, mapping

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_UNLOADABLE = (
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    OSError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
    SyntaxError,
    StrictDataclassError,
)  # by transformers, and by code that a folder brings

_trusted = False


@contextmanager
def remote_code(trusted: bool) -> Iterator[None]:
    """Within the block, code of the folders that are loaded is run, or not."""
    global _trusted
    before, _trusted = _trusted, trusted
    try:
        yield
    finally:
        _trusted = before


def code_is_trusted() -> bool:
    """Whether code of the folders that are loaded is run here."""
    return _trusted


def resolve_dtype(dtype: str, device: str) -> str:
    """`auto` -> bfloat16 where the hardware multiplies BF16 natively, else float32 (seven times faster on AVX2)."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if multiplies_bfloat16(device) else "float32"


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(source: Checkpoint, dtype: str, device: str, attention: str | None = None) -> Any:
    """The model in eval mode, without gradients, on `device`, its parameters in `dtype`.
    attention: transformers' name of an attention kernel, None for the one of config.json where it is here, else its choice.

    Raises SourceError where transformers does not know the architecture, a package that it needs or a weight is missing, or a
    quantized folder asks for more than is computed here.
    """
    from transformers.utils import logging

    unknown = not_computed(mapping(source.config.get("quantization_config")))
    if unknown:
        raise SourceError(
            f"{source.folder} asks for {', '.join(unknown[:4])}, which is not computed here: what would be measured is not the "
            "model that is served; measure it through the engine that serves it (--server)"
        )
    logging.disable_progress_bar()
    try:
        config = _config(source)
        if attention is None:
            with_attention_here(config, device, str(source.folder))
        else:
            config._attn_implementation = attention
        model, report = auto_class(config).from_pretrained(
            source.folder, config=config, dtype=DTYPES[dtype], output_loading_info=True, trust_remote_code=_trusted
        )
    except _UNLOADABLE as error:
        raise SourceError(f"transformers cannot load {source.folder}: {_reason(error, source.folder)}") from error
    if report["missing_keys"] or report.get("mismatched_keys"):
        missing = sorted(map(str, (*report["missing_keys"], *report.get("mismatched_keys", ()))))
        raise SourceError(f"{source.folder} lacks weights its config asks for, first {missing[0]}: fetch it again")
    name_tensors(model, source.tensors)
    return _with_base(model).to(device).requires_grad_(False).eval()


def load_skeleton(source: Checkpoint, dtype: str | None = None, device: str = "cpu", split: bool = True) -> Any:
    """The model's modules on the meta device, its experts split: names and shapes, no weights, no time.

    dtype: but buffers on the CPU, those that are computed, such as rotary frequencies, with the values they have in the model
    loaded in that dtype.
    device: where it will run, which decides its attention.
    split: False leaves experts in transformers' parameters.
    """
    try:
        require_bounded(source.config)
        config = _config(source)
        with_attention_here(config, device, str(source.folder), say=dtype is not None)
        shapes = [info.shape for info in source.tensors.values()]
        with _weightless() if dtype else torch.device("meta"), built_for(shapes):
            model = auto_class(config).from_config(
                config, trust_remote_code=_trusted, **({"dtype": DTYPES[dtype]} if dtype else {})
            )
            name_tensors(model, source.tensors)
            if split:
                split_experts(model)
    except OversizedError as error:
        raise SourceError(
            f"{source.folder}/config.json asks for more than its {len(source.tensors):,} tensors fill: {error}; fetch it again"
        ) from error
    except _UNLOADABLE as error:
        reason = _reason(error, source.folder)
        raise SourceError(f"transformers does not know {source.folder} as a causal LM: {reason}") from error
    return _with_base(model)


def _with_base(model: Any) -> Any:
    """The model, whose `base_model` is what lies below the output head; Llama 4's class names another attribute than it has."""
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"
    return model


def _config(source: Checkpoint) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=_trusted)
    if getattr(config, "quantization_config", None) and "quantization_config" not in source.config:
        config.quantization_config["dequantize"] = True  # experts in MXFP4, which the source decodes
    return config


def auto_class(config: Any) -> Any:
    """transformers' class of classes for a configuration: of language models, or of those that also see, where it names one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    named = getattr(config, "architectures", None) or ()
    text = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    text = text or type(config) in AutoModelForCausalLM._model_mapping
    takes_images = sees is not None and (not text or getattr(sees, "__name__", "") in named)
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def stays_wide(model: Any, dtype: str) -> Callable[[str], bool]:
    """Which tensors of the model, by name there, transformers keeps in FP32 whatever the dtype: routers."""
    pattern = "|".join(model._get_dtype_plan(DTYPES[dtype])).replace("*", ".*")
    return lambda name: bool(pattern and re.search(pattern, name))


@contextmanager
def _weightless() -> Iterator[None]:
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        yield


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=_trusted)
    except _UNLOADABLE as error:
        raise SourceError(
            f"tokenizer of {folder} cannot be loaded ({_reason(error, folder)}): copy the model's own files there again"
        ) from error


def _reason(error: Exception, folder: Path) -> str:
    """One line; where the folder brings code that was not run, what to do."""
    text = str(error.__cause__ if isinstance(error, StrictDataclassError) else error).strip()
    reason = clean(text.splitlines()[0], 500) if text else type(error).__name__
    if not _trusted and any(brings_code(folder / name) for name in ("config.json", "tokenizer_config.json")):
        return f"it brings code of its own, which is not run: read its *.py files, then give --trust-remote-code ({reason})"
    return reason


def brings_code(path: Path) -> bool:
    """Whether a JSON file of a folder names code of its own."""
    try:
        return "auto_map" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
