"""What a folder's config.json says about its quantization. No engine, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def config_of(folder: Path) -> dict[str, Any] | None:
    """config.json; None where there is no readable one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def quantized_algorithm(folder: Path) -> str | None:
    """NVFP4, W4A16_NVFP4, ... of a folder; None for a plain model."""
    return algorithm_of(config_of(folder) or {})


def algorithm_of(config: dict[str, Any]) -> str | None:
    """The quantization a config declares."""
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    return str(quantization.get("quant_algo") or quantization.get("format") or quantization.get("quant_method"))
