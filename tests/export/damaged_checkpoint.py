"""A checkpoint in memory that can be damaged, for the mutation test."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from export.layouts.layout import LAYOUTS, Layout

INDEX, CONFIG, NESTED = "model.safetensors.index.json", "config.json", "hf_quant_config.json"


class Checkpoint:
    """One folder, read whole. Tensors are shared with the original: a kind replaces them, it never writes into them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        self.json = {n: json.loads((folder / n).read_text()) for n in (CONFIG, NESTED, INDEX) if (folder / n).exists()}
        self.raw: dict[str, bytes | None] = {}
        self.changed: set[str] = set()

    def copy(self) -> Checkpoint:
        other = copy.copy(self)
        other.files = {name: dict(tensors) for name, tensors in self.files.items()}
        other.json, other.raw, other.changed = copy.deepcopy(self.json), {}, set()
        return other

    def write(self, out: Path) -> Path:
        """What is unchanged is linked."""
        out.mkdir()
        rewritten = self.changed | {*self.raw}
        for path in self.folder.iterdir():
            if path.name not in rewritten and path.name != "qad_manifest.json":
                os.link(path, out / path.name)
        for name in self.changed:
            if name in self.files:
                save_file(self.files[name], out / name, metadata={"format": "pt"})
            else:
                (out / name).write_text(json.dumps(self.json[name]))
        for name, data in self.raw.items():
            if data is not None:
                (out / name).write_bytes(data)
        return out

    def equals(self, other: Checkpoint) -> bool:
        """In every byte of what lies in the folder, whatever was marked as changed."""

        def contents(c: Checkpoint) -> list[object]:
            tensors = [(file, name, t) for file, tensors in sorted(c.files.items()) for name, t in sorted(tensors.items())]
            return [(file, name, t.dtype, t.shape, _bytes(t)) for file, name, t in tensors]

        replaced = {name for name, data in self.raw.items() if data != _read(self.folder / name)}
        return not replaced and self.json == other.json and contents(self) == contents(other)

    # --- places ---

    @property
    def quantization(self) -> dict[str, Any]:
        """quantization_config, about to be changed."""
        self.changed.add(CONFIG)
        found: dict[str, Any] = self.json[CONFIG]["quantization_config"]
        return found

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.json[CONFIG]["quantization_config"]["quant_method"]]

    @property
    def codes(self) -> str:
        """Last part of NVFP4's names, as the next three."""
        return self.layout.leaves_of()[0]

    @property
    def block_scale(self) -> str:
        return self.layout.leaves_of()[1]

    @property
    def global_scale(self) -> str:
        return self.layout.leaves_of()[2]

    @property
    def input_scale(self) -> str:
        return self.layout.leaves_of()[3]

    @property
    def names(self) -> list[str]:
        return sorted(name for tensors in self.files.values() for name in tensors)

    @property
    def kv_scale_names(self) -> list[str]:
        return [name for name in self.names if name.endswith((".k_scale", ".v_scale"))]

    @property
    def modules(self) -> list[str]:
        """Those in 4 bits."""
        return self._modules(torch.float8_e4m3fn, f".{self.block_scale}")

    @property
    def eight_bit_modules(self) -> list[str]:
        return self._modules(torch.float8_e4m3fn, ".weight")

    def _modules(self, dtype: torch.dtype, end: str) -> list[str]:
        found = ((name, tensor) for tensors in self.files.values() for name, tensor in tensors.items())
        return sorted(name.removesuffix(end) for name, tensor in found if name.endswith(end) and tensor.dtype == dtype)

    def has(self, name: str) -> bool:
        return any(name in tensors for tensors in self.files.values())

    def get(self, name: str) -> torch.Tensor:
        return next(tensors[name] for tensors in self.files.values() if name in tensors).clone()

    def put(self, name: str, tensor: torch.Tensor, beside: str | None = None) -> None:
        file = next(file for file, tensors in self.files.items() if (beside or name) in tensors)
        old = self.files[file].get(name)
        self.files[file][name] = tensor.contiguous()
        self._count(name, file, old, tensor)

    def drop(self, name: str) -> None:
        file = next(file for file, tensors in self.files.items() if name in tensors)
        self._count(name, None, self.files[file].pop(name), None)
        self.changed.add(file)

    def _count(self, name: str, file: str | None, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """The index follows, so that the damage is the tensor's alone."""
        if file is not None:
            self.changed.add(file)
        if INDEX not in self.json:
            return
        self.changed.add(INDEX)
        index = self.json[INDEX]
        sizes = [0 if tensor is None else tensor.numel() * tensor.element_size() for tensor in (old, new)]
        index["metadata"]["total_size"] += sizes[1] - sizes[0]
        if file is None:
            index["weight_map"].pop(name)
        else:
            index["weight_map"][name] = file


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


# --- what a damage needs to have a place ---


def anything(c: Checkpoint) -> bool:
    return True


def inputs(c: Checkpoint) -> bool:
    return any(c.has(f"{module}.{c.input_scale}") for module in c.modules)


def no_inputs(c: Checkpoint) -> bool:
    return not inputs(c)


def kv_scales(c: Checkpoint) -> bool:
    return bool(c.kv_scale_names)


def experts(c: Checkpoint) -> bool:
    return any(".experts." in name for name in c.names)


def tied(c: Checkpoint) -> bool:
    return bool(c.json[CONFIG]["tie_word_embeddings"])


def untied(c: Checkpoint) -> bool:
    return not tied(c)


def index(c: Checkpoint) -> bool:
    return INDEX in c.json


Kind = Callable[[Checkpoint, random.Random], None]
REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Damage:
    """One kind of damage.

    rule: of the checker, which must say an error. REFUSED: the folder is not read at all.
    make: the damage, at a place drawn from the generator.
    needs: true of the checkpoints that have a place for it.
    only: the one layout that has a place for it.
    """

    rule: str
    make: Kind
    needs: Callable[[Checkpoint], bool] = anything
    only: str | None = None

    def at(self, original: Checkpoint, seed: str, out: Path) -> Path:
        """The damaged folder. A damage that changes nothing is a fault of the test."""
        checkpoint = original.copy()
        self.make(checkpoint, random.Random(seed))
        assert not checkpoint.equals(original), f"the damage of {seed!r} changed nothing"
        return checkpoint.write(out)


def pairs(kinds: dict[str, Damage]) -> list[tuple[str, str]]:
    """(kind, layout) that have a place."""
    return [(kind, name) for kind, damage in kinds.items() for name in LAYOUTS if damage.only in (None, name)]
