"""Which ids and positions a model has: what lies beyond ends in an IndexError after hours, or in silent garbage."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from qad.errors import SourceError, UsageError
from qad.untrusted import clean, mapping

DRAFT_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
_OFFSET = 2  # rows that a table of positions may have before the first (OPT, BART)


def require_layers(config: Mapping[str, object], tensors: Iterable[str], folder: Path) -> None:
    """Raises SourceError where tensors belong to layers that the config does not count: they would be left out without a word.
    Heads that draft tokens may be stored as further layers."""
    counts = {**config, **mapping(config.get("text_config"))}
    layers = counts.get("num_hidden_layers")
    drafts = max((n for key in DRAFT_COUNTS if isinstance(n := counts.get(key), int)), default=0)
    stored = max((int(found[1]) + 1 for name in tensors if (found := _LAYER.match(name))), default=0)
    if isinstance(layers, int) and stored > layers + drafts:
        raise SourceError(
            f"{folder} holds tensors of {stored} layers, num_hidden_layers of its config.json is {layers}: correct the number, "
            "or take the original's config.json"
        )


def require_ids(model: Any, tokenizer: Any, folder: Path) -> None:
    """Raises SourceError where the tokenizer has an id that the embedding of the model (a skeleton will do) has no row for."""
    rows = model.get_input_embeddings().weight.shape[0]
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    if beyond:
        index, token = beyond[0]
        more = f" ({len(beyond)} such tokens)" if len(beyond) > 1 else ""
        raise SourceError(
            f"{folder}: id {index} of the tokenizer, {clean(token)!r}, has no row in the embedding, which has {rows:,}{more}: "
            "resize and train the embedding (model.resize_token_embeddings), or take the token out of the tokenizer"
        )


def require_positions(model: Any, folder: Path, asked: Mapping[str, int]) -> None:
    """Hold tokens of one sequence against the positions that the model (a skeleton will do) was made for. asked: by recipe key.

    Raises UsageError where a table of positions ends; warns where positions are computed, as rotary ones are: the model runs,
    on text unlike what it was trained on.
    """
    config = model.config.get_text_config()
    alibi = getattr(config, "max_seq_len", None)  # MPT makes its biases for so many
    positions = getattr(config, "max_position_embeddings", None) or alibi
    if not isinstance(positions, int):
        return
    for key, tokens in asked.items():
        if tokens <= positions:
            continue
        told = f"{key} {tokens:,} is more than the {positions:,} positions that {folder} was made for"
        if positions == alibi or _has_table(model, positions):
            raise UsageError(f"{told}, and it has no others: set it to {positions:,} or less")
        warnings.warn(f"{told}: the rest is unlike what it has been trained on", stacklevel=2)


def _has_table(model: Any, positions: int) -> bool:
    """Learned positions, or something computed once for every position: an embedding or a buffer of that size."""
    words = model.get_input_embeddings()
    sizes = [module.weight.shape[:1] for module in model.modules() if isinstance(module, nn.Embedding) and module is not words]
    sizes += [buffer.shape for buffer in model.buffers() if buffer.dim() >= 2]
    return any(positions <= size <= positions + _OFFSET for shape in sizes for size in shape)
