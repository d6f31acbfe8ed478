"""The formats a Linear can have, one record each: everything that depends on a format by name is looked up here.

NVFP4         weights E2M1 with a block scale per 16, inputs the same (W4A4)      qad.numerics.nvfp4
W4A16_NVFP4   weights as NVFP4, inputs as they are
FP8           weights and inputs E4M3 with one scale per tensor (W8A8)            qad.numerics.fp8

The KV cache has formats of its own (KV_FORMATS): FP8, one scale a cache, and NVFP4, which has block scales beside it.

A checkpoint whose modules have more than one of them is MIXED_PRECISION. Records are plain data, layouts' names included,
so that they can be read without torch; the functions of a format are imported when they are first asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CODES, BLOCK_SCALE, GLOBAL_SCALE, INPUT_SCALE = "codes", "block_scale", "global_scale", "input_scale"
MIXED = "MIXED_PRECISION"
_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4}


class Quantized(Protocol):
    """A weight in a format."""

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., K]."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a checkpoint stores of the weight, in the order of the format's record; scales are decode scales."""

    def dequantize(self, dtype: torch.dtype = ...) -> Tensor:
        """The values, [..., K]."""


class Numerics(Protocol):
    """The functions of a format; a module that defines them is one. Shapes and dtypes as in qad.numerics.nvfp4."""

    def global_scale_from_amax(self, amax: Tensor | float) -> Tensor:
        """FP32 decode scale of a scale group, or of an input, by its largest magnitude."""

    def quantize(self, weight: Tensor, global_scale: Tensor | None = None) -> Quantized:
        """Raises ValueError for NaN or Inf, naming the first bad index."""

    def fake_quantize(self, weight: Tensor, global_scale: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """`quantize` and decoded again, in the weight's dtype or written to `out`."""

    def from_tensors(self, *tensors: Tensor) -> Quantized:
        """The weight that a checkpoint stores as these."""

    def fake_quantize_activation(self, x: Tensor, input_scale: Tensor) -> Tensor:
        """What the GEMM of an engine sees of its input [..., K], in the input's dtype."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a quantized module [N, K].

    role: codes, block_scale, global_scale or input_scale.
    dtype: in safetensors' words.
    per: elements of K that share one of the tensor's; None: the tensor is one number.
    """

    role: str
    dtype: str
    per: int | None = None

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Of a tensor that is not one number."""
        assert self.per is not None
        return n, k // self.per

    @property
    def words(self) -> str:
        """dtype and shape, for messages."""
        return self.dtype if self.per is None else f"{self.dtype} [N, K{'' if self.per == 1 else f'/{self.per}'}]"


@dataclasses.dataclass(frozen=True)
class InLayout:
    """What a checkpoint layout calls a format.

    algorithm: ModelOpt's quant_algo, or compressed-tensors' format of a config group.
    leaves: role -> last part of the tensor's name; also of an input scale that weights alone do not have.
    weights, inputs: numbers of a config group.
    reciprocal: global and input scales are stored as 1 / decode scale.
    """

    algorithm: str
    leaves: Mapping[str, str]
    weights: Mapping[str, object]
    inputs: Mapping[str, object]
    reciprocal: bool = False


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    name: what recipes, arms and ModelOpt checkpoints call it.
    bits: of an element.
    tensors: of a module, the codes first.
    numerics: imports its functions.
    largest: the largest magnitude of a scale group in units of its global scale.
    input_block: elements of an input that share a scale which follows the input; None: one calibrated scale alone.
    nvfp4_weights: its weights are NVFP4's, for which block scales can be searched once and frozen, and stacks of experts be
        quantized at once.
    error: relative error of decoded Gaussian weights.
    error_limit: above it, the weights are not the source's.
    tag: of a model card.
    codes: what a model card calls the elements.
    kind: how a model card describes it.
    layouts: layout's name -> what it calls the format.
    """

    name: str
    bits: int
    tensors: tuple[Stored, ...]
    numerics: Callable[[], Numerics]
    largest: float
    input_block: int | None
    nvfp4_weights: bool
    error: float
    error_limit: float
    tag: str
    codes: str
    kind: str
    layouts: Mapping[str, InLayout]

    def stored(self, role: str) -> Stored | None:
        """The tensor of a role; None where modules of the format have none."""
        return next((tensor for tensor in self.tensors if tensor.role == role), None)

    @property
    def quantizes_inputs(self) -> bool:
        """True where a module has an input scale."""
        return self.stored(INPUT_SCALE) is not None

    @property
    def block(self) -> int | None:
        """Elements of a weight that share a block scale; None: there are none."""
        scale = self.stored(BLOCK_SCALE)
        return scale.per if scale else None

    def stores_alike(self, other: Format) -> bool:
        """True where weights of both have the same tensors."""
        return [t for t in self.tensors if t.role != INPUT_SCALE] == [t for t in other.tensors if t.role != INPUT_SCALE]

    def bytes(self, n: int, k: int) -> int:
        """Of a stored module [n, k], without what is one number."""
        whole = (tensor for tensor in self.tensors if tensor.per is not None)
        return sum(n * (k // (tensor.per or 1)) * _BYTES[tensor.dtype] for tensor in whole)


def _nvfp4() -> Numerics:
    from qad.numerics import nvfp4

    return nvfp4


def _fp8() -> Numerics:
    from qad.numerics import fp8

    return fp8


def _names(*leaves: str) -> dict[str, str]:
    return dict(zip((CODES, BLOCK_SCALE, GLOBAL_SCALE, INPUT_SCALE), leaves, strict=True))


_MODELOPT_4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_MODELOPT_8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_TENSORS_4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_TENSORS_8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_FP8_LEAVES = {CODES: "weight", GLOBAL_SCALE: "weight_scale", INPUT_SCALE: "input_scale"}
_INPUT = Stored(INPUT_SCALE, "F32")

_NVFP4 = Format(
    name="NVFP4",
    bits=4,
    tensors=(Stored(CODES, "U8", 2), Stored(BLOCK_SCALE, "F8_E4M3", 16), Stored(GLOBAL_SCALE, "F32"), _INPUT),
    numerics=_nvfp4,
    largest=6.0 * 448.0,
    input_block=16,
    nvfp4_weights=True,
    error=0.095,
    error_limit=0.15,
    tag="nvfp4",
    codes="4-bit codes",
    kind="in 4 bits with an E4M3 scale for 16 and one FP32 scale per fused group",
    layouts={
        "modelopt": InLayout(
            algorithm="NVFP4",
            leaves=_names("weight", "weight_scale", "weight_scale_2", "input_scale"),
            weights=_MODELOPT_4,
            inputs=_MODELOPT_4,
        ),
        # "local": the global scale of an input is stored, its block scales are made on the fly.
        "compressed-tensors": InLayout(
            algorithm="nvfp4-pack-quantized",
            leaves=_names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
            weights={**_TENSORS_4, "dynamic": False},
            inputs={**_TENSORS_4, "dynamic": "local"},
            reciprocal=True,
        ),
    },
)
_FP8 = Format(
    name="FP8",
    bits=8,
    tensors=(Stored(CODES, "F8_E4M3", 1), Stored(GLOBAL_SCALE, "F32"), _INPUT),
    numerics=_fp8,
    largest=448.0,
    input_block=None,
    nvfp4_weights=False,
    error=0.026,
    error_limit=0.05,
    tag="fp8",
    codes="8-bit weights",
    kind="in FP8 (E4M3) with one FP32 scale per fused group",
    layouts={
        "modelopt": InLayout("FP8", _FP8_LEAVES, _MODELOPT_8, _MODELOPT_8),
        "compressed-tensors": InLayout("float-quantized", _FP8_LEAVES, _TENSORS_8, _TENSORS_8),
    },
)
NVFP4, W4A16_NVFP4, FP8 = _NVFP4.name, "W4A16_NVFP4", _FP8.name

FORMATS: dict[str, Format] = {}
"""Name -> record. The order is that of messages; the first format is meant where nothing says which."""


def add(format: Format, *, weights_alone: str | None = None) -> None:
    """Add a format to the table, and under the name `weights_alone` the one that leaves inputs as they are."""
    FORMATS[format.name] = format
    if weights_alone:
        layouts = {
            name: dataclasses.replace(own, algorithm=weights_alone if own.algorithm == format.name else own.algorithm)
            for name, own in format.layouts.items()
        }
        tensors = tuple(tensor for tensor in format.tensors if tensor.role != INPUT_SCALE)
        FORMATS[weights_alone] = dataclasses.replace(format, name=weights_alone, tensors=tensors, layouts=layouts)


add(_NVFP4, weights_alone=W4A16_NVFP4)
add(_FP8)


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """A format of the KV cache. Scales are amax / 448 in every one: an engine widens NVFP4 to FP8 before it multiplies, so what a
    block scale and an element make must be an E4M3 number (ModelOpt 0.47, unified_export_hf.py: amax / 448 for both).

    name: ModelOpt's kv_cache_quant_algo.
    bytes: of an element, with its share of a block scale.
    bits: of an element, as a scheme counts them.
    schemes: layout's name -> `kv_cache_scheme` of config.json; a layout that has none cannot announce it.
    """

    name: str
    bytes: float
    bits: int
    schemes: Mapping[str, object]


_KV_8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
KV_FORMATS = {
    "FP8": KVFormat("FP8", 1.0, 8, {"modelopt": _MODELOPT_8, "compressed-tensors": {**_KV_8, "strategy": "tensor"}}),
    "NVFP4": KVFormat("NVFP4", 0.5625, 4, {"modelopt": "NVFP4"}),
}


def kv_format_of(scheme: object) -> str | None:
    """What a `kv_cache_scheme` or `kv_cache_quant_algo` means: the name of a KV format where it is one, else what it says; None
    where it says nothing."""
    if not scheme:
        return None
    if isinstance(scheme, str):
        return scheme.upper() if scheme.upper() in KV_FORMATS else scheme
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    return next((format.name for format in KV_FORMATS.values() if format.bits == bits), str(scheme))


def quantizes_activations(format: str) -> bool:
    """True where the inputs of a module of this format are quantized too, so that it has an input scale."""
    return FORMATS[format].quantizes_inputs


def weights_alone(format: Format) -> Format | None:
    """The format with the same weights that leaves inputs as they are; None where there is none."""
    return next((f for f in FORMATS.values() if f.stores_alike(format) and not f.quantizes_inputs), None)


def announced_algorithm(quantization: Mapping[str, object]) -> str | None:
    """What a `quantization_config` of the ModelOpt layout means, upper case; None where it names nothing.

    NVFP4 whose config groups all have no `input_activations` is W4A16_NVFP4, as vLLM 0.32 reads it
    (ModelOptNvFp4Config._from_config).
    """
    algorithm = str(quantization.get("quant_algo") or "").upper()
    groups = quantization.get("config_groups")
    alone = weights_alone(FORMATS[algorithm]) if algorithm in FORMATS else None
    if alone and isinstance(groups, dict) and groups:
        given = [group.get("input_activations") if isinstance(group, dict) else group for group in groups.values()]
        return alone.name if all(numbers is None for numbers in given) else algorithm
    return algorithm or None


def algorithm_of(formats: Iterable[str]) -> str:
    """What a checkpoint of modules of these formats is called: the one format, or MIXED_PRECISION."""
    found = set(formats)
    return found.pop() if len(found) == 1 else MIXED


def with_inputs(formats: Sequence[Format], quantized: bool) -> Format:
    """Of formats whose weights are stored alike, the one whose inputs are quantized, or not; else the first."""
    return next((format for format in formats if format.quantizes_inputs == quantized), formats[0])
