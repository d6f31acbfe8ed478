"""Documents packed into windows that are held in memory."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from qad.text.packing import pack
from qad.text.windows import Windows


def pack_in_memory(*arguments: Any, **named: Any) -> Windows:
    """What `pack` writes, given all but its folder."""
    with tempfile.TemporaryDirectory() as folder:
        stored = pack(Path(folder), *arguments, **named)
        whole = stored.at(torch.arange(len(stored)))
        assert whole.digest == stored.digest
        assert torch.equal(whole.counts, stored.counts)
        return dataclasses.replace(whole, sources=stored.sources)
