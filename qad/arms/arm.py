"""An arm: one way to treat the source model. BF16, PTQ and QAD are the same kind of folder, so nothing downstream
branches on where a checkpoint came from.

    arm.json             name, source (path, digest, display name), scales (dynamic, mse, four_over_six, kept), rounding (nearest,
                         gptq, blockwise, kept), kv_cache (off, calibrated, at_least_one, cast), kv_format where it is not FP8,
                         what was counted
    selection.json       what is quantized and why the rest is not; absent for BF16
    scales.safetensors   FP32 scalars: MODULE.input_scale, one per module whose inputs are quantized; ATTENTION.k_scale and
                         ATTENTION.v_scale, where the KV cache is calibrated
    frozen.safetensors   MODULE.block_scale (E4M3 [N, K/16]) and MODULE.global_scale (FP32), one pair per 4-bit module;
                         absent where weight scales are dynamic. Where codes are decided, MODULE.codes (uint8 [N, K/2]) too, which
                         are exported as they are, and where the recipe trains MODULE.start (BF16 [N, K]), where that begins
    kept.safetensors     of an arm that was imported from a quantized folder: MODULE.ROLE, the stored tensors of every module by
                         the roles of its format. They are what is exported; scales are FP64 where the folder holds
                         reciprocals, so that they come back to the bit
    weights.safetensors  FP32 masters by hub name; absent where the weights are the source's own

An arm overlays the source: a tensor it holds replaces the source's, everything else is the source's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qad.arms.kv_cache import CALIBRATES, OFF
from qad.arms.selection import Selection
from qad.artifact import open_artifact
from qad.errors import ArtifactError
from qad.model.source import Checkpoint, open_checkpoint
from qad.numerics import nvfp4
from qad.numerics.formats import FORMATS, FP8, INPUT_SCALE, Quantized
from qad.numerics.groups import _NONE_FROZEN, quantize_group
from qad.untrusted.safetensors_header import read_header

KIND = "arm"
DYNAMIC = "dynamic"
NEAREST, GPTQ, BLOCKWISE = "nearest", "gptq", "blockwise"
KEPT = "kept"  # of scales and rounding: both are those of the folder that was imported
KEPT_FILE, FROZEN_FILE = "kept.safetensors", "frozen.safetensors"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A finished arm folder, opened. `selection` is None for BF16."""

    folder: Path
    name: str
    source: Checkpoint
    selection: Selection | None
    input_scales: dict[str, Tensor]
    facts: dict[str, Any]
    kv_scales: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def weight(self, name: str) -> Tensor:
        """A parameter by hub name: the FP32 master where the arm trained it, what its kept codes decode to (FP32), else the
        source's tensor. A tensor that holds all experts of a layer (`Checkpoint.wholes`) is made of theirs, BF16."""
        if name in self._overlay:
            with safe_open(self.folder / "weights.safetensors", framework="pt") as file:
                return file.get_tensor(name)
        module = name.removesuffix(".weight")
        if name in self.source.wholes:
            return self.source.whole(name, self.weight)
        return self._kept_form(module, torch.float32).dequantize() if self.keeps(module) else self.source.get(name)

    def start(self, name: str) -> Tensor:
        """Where training of a parameter begins: its weight, but for codes that were decided the point in their cells that came
        with them, or else their values."""
        module = name.removesuffix(".weight")
        found = {} if self.trained or not self.decides_codes else self.frozen_scales([module])
        if module not in found:
            return self.weight(name)
        with safe_open(self.folder / FROZEN_FILE, framework="pt") as file:
            if f"{module}.start" in file.keys():  # noqa: SIM118 - no dictionary
                return file.get_tensor(f"{module}.start")
        decided = found[module].decided
        assert decided is not None
        return decided.dequantize()

    @property
    def starts_in_cells(self) -> bool:
        """True where training from decided codes has its start."""
        with safe_open(self.folder / FROZEN_FILE, framework="pt") as file:
            return any(name.endswith(".start") for name in file.keys())  # noqa: SIM118 - no dictionary

    def keeps(self, module: str) -> bool:
        """True where the quantized form of the module came with the arm, instead of being made from its weight."""
        return self.scales == KEPT and self.selection is not None and module in self.selection.modules

    def _kept_form(self, module: str, scalars: torch.dtype | None = None) -> Quantized:
        """scalars: dtype of what is one number; None leaves it as it is kept."""
        assert self.selection is not None
        record = FORMATS[self.selection.format_of(module)]
        places = [place for place in record.tensors if place.role != INPUT_SCALE]
        with safe_open(self.folder / KEPT_FILE, framework="pt") as file:
            stored = [file.get_tensor(f"{module}.{place.role}") for place in places]
        return record.numerics().from_tensors(
            *(tensor.to(scalars) if place.per is None else tensor for place, tensor in zip(places, stored, strict=True))
        )

    @functools.cached_property
    def _overlay(self) -> dict[str, tuple[int, ...]]:
        path = self.folder / "weights.safetensors"
        if not path.is_file():
            return {}
        try:
            return {name: entry.shape for name, entry in read_header(path).tensors.items()}
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read ({error}): make the arm again") from error

    @functools.cached_property
    def tied_embeddings(self) -> bool:
        """Head and embedding are one weight: as in the source, unless the arm holds a head that is not the embedding."""
        embedding = self.source.embedding
        if not self.source.tied_embeddings or self.source.head not in self._overlay or embedding is None:
            return self.source.tied_embeddings
        return torch.equal(self.weight(self.source.head).float(), self.weight(embedding).float())

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the model that the arm is: the source's, which says so where the head was untied."""
        untied = self.source.tied_embeddings and not self.tied_embeddings
        return {**self.source.config, "tie_word_embeddings": False} if untied else self.source.config

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the weights the arm holds itself; empty for PTQ."""
        return dict(self._overlay)

    @property
    def trained(self) -> bool:
        """True where the arm holds weights of its own, or was imported as one that was trained."""
        return bool(self._overlay) or (self.scales == KEPT and self.name != "ptq")

    def require_input_scales(self) -> None:
        """Raises ArtifactError where activations are quantized and a module has no input scale, one that no engine can
        use, or another one than its group of input scales."""
        quantized = set(self.selection.with_input_scale) if self.selection else set()
        for group in self.selection.input_groups if self.selection else ():
            scales = {module: self.input_scales.get(module) for module in group if module in quantized}
            for module, scale in scales.items():
                if scale is None:
                    raise ArtifactError(f"{self.folder} has no input scale for {module}: calibrate again")
                if scale.numel() != 1 or not (torch.isfinite(1 / scale.float()) and scale > 0):
                    raise ArtifactError(f"input scale of {module} is {scale.tolist()}: calibrate again on other text")
            if len({float(scale) for scale in scales.values() if scale is not None}) > 1:
                raise ArtifactError(f"input scales of {', '.join(group)} differ, but engines fuse them: calibrate again")

    def require_kv_scales(self) -> None:
        """Raises ArtifactError where the KV cache is calibrated and a k_proj of the source has no usable pair of scales."""
        if self.kv_cache not in CALIBRATES:
            return
        ends = ".k_proj.weight"
        found = [name.removesuffix(ends) for name in self.source.tensors if name.endswith(ends)]
        for attention in (name for name in found if not self.source.family.never_quantized(name)):
            for scale in (f"{attention}.k_scale", f"{attention}.v_scale"):
                value = self.kv_scales.get(scale)
                if value is None or value.numel() != 1 or not (torch.isfinite(value) and value > 0):
                    raise ArtifactError(f"{self.folder} has no usable {scale}: calibrate again")

    @property
    def scales(self) -> str:
        """How weight scales come about: `dynamic`, the strategy that found the frozen ones, or `kept`."""
        return str(self.facts.get("scales", DYNAMIC))

    @property
    def rounding(self) -> str:
        """How codes come about: `nearest`, a function of weights and scales, `gptq` or `blockwise`, decided once and frozen, or
        `kept`."""
        return str(self.facts.get("rounding", NEAREST))

    @property
    def decides_codes(self) -> bool:
        """True where codes were decided with the scales and are exported as they are."""
        return self.rounding in (GPTQ, BLOCKWISE)

    @property
    def kv_cache(self) -> str:
        """The policy of the KV cache's scales (qad.arms.kv_cache)."""
        return str(self.facts.get("kv_cache", OFF))

    @property
    def kv_format(self) -> str | None:
        """One of KV_FORMATS (qad.numerics.formats); None where the cache stays in the compute dtype."""
        return None if self.kv_cache == OFF else str(self.facts.get("kv_format", FP8))

    def frozen_scales(self, group: Sequence[str]) -> dict[str, nvfp4.FrozenScales]:
        """Frozen scales of the selected members of a scale group; empty where scales are dynamic, as a format may
        have them always.

        Raises ArtifactError where a module has none, or has such as no engine can use.
        """
        if self.scales in (DYNAMIC, KEPT) or self.selection is None:
            return {}
        found: dict[str, nvfp4.FrozenScales] = {}
        with safe_open(self.folder / FROZEN_FILE, framework="pt") as file:
            stored = set(file.keys())
            for module in group:
                shape = self.selection.modules.get(module)
                if shape is None or not FORMATS[self.selection.format_of(module)].nvfp4_weights:
                    continue
                names = [f"{module}.block_scale", f"{module}.global_scale"]
                if self.rounding != NEAREST:
                    names.append(f"{module}.codes")
                if f"{module}.codes_block_scale" in stored:
                    raise ArtifactError(f"{self.folder} is of an earlier version of gptq: make the PTQ arm again")
                if not stored.issuperset(names):
                    raise ArtifactError(f"{self.folder} has no frozen scales for {module}: make the PTQ arm again")
                block_scale, global_scale, *codes = (file.get_tensor(name) for name in names)
                decided = nvfp4.QuantizedTensor(codes[0], block_scale, global_scale) if codes else None
                found[module] = nvfp4.FrozenScales(block_scale, global_scale, decided)
                if not _usable(found[module], shape):
                    raise ArtifactError(f"the frozen scales of {module} in {self.folder} are no scales: make the PTQ arm again")
        if len({float(scales.global_scale) for scales in found.values()}) > 1:
            raise ArtifactError(
                f"frozen global scales of {', '.join(found)} differ, but engines fuse them: make the PTQ arm again"
            )
        return found

    def quantized(self) -> Iterator[dict[str, Quantized]]:
        """The quantized form, one scale group at a time: module name -> tensor."""
        for group in self.selection.groups if self.selection else ():
            yield self.quantize(group)

    def quantize(self, group: Sequence[str]) -> dict[str, Quantized]:
        """The quantized form of one scale group: module name -> tensor. Raises as `quantize_group`."""
        assert self.selection is not None
        if self.keeps(group[0]):
            return {module: self._kept_form(module) for module in group}
        weights = {module: self.weight(f"{module}.weight") for module in group}
        return quantize_group(weights, self.frozen_scales(group), self.selection.format_of(group[0]))


