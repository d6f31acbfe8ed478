"""A checkpoint folder as it lies on disk, read without trusting its index or its metadata."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from export.skeleton import Skeleton, build_skeleton
from export.store import Entry
from qad.errors import UsageError
from qad.selection import never_quantized

INDEX = "model.safetensors.index.json"
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
FLOATING = ("BF16", "F16", "F32")
_EXPERT = re.compile(r"\.experts\.\d+\.")


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
        """`quantization_config` of config.json, None where it is absent or no object."""
        outer = self.config.get("quantization_config")
        return outer if isinstance(outer, dict) else None

    @property
    def nested_quantization(self) -> dict[str, Any]:
        """`quantization` of hf_quant_config.json, empty where absent."""
        return mapping((self.nested or {}).get("quantization"))

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
                return names(place[key])
        return []

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings"))

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
            if (leaf == "weight" and entry.dtype == "U8") or leaf in SCALES:
                modules[module] = None
        return tuple(modules)

    @functools.cached_property
    def skeleton(self) -> Skeleton | None:
        """From the architecture; None where transformers does not know it, or names things differently from the files."""
        built = build_skeleton(self.config)
        if built is None:
            return None
        modules = {name.rpartition(".")[0] for name in self.tensors if not _EXPERT.search(name)}
        known = {name.rpartition(".")[0] for name in (*built.parameters, *built.buffers)}
        return built if not modules or len(modules & known) * 2 >= len(modules) else None

    @functools.cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Linear-like modules that keep a floating-point weight, routers and experts included: name -> (N, K)."""
        found = {}
        known = self.skeleton.linears if self.skeleton else None
        for name, (_, entry) in self.tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf != "weight" or entry.dtype not in FLOATING or len(entry.shape) != 2 or module in self.packed:
                continue
            is_linear = module in known if known is not None else not _looks_like_embedding(module)
            if is_linear or never_quantized(module) == "router" or _EXPERT.search(name):
                found[module] = (entry.shape[0], entry.shape[1])
        if self.tied and known and "lm_head" in known and "lm_head" not in self.packed:
            found["lm_head"] = known["lm_head"]  # the engine builds it, though it has no tensor of its own
        return found


def open_folder(path: Path) -> Folder:
    """Raises UsageError for what is no NVFP4 checkpoint at all: no folder, no config, not quantized."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give the checkpoint folder that holds config.json")
    config = read_json(path / "config.json")
    if config is None:
        raise UsageError(f"{path} has no readable config.json: give a Hugging Face checkpoint folder")
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
        read_json(path / "hf_quant_config.json"),
        read_json(path / INDEX),
        files,
        tensors,
        unreadable,
        tuple(duplicates),
    )
    if not config.get("quantization_config") and folder.nested is None and not folder.packed:
        raise UsageError(f"{path} is not quantized: `qad check` is for NVFP4 checkpoints (make one with `qad run`)")
    method = (folder.quantization or {}).get("quant_method") or "modelopt"
    if method not in ("modelopt", "modelopt_fp4"):
        raise UsageError(f"{path} is quantized by {method!r}: `qad check` knows the ModelOpt layout")
    return folder


def read_json(path: Path) -> dict[str, Any] | None:
    """The object a JSON file holds; None where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def mapping(value: object) -> dict[str, Any]:
    """The value itself where it is an object, else an empty one: metadata is not trusted."""
    return value if isinstance(value, dict) else {}


def names(value: object) -> list[str]:
    """The strings of a list; empty for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _looks_like_embedding(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    return any(part in leaf for part in ("embed", "norm", "conv")) or leaf in ("wte", "wpe")
