"""Each family's tiny instance, saved once with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_families import build


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[[Path], Any]) -> Callable[[str], Path]:
    """Name of a family -> its saved BF16 instance; read only."""
    root, made = tmp_path_factory.mktemp("families"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = build(name, root / name.replace(" ", "-"))
            make_tokenizer(made[name])
        return made[name]

    return get