def _usable(scales: nvfp4.FrozenScales, shape: tuple[int, int]) -> bool:
    block_scale, global_scale = scales.block_scale, scales.global_scale
    n, k = shape
    if block_scale.dtype != torch.float8_e4m3fn or tuple(block_scale.shape) != (n, k // nvfp4.BLOCK_SIZE):
        return False
    if scales.decided is not None:
        packed = scales.decided.packed
        if packed.dtype != torch.uint8 or tuple(packed.shape) != (n, k // 2):
            return False
    byte = block_scale.view(torch.uint8)
    if int(byte.min()) == 0 or int(byte.max()) > 0x7E:  # zero; NaN and negative
        return False
    finite = global_scale.numel() == 1 and bool(torch.isfinite(global_scale) & torch.isfinite(1 / global_scale))
    return finite and global_scale.dtype == torch.float32 and bool(global_scale > 0)


def write_arm(
    folder: Path,
    name: str,
    source: Checkpoint,
    selection: Selection | None,
    input_scales: dict[str, Tensor],
    weights: dict[str, Tensor] | None = None,
    *,
    scales: str = DYNAMIC,
    frozen: Mapping[str, nvfp4.FrozenScales] = _NONE_FROZEN,
    kv_scales: Mapping[str, Tensor] = MappingProxyType({}),
    **facts: Any,
) -> None:
    """Fill a stage folder with an arm. `weights`: FP32 masters by hub name, None where the source's own serve.
    `frozen`: of every selected module, where `scales` names a strategy, with codes of all or of none; where they are KEPT the
    caller writes KEPT_FILE. `kv_scales`:
    `ATTENTION.k_scale` and `.v_scale`, where the policy `kv_cache`, one of the facts, calibrates them."""
    assert (scales in (DYNAMIC, KEPT)) == (not frozen)
    decided = {module: found.decided for module, found in frozen.items() if found.decided is not None}
    assert len(decided) in (0, len(frozen))
    if decided:
        facts = {"rounding": GPTQ, **facts}
    described = {"path": str(source.folder), "digest": source.digest, "name": source.display_name}
    (folder / "arm.json").write_text(json.dumps({"name": name, "source": described, "scales": scales, **facts}, indent=1) + "\n")
    if selection is not None:
        (folder / "selection.json").write_text(json.dumps(selection.to_json(), indent=1) + "\n")
    if input_scales or kv_scales:
        named = {f"{module}.input_scale": scale for module, scale in input_scales.items()} | dict(kv_scales)
        calibrated = {name: scale.reshape(()).clone() for name, scale in named.items()}
        save_file(calibrated, folder / "scales.safetensors", metadata={"format": "pt"})
    if frozen:
        stored = {f"{module}.block_scale": found.block_scale.cpu() for module, found in frozen.items()}
        stored |= {f"{module}.global_scale": found.global_scale.cpu().clone() for module, found in frozen.items()}
        stored |= {f"{module}.codes": codes.packed for module, codes in decided.items()}
        stored |= {f"{module}.start": found.start for module, found in frozen.items() if found.start is not None}
        save_file(stored, folder / FROZEN_FILE, metadata={"format": "pt"})
    if weights is not None:
        contiguous = {key: weight.detach().contiguous() for key, weight in weights.items()}
        save_file(contiguous, folder / "weights.safetensors", metadata={"format": "pt"})


def source_folder(folder: Path) -> Path:
    """Where the source of a finished arm lies; it is not opened. Raises ArtifactError where the folder is no finished arm."""
    return Path(_facts(folder)["source"]["path"])


def _facts(folder: Path) -> dict[str, Any]:
    open_artifact(folder, KIND)
    facts: dict[str, Any] = json.loads((folder / "arm.json").read_text(encoding="utf-8"))
    return facts


def open_arm(folder: Path) -> Arm:
    """Raises ArtifactError where the folder is no finished arm, its source has changed since, or it lacks frozen scales."""
    facts = _facts(folder)
    source = open_checkpoint(facts["source"]["path"])
    if source.digest != facts["source"]["digest"]:
        raise ArtifactError(f"{source.folder} has changed since {folder} was made from it: make the arm again")
    selection_path, scales_path = folder / "selection.json", folder / "scales.safetensors"
    selection = Selection.from_json(json.loads(selection_path.read_text())) if selection_path.is_file() else None
    scales = load_file(scales_path) if scales_path.is_file() else {}
    kv_scales = {name: scale for name, scale in scales.items() if name.endswith((".k_scale", ".v_scale"))}
    input_scales = {n.removesuffix(".input_scale"): scale for n, scale in scales.items() if n not in kv_scales}
    arm = Arm(folder, facts["name"], source, selection, input_scales, facts, kv_scales)
    held = KEPT_FILE if arm.scales == KEPT else FROZEN_FILE
    if arm.scales != DYNAMIC and not (folder / held).is_file():
        raise ArtifactError(f"{folder} has {arm.scales} scales, but no {held}: make the arm again")
    return arm
