"""A checkpoint folder as it lies on disk, read without trusting its index or its metadata."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from export.store import Entry
from qad.errors import UsageError
from qad.selection import never_quantized


@dataclasses.dataclass(frozen=True)
class Folder:
    """config / nested: config.json and hf_quant_config.json (None where absent). tensors: name -> (file, entry).

    unreadable: file name -> why. duplicates: tensors found in two files.
    """

    path: Path
    config: dict[str, Any]
    nested: dict[str, Any] | None
    index: dict[str, Any] | None
    files: tuple[str, ...]
    tensors: dict[str, tuple[str, Entry]]
    unreadable: dict[str, str]
    duplicates: tuple[str, ...]

    @property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of config.json."""
        return self.config.get("quantization_config")

    @property
    def nested_quantization(self) -> dict[str, Any]:
        """`quantization` of hf_quant_config.json, empty where absent."""
        inner = (self.nested or {}).get("quantization")
        return inner if isinstance(inner, dict) else {}

    @property
    def algorithm(self) -> str | None:
        for place in (self.quantization or {}, self.nested_quantization):
            if place.get("quant_algo"):
                return str(place["quant_algo"])
        return None

    @property
    def excluded(self) -> list[str]:
        """The authoritative exclude list: config.json's, else the nested one."""
        for place, key in ((self.quantization or {}, "ignore"), (self.nested_quantization, "exclude_modules")):
            if isinstance(place.get(key), list):
                return [str(name) for name in place[key]]
        return []

    def get(self, name: str) -> Tensor:
        """One tensor, memory-mapped, as it is stored."""
        file = self.tensors[name][0]
        if file not in self._handles:
            self._handles[file] = safe_open(self.path / file, framework="pt").__enter__()
        tensor: Tensor = self._handles[file].get_tensor(name)
        return tensor

    @functools.cached_property
    def _handles(self) -> dict[str, Any]:
        return {}

    def entry(self, name: str) -> Entry | None:
        found = self.tensors.get(name)
        return found[1] if found else None

    @functools.cached_property
    def packed(self) -> tuple[str, ...]:
        """Modules with anything quantized about them: a U8 weight, or any weight scale."""
        modules: dict[str, None] = {}
        for name, (_, entry) in self.tensors.items():
            module, _, leaf = name.rpartition(".")
            if (leaf == "weight" and entry.dtype == "U8") or leaf in ("weight_scale", "weight_scale_2", "input_scale"):
                modules[module] = None
        return tuple(modules)

    @functools.cached_property
    def skeleton(self) -> dict[str, dict[str, tuple[int, ...]]] | None:
        """From the architecture: `linears` name -> (N, K) and `parameters` name -> shape; None where transformers
        does not know it, or splits experts differently from the files."""
        return _skeleton(self.path, self.config)

    @functools.cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Linear-like modules that keep a floating-point weight: name -> (N, K)."""
        found = {}
        known = (self.skeleton or {}).get("linears")
        for name, (_, entry) in self.tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf != "weight" or entry.dtype not in ("BF16", "F16", "F32") or len(entry.shape) != 2:
                continue
            is_linear = module in known if known is not None else not _looks_like_embedding(module)
            if is_linear and module not in self.packed:
                found[module] = (entry.shape[0], entry.shape[1])
        if self.config.get("tie_word_embeddings") and "lm_head" in (known or {}) and "lm_head" not in self.packed:
            n, k = (known or {})["lm_head"]
            found["lm_head"] = (n, k)  # the engine builds it, though it has no tensor of its own
        return found


def open_folder(path: Path) -> Folder:
    """Raises UsageError for what is no NVFP4 checkpoint at all: no folder, no config, not quantized."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give the checkpoint folder that holds config.json")
    config = _json(path / "config.json")
    if config is None:
        raise UsageError(f"{path} has no readable config.json: give a Hugging Face checkpoint folder")
    nested = _json(path / "hf_quant_config.json")
    files = tuple(sorted(p.name for p in path.glob("*.safetensors")))
    tensors: dict[str, tuple[str, Entry]] = {}
    unreadable: dict[str, str] = {}
    duplicates: list[str] = []
    for name in files:
        try:
            with safe_open(path / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    part = file.get_slice(key)
                    if key in tensors:
                        duplicates.append(key)
                    tensors[key] = (name, Entry(key, part.get_dtype(), tuple(part.get_shape())))
        except (SafetensorError, OSError) as error:
            unreadable[name] = str(error)
    folder = Folder(
        path,
        config,
        nested,
        _json(path / "model.safetensors.index.json"),
        files,
        tensors,
        unreadable,
        tuple(duplicates),
    )
    if folder.quantization is None and folder.nested is None and not folder.packed:
        raise UsageError(f"{path} is not quantized: `qad check` is for NVFP4 checkpoints (make one with `qad run`)")
    method = (folder.quantization or {}).get("quant_method", "modelopt")
    if method not in ("modelopt", "modelopt_fp4"):
        raise UsageError(f"{path} is quantized by {method!r}: `qad check` knows the ModelOpt layout")
    return folder


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _looks_like_embedding(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    return (
        "embed" in leaf
        or leaf in ("wte", "wpe")
        or "norm" in leaf
        or "conv" in leaf
        or never_quantized(module) == "router"
    )


def _skeleton(path: Path, config: dict[str, Any]) -> dict[str, dict[str, tuple[int, ...]]] | None:
    import torch
    from torch import nn
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        built = CONFIG_MAPPING[config["model_type"]].from_dict(plain)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(built, trust_remote_code=False)
    except Exception:  # transformers raises anything for a config it does not understand; then files alone are read
        return None
    linears = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    parameters = {n: tuple(p.shape) for n, p in model.named_parameters()}
    return {"linears": linears, "parameters": parameters}
