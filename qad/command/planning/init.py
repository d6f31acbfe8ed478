"""`qad init`: a commented recipe to begin with, fitted to the model, the data and the machine.

What it decides by rule of thumb it says so; what it measures (documents, tokens, lengths) it measures on the file's beginning.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from qad.errors import DataError, UsageError
from qad.model.loader import load_tokenizer
from qad.model.source import Checkpoint, open_checkpoint
from qad.recipes.load import parse_recipe
from qad.text.data import Data
from qad.text.documents import Document, Part, split_of
from qad.text.packing import encode
from qad.text.sight import sight_for
from qad.text.sources import documents
from qad.untrusted import json_lines

GPUS = {"a100": 80, "h100": 80, "h200": 141, "b200": 180, "b300": 288, "l40s": 48, "rtx-pro-6000": 96}  # GB, as sold
_FIELDS = ("messages", "conversations", "text", "content", "document")
_SAMPLE = 200  # documents whose length is measured
_LEAST = 40  # documents that fall into four splits with some in each
_ROLES = ("calibration", "train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class _Text:
    """data: as a recipe has it. tokens: about. length: that nine of ten documents do not exceed. shares: of the tokens, role by
    role."""

    data: str | dict[str, str]
    documents: int
    tokens: int
    length: int
    chats: bool
    shares: dict[str, float]

    def of(self, role: str, most: int, least: int) -> int:
        """Tokens to ask of a role: a fifth less than there are, by the mean length."""
        return max(least, min(most, int(0.8 * self.shares[role] * self.tokens)))


def starter_recipe(model: str, data: Path, gpu: str | None = None, gpus: int = 1) -> str:
    """The recipe as YAML text. gpu: name of one, None for this machine.

    Raises SourceError, DataError, UsageError for a model or data that no recipe could use.
    """
    memory = gpu_bytes(gpu) * gpus if gpu is not None else _memory()
    source = open_checkpoint(model)
    tokenizer = load_tokenizer(source.folder)
    text = _text(data, tokenizer, source.folder)
    recipe, notes = _recipe(model, source, text, memory, gpu is not None or torch.cuda.is_available())
    parse_recipe(recipe, "the recipe")
    return _commented(recipe, notes)


def _recipe(model: str, source: Checkpoint, text: _Text, memory: float, on_gpu: bool) -> tuple[dict[str, Any], dict[str, str]]:
    parameters = sum(math.prod(info.shape) for info in source.tensors.values())
    seq_len = _seq_len(text.length, _positions(source), on_gpu)
    savers = _savers(parameters, memory)
    batch = max(1, (32768 if on_gpu else 512) // seq_len)
    wanted = 50_000_000 if on_gpu else 32_768
    step = batch * seq_len
    samples = text.of("calibration", 512 * seq_len, seq_len) // seq_len
    steps = text.of("train", wanted, step) // step
    train = {
        "data": text.data,
        "tokens": steps * step,
        "seq_len": seq_len,
        "batch_size": batch,
        "lr": 1e-4 if parameters < 5e8 else 1e-5,
        "schedule": "linear",
        "warmup_steps": min(10, steps // 10),
        "validate_every": max(1, steps // 10),
        "validation_tokens": text.of("validation", 65536, seq_len),
        **savers,
    }
    if text.chats:
        train["loss_on"] = "all"
    recipe = {
        "model": model,
        "quantize": {"format": "NVFP4", "exclude": ["lm_head"], "scales": "mse"},
        "calibrate": {"data": text.data, "samples": samples, "seq_len": seq_len},
        "train": train,
        "export": {"layout": "modelopt"},
        "measure": {
            "fidelity": {"data": text.data, "tokens": text.of("test", 65536, seq_len), "seq_len": seq_len},
            "accuracy": {"suite": "smoke"},
        },
    }
    fits = 20 * parameters if not savers else 14 * parameters
    notes = {
        "model": f"{source.display_name}, {parameters / 1e9:.3g} billion parameters",
        "calibrate": f"{text.documents:,} documents, about {text.tokens:,} tokens; nine of ten are shorter than {text.length:,}",
        "train": f"about {fits / 1e9:.3g} GB besides activations; here are {memory / 1e9:.0f} GB"
        + ("" if fits < memory else ": it does not fit"),
        "tokens": f"at most {wanted:,} to begin with; the published runs took 0.2 to 6 billion",
        "lr": "1e-6 for models after SFT, 1e-5 after RL; small ones want more",
        "exclude": "the output head stays BF16; engines expect that",
        "loss_on": "assistant: learn from the answers alone",
        "layout": "compressed-tensors for transformers",
        "accuracy": "or one of the published suites, see docs/guides",
    }
    return recipe, notes


def _text(path: Path, tokenizer: Any, model: Path) -> _Text:
    data: str | dict[str, str] = str(path)
    if path.suffix in (".jsonl", ".json"):
        data = {"source": "jsonl", "path": str(path), "field": field_of(path)}
    (source,) = Data.model_validate(data).root
    whole = source.model_copy(update={"split": "all"})
    found = documents(whole, "train")  # type: ignore[arg-type]
    roles = Counter(split_of(document) for document in found)
    empty = [role for role in _ROLES if not roles[role]]
    if len(found) < _LEAST or empty:
        raise DataError(
            f"{path} holds {len(found)} documents, too few for calibration, training, validation and test to have some each: "
            f"give at least {_LEAST}, or files of their own with split: all"
        )
    sight = sight_for([Part(path.name, 1.0, found)], model, tokenizer)

    def length(document: Document) -> int:
        if sight and document.pictures:
            return len(sight.encode(tokenizer, document, sys.maxsize)[0])
        return len(encode(tokenizer, document))

    lengths = sorted(map(length, itertools.islice(found, _SAMPLE)))
    longest = lengths[int(0.9 * (len(lengths) - 1))]
    chats = any(document.messages for document in found[:_SAMPLE])
    shares = {role: roles[role] / len(found) for role in _ROLES}
    return _Text(data, len(found), int(statistics.mean(lengths) * len(found)), longest, chats, shares)


def field_of(path: Path) -> str:
    """The field of the first row that holds text or a conversation. Raises DataError naming what is there."""
    try:
        _, row = next(json_lines(path), (1, {}))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): give one JSON object a line") from error
    if not isinstance(row, dict):
        raise DataError(f"{path} line 1 is no object: write one object a line, as `jq -c .[] {path}` does with a list")
    field = next((name for name in _FIELDS if name in row), None)
    if field is None:
        there = ", ".join(map(str, row)) or "nothing"
        raise DataError(f"{path}: its rows have {there}, none of {', '.join(_FIELDS)}: name the field in a recipe of your own")
    return field


def _positions(source: Checkpoint) -> int:
    config = {**source.config, **(source.config.get("text_config") or {})}
    return int(config.get("max_position_embeddings") or 4096)


def _seq_len(length: int, positions: int, on_gpu: bool) -> int:
    """A power of two that most documents fit into, as far as the machine is up to it."""
    wanted = 2 ** math.ceil(math.log2(max(length, 128)))
    return int(min(wanted, positions, 4096 if on_gpu else 512))


def gpu_bytes(gpu: str) -> float:
    """Its memory. Raises UsageError for a name that is not known."""
    if gpu not in GPUS:
        raise UsageError(f"--gpu {gpu!r} is unknown: use one of {', '.join(GPUS)}")
    return GPUS[gpu] * 1e9


def _memory() -> float:
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(psutil.virtual_memory().total)


def _savers(parameters: int, memory: float) -> dict[str, Any]:
    """BF16 student and teacher, FP32 masters, gradients and moments are 20 bytes a parameter, with 8-bit moments 14."""
    if 20 * parameters < 0.7 * memory:
        return {}
    return {"optimizer": "adamw8bit", "activation_checkpointing": True}


def _commented(recipe: dict[str, Any], notes: dict[str, str]) -> str:
    apart = json.loads(json.dumps(recipe))  # nothing is said by reference, which YAML would print as anchors
    text = yaml.safe_dump(apart, sort_keys=False, allow_unicode=True)
    lines = []
    for line in text.splitlines():
        key = line.strip().partition(":")[0]
        lines.append(f"{line}  # {notes.pop(key)}" if key in notes else line)
    head = "# Written by qad init. `qad plan` says what it would do, `qad keys` what else a recipe may say."
    return "\n".join([head, *lines, ""])
