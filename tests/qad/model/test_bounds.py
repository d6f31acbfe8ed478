"""A source whose files ask for what they do not hold, or that two readers would read differently, is refused at once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from qad.errors import SourceError
from qad.model.bounds import OversizedError, require_bounded
from qad.model.loader import load_skeleton
from qad.model.source import open_checkpoint


@pytest.fixture
def source(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "source"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
        ({"num_hidden_layers": 50_000}, "more than 10,"),
        ({"num_labels": 10**9}, "num_labels is 1,000,000,000"),
    ],
)
def test_a_config_beyond_its_tensors_is_refused(source: Path, values: dict[str, Any], message: str) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(SourceError, match=message):
        load_skeleton(open_checkpoint(source))


def test_sizes_of_published_models_are_no_counts() -> None:
    require_bounded(
        {
            "vocab_size": 262_144,
            "max_position_embeddings": 10_485_760,
            "num_hidden_layers": 126,
            "n_routed_experts": 384,
            "layer_types": ["a"] * 99,
            "text_config": {"num_experts": 512},
        }
    )
    with pytest.raises(OversizedError, match="n_layer is 200,000"):
        require_bounded({"text_config": {"n_layer": 200_000}})


def test_what_two_readers_would_read_differently_is_refused(source: Path) -> None:
    whole = (source / "config.json").read_text()
    for change in ('"model_type": "gpt2", "model_type": "llama"', '"x": "\\ud800"'):
        (source / "config.json").write_text(f"{whole.rstrip()[:-1]}, {change}}}")
        with pytest.raises(SourceError, match="which value counts depends on the reader"):
            open_checkpoint(source)
    (source / "config.json").write_text(whole)
    weights = source / "model.safetensors"
    raw = weights.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].decode().rstrip()
    name, entry = next((n, e) for n, e in json.loads(header).items() if n != "__metadata__")
    twice = f"{header[:-1]}, {json.dumps(name)}: {json.dumps(entry)}}}".encode()
    weights.write_bytes(len(twice).to_bytes(8, "little") + twice + raw[8 + size :])
    with pytest.raises(SourceError, match="twice"):
        open_checkpoint(source)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(SourceError):
        open_checkpoint(source)
