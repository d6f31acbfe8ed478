"""A checkpoint folder as it lies on disk: what its tensors are, without trusting its index or its metadata."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from export.files.json_files import json_faults, read_json
from export.layouts.config_files import CONFIG, INDEX, NESTED
from export.layouts.drafts import Drafts
from export.layouts.endless import endless
from export.layouts.exclude import names_asked
from export.layouts.layout import COMPRESSED_TENSORS, LAYOUTS, MODELOPT, Layout, code_dtypes, scale_leaves
from export.metadata import Announced, announced_layout
from export.skeleton import Skeleton, build_skeleton
from qad.arms.kv_cache import CAST
from qad.artifact import MANIFEST, STAGE_FILE
from qad.errors import UsageError
from qad.model.bounds import OversizedError
from qad.model.built_config import ties_embeddings
from qad.model.families import Family, family_of
from qad.numerics.formats import (
    BLOCK_SCALE,
    CODES,
    FORMATS,
    GLOBAL_SCALE,
    INPUT_SCALE,
    MIXED,
    Format,
    Quantized,
    algorithm_of,
    with_inputs,
)
from qad.untrusted import mapping
from qad.untrusted.safetensors_header import Entry, Header, read_header

FLOATING = ("BF16", "F16", "F32")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LONGEST_NAME = 1000  # characters; the rules make lists of its parts


@dataclasses.dataclass(frozen=True)
class Folder:
    """One folder.

    config: config.json.
    nested: hf_quant_config.json, None where absent.
    index: of the weight files, None where absent.
    headers: of the weight files that can be read.
    unreadable: the other weight files -> why.
    faults: (file, what readers of its JSON differ in).
    """

    path: Path
    config: dict[str, Any]
    nested: dict[str, Any] | None
    index: dict[str, Any] | None
    headers: dict[str, Header]
    unreadable: dict[str, str]
    faults: tuple[tuple[str, str], ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Every weight file."""
        return tuple(sorted((*self.headers, *self.unreadable)))

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[str, Entry]]:
        """Name -> (file, entry)."""
        return {name: (file, entry) for file, header in self.headers.items() for name, entry in header.tensors.items()}

    @property
    def duplicates(self) -> list[str]:
        """Tensors found in two files."""
        counts = collections.Counter(name for header in self.headers.values() for name in header.tensors)
        return [name for name, count in counts.items() if count > 1]

    @functools.cached_property
    def announced(self) -> Announced:
        """What the metadata say, without what cannot be held against the names here."""
        said = Announced(self.config, self.nested, self.layout)
        built = self.skeleton.linears if self.skeleton else ()
        asked = names_asked({*self.leaves, *built, self.head}, self.family)
        return dataclasses.replace(said, endless=frozenset(endless((*said.excluded, *said.targets), asked)))

    @functools.cached_property
    def layout(self) -> Layout:
        """Which quant_method says; where it says nothing known, the one whose names the tensors have."""
        own = {f".{COMPRESSED_TENSORS.leaf(format, CODES)}" for format in FORMATS} - {".weight"}
        stored = COMPRESSED_TENSORS if any(name.endswith(tuple(own)) for name in self.tensors) else MODELOPT
        return announced_layout(self.config) or stored

    @property
    def named_layouts(self) -> list[Layout]:
        """Those that alone call a global scale as a tensor here is called."""
        names = {layout: {layout.leaf(format, GLOBAL_SCALE) for format in FORMATS} for layout in LAYOUTS.values()}
        shared, leaves = set.intersection(*names.values()), {name.rpartition(".")[2] for name in self.tensors}
        return [layout for layout, own in names.items() if leaves & (own - shared)]

    @functools.cached_property
    def algorithm(self) -> str | None:
        """The announced one; of a compressed-tensors folder that announces none that of its tensors. None where there is none."""
        said = self.announced
        if said.scales_per_token and not self._stores_input_scales:
            return f"{', '.join(sorted(said.formats))} with inputs scaled token by token"
        if said.names_other_formats and self._holds_other_formats:
            return ", ".join(sorted(said.formats))
        if said.algorithm or self.layout is not COMPRESSED_TENSORS:
            return said.algorithm
        return algorithm_of(map(self.stored_format, self.packed)) if self.packed else next(iter(FORMATS))

    @property
    def _stores_input_scales(self) -> bool:
        leaves = tuple(f".{self.layout.leaf(format, INPUT_SCALE)}" for format in FORMATS)
        return any(name.endswith(leaves) for name in self.tensors)

    @property
    def _holds_other_formats(self) -> bool:
        """Weights of no format here: FP8 has one scale per tensor."""
        foreign = {"F8_E5M2", "I8", "I32"} - code_dtypes()
        for name, (_, entry) in self.tensors.items():
            module, _, leaf = name.rpartition(".")
            scale = self.entry(f"{module}.weight_scale")
            many = entry.dtype == "F8_E4M3" and scale is not None and math.prod(scale.shape) != 1
            if leaf in ("weight", "weight_packed") and (many or entry.dtype in foreign):
                return True
        return False

    def announced_format(self, module: str) -> str | None:
        """What the metadata say the module's format is, whether or not it is excluded; None where they do not say."""
        if self.algorithm != MIXED:
            return self.algorithm
        return self.announced.listed_format(module)

    def stored_format(self, module: str) -> str:
        """The format whose tensors a module has, whatever the metadata say; the first one where its codes are nobody's."""
        return self.format_in(module, self.layout)

    def format_in(self, module: str, layout: Layout) -> str:
        """`stored_format` by the names of a layout."""
        default = next(iter(FORMATS.values()))
        codes = {format.name: self.entry(f"{module}.{layout.leaf(format.name, CODES)}") for format in FORMATS.values()}
        found = [f for f in FORMATS.values() if (entry := codes[f.name]) and entry.dtype == f.tensors[0].dtype]
        found = found or [format for format in FORMATS.values() if format.stores_alike(default)]
        inputs = self.entry(f"{module}.{layout.leaf(found[0].name, INPUT_SCALE)}")
        return with_inputs(found, inputs is not None).name

    def format_of(self, module: str) -> str:
        """The announced format where it is one that is known, else the stored one."""
        announced = self.announced_format(module)
        return announced if announced in FORMATS else self.stored_format(module)

    def record_of(self, module: str) -> Format:
        """The record of `format_of`."""
        return FORMATS[self.format_of(module)]

    def leaves_of(self, module: str) -> tuple[str, ...]:
        """Last parts of the tensor names that a module of its format has, the weight's first."""
        return self.layout.leaves_of(self.format_of(module))

    def shape_of(self, module: str) -> tuple[int, int] | None:
        """[N, K] of a module by its codes; None where they are not there, or damaged."""
        codes = self.record_of(module).tensors[0]
        entry = self.entry(f"{module}.{self.leaves_of(module)[0]}")
        if entry is None or len(entry.shape) != 2 or entry.dtype != codes.dtype:
            return None
        n, stored = entry.shape
        return n, stored * (codes.per or 1)

    @property
    def holds_blocks(self) -> bool:
        """Any module with codes beside block scales, as one of the formats has them."""
        for layout in LAYOUTS.values():
            for name, (_, entry) in self.tensors.items():
                module, _, leaf = name.rpartition(".")
                found = layout.find(leaf, entry.dtype)
                block = found[0].stored(BLOCK_SCALE) if found and found[1].role == CODES else None
                scale = self.entry(f"{module}.{layout.leaf(found[0].name, BLOCK_SCALE)}") if found else None
                if block and scale is not None and scale.dtype == block.dtype:
                    return True
        return False

    @property
    def casts_kv_cache(self) -> bool:
        """Its manifest, or that of the stage that is making it, says that the KV cache was meant to have no scales."""
        manifest = read_json(self.path / MANIFEST) or read_json(self.path / STAGE_FILE) or {}
        return mapping(manifest.get("config")).get("kv_cache") == CAST

    @functools.cached_property
    def family(self) -> Family:
        """What engines do with the modules of the architecture."""
        return family_of(self.config)

    @property
    def head(self) -> str:
        """Name of the output head."""
        return self.family.head

    @property
    def tied(self) -> bool:
        return ties_embeddings(self.config)

    def get(self, name: str) -> Tensor:
        """One tensor, memory-mapped, as it is stored."""
        file = self.tensors[name][0]
        if file not in self._handles:
            self._handles[file] = safe_open(self.path / file, framework="pt").__enter__()
        tensor: Tensor = self._handles[file].get_tensor(name)
        return tensor

    def scalar(self, name: str) -> Tensor:
        """A tensor of one element; kept, as several rules read it and a large model has a hundred thousand."""
        if name not in self._scalars:
            self._scalars[name] = self.get(name)
        return self._scalars[name]

    def byte_range(self, name: str) -> tuple[int, int]:
        """Smallest and largest byte of a tensor that is not empty; read once, though several rules ask."""
        if name not in self._byte_ranges:
            smallest, largest = torch.aminmax(self.get(name).reshape(-1).view(torch.uint8))
            self._byte_ranges[name] = (int(smallest), int(largest))
        return self._byte_ranges[name]

    @functools.cached_property
    def _byte_ranges(self) -> dict[str, tuple[int, int]]:
        return {}

    @functools.cached_property
    def _scalars(self) -> dict[str, Tensor]:
        return {}

    @functools.cached_property
    def _handles(self) -> dict[str, Any]:
        return {}

    def entry(self, name: str) -> Entry | None:
        found = self.tensors.get(name)
        return found[1] if found else None

    def quantized(self, module: str) -> Quantized:
        """A quantized module with its decode scale. Its tensors must be there, with the dtypes of the layout."""
        record, layout = self.record_of(module), self.layout
        stored = []
        for place in (tensor for tensor in record.tensors if tensor.role != INPUT_SCALE):
            tensor = self.get(f"{module}.{layout.leaf(record.name, place.role)}")
            stored.append(layout.decode_scale(tensor, record.name) if place.per is None else tensor)
        return record.numerics().from_tensors(*stored)

    @functools.cached_property
    def leaves(self) -> dict[str, list[str]]:
        """Module -> last parts of its tensors' names."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            module, _, leaf = name.rpartition(".")
            found.setdefault(module, []).append(leaf)
        return found

    @functools.cached_property
    def packed(self) -> dict[str, None]:
        """Modules with anything quantized about them, in the files' order: codes, or any scale, by the names of either
        layout."""
        modules: dict[str, None] = {}
        dtypes, scales = code_dtypes(), scale_leaves()
        scales |= _codes()
        for name, (_, entry) in self.tensors.items():
            module, _, leaf = name.rpartition(".")
            if (leaf == "weight" and entry.dtype in dtypes) or leaf in scales:
                modules[module] = None
        return modules

    @property
    def skeleton(self) -> Skeleton | None:
        """From the architecture; None where transformers does not know it, or names things differently from the files, or is
        asked for more than they fill."""
        return self._skeleton_or_excess[0]

    @property
    def oversized(self) -> str | None:
        """What config.json asks for that no tensors here could fill."""
        return self._skeleton_or_excess[1]

    @functools.cached_property
    def _skeleton_or_excess(self) -> tuple[Skeleton | None, str | None]:
        try:
            return self._built(), None
        except OversizedError as excess:
            return None, str(excess)

    def _built(self) -> Skeleton | None:
        shapes = {name: entry.shape for name, (_, entry) in self.tensors.items()}
        codes = {name: f"{name.rpartition('.')[0]}.weight" for name in shapes if name.rpartition(".")[2] in _codes()}
        built = build_skeleton(self.config, {codes.get(name, name): shape for name, shape in shapes.items()})
        if built is None:
            return None
        modules = {name.rpartition(".")[0] for name in self.tensors if not _EXPERT.search(name)}
        known = {name.rpartition(".")[0] for name in (*built.parameters, *built.buffers)}
        return built if not modules or len(modules & known) * 2 >= len(modules) else None

    @property
    def embeddings(self) -> list[str]:
        """Embedding modules that have a weight of their own."""
        known = self.skeleton.embeddings if self.skeleton else None
        return [
            module
            for module, _, leaf in (name.rpartition(".") for name in self.tensors)
            if leaf == "weight" and (module in known if known is not None else module.endswith(self.family.embeddings))
        ]

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
            if is_linear or self.family.never_quantized(module) == "router" or _EXPERT.search(name):
                found[module] = (entry.shape[0], entry.shape[1])
        if self.tied and known and self.head in known and self.head not in self.packed:
            found[self.head] = known[self.head]  # the engine builds it, though it has no tensor of its own
        return found

    @property
    def unbuilt(self) -> list[str]:
        """Modules with a floating-point matrix that the architecture does not have, such as those of a head for multi-token
        prediction: an engine may build them. Empty where the architecture is not known."""
        known = self.skeleton.parameters if self.skeleton else None
        names = (name for name, (_, entry) in self.tensors.items() if entry.dtype in FLOATING and len(entry.shape) == 2)
        matrices = (name for name in names if known is not None and name.endswith(".weight") and name not in known)
        modules = (name.removesuffix(".weight") for name in matrices)
        return [m for m in modules if m not in self.packed and m not in self.linears and not _looks_like_embedding(m)]

    @functools.cached_property
    def drafts(self) -> Drafts:
        """The heads for speculative decoding that the config announces."""
        return Drafts.of(self.config)

    @property
    def draft_modules(self) -> list[tuple[str, str]]:
        """(module, a name that engines build it under) of the unquantized matrices of such heads."""
        floating = ((name, entry.shape) for name, (_, entry) in self.tensors.items() if entry.dtype in FLOATING)
        found = [(name.removesuffix(".weight"), built) for name, shape in floating for built in self.drafts.names(name, shape)]
        return [(m, built) for m, built in found if m not in self.packed and not _looks_like_embedding(m)]


def open_folder(path: Path, skip: Collection[str] = ()) -> Folder:
    """`skip`: weight files to leave out. Raises UsageError for what is no NVFP4 checkpoint at all: no folder, no config,
    not quantized."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give the checkpoint folder that holds config.json")
    config = read_json(path / CONFIG)
    if config is None:
        arm = " (of an arm, which `qad export` makes)" if (path / "arm.json").is_file() else ""
        raise UsageError(f"{path} has no readable config.json: give a Hugging Face checkpoint folder{arm}")
    headers: dict[str, Header] = {}
    unreadable: dict[str, str] = {}
    for file in sorted(file for file in path.glob("*.safetensors") if file.name not in skip):
        try:
            headers[file.name] = _header(file)
        except (OSError, ValueError) as error:
            unreadable[file.name] = str(error)
    faults = tuple((name, fault) for name in (CONFIG, NESTED, INDEX) for fault in json_faults(path / name))
    folder = Folder(path, config, read_json(path / NESTED), read_json(path / INDEX), headers, unreadable, faults)
    if not config.get("quantization_config") and folder.nested is None and not folder.packed:
        raise UsageError(f"{path} is not quantized: give an NVFP4 checkpoint (make one with `qad run`)")
    method = mapping(config.get("quantization_config")).get("quant_method")
    if method and announced_layout(config) is None and not folder.holds_blocks:
        raise UsageError(f"{path} is quantized by {method!r}: `qad check` knows {' and '.join(LAYOUTS)}")
    return folder


def _header(file: Path) -> Header:
    header = read_header(file)
    longest = max(map(len, header.tensors), default=0)
    if longest > _LONGEST_NAME:
        raise ValueError(f"a tensor's name has {longest:,} characters")
    return header


def _codes() -> set[str]:
    """Last parts of the names of codes that are not called a weight."""
    return {layout.leaf(format, CODES) for layout in LAYOUTS.values() for format in FORMATS} - {"weight"}


def _looks_like_embedding(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    return any(part in leaf for part in ("embed", "norm", "conv")) or leaf in ("wte", "wpe")
