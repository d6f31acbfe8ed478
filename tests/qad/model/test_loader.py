"""What transformers cannot load is one line that says so, never its traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qad.errors import SourceError
from qad.model.loader import load_model, load_skeleton, load_tokenizer
from qad.model.source import open_checkpoint


@pytest.fixture
def model(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "m"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 63}, "The hidden size (63) is not a multiple of the number of attention heads (4)"),
        ({"hidden_size": "x"}, "Field 'hidden_size' expected int, got str (value: 'x')"),
        ({"model_type": "foo"}, "model type `foo`"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_a_config_that_makes_no_sense(model: Path, changes: dict[str, Any], message: str) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    source = open_checkpoint(model)
    for load in (load_skeleton, lambda source: load_model(source, "float32", "cpu")):
        with pytest.raises(SourceError) as caught:
            load(source)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_is_none(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match=r"tokenizer of .* cannot be loaded .*: copy the model's own files there again"):
        load_tokenizer(model)
