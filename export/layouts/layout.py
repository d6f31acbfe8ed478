"""How a quantized Linear lies in a checkpoint: the layouts name and place one quantized form, none computes another.

role          modelopt          compressed-tensors     dtype     shape
codes         weight            weight_packed          U8        [N, K/2]   even element in the low nibble
block scales  weight_scale      weight_scale           F8_E4M3   [N, K/16]  row-major
global scale  weight_scale_2    weight_global_scale    F32       [] / [1]   decode scale / its reciprocal
input scale   input_scale       input_global_scale     F32       [] / [1]   NVFP4 (W4A4) only; decode scale / its reciprocal
KV cache      k_proj.k_scale    k_scale                F32       [] / [1]   of the attention module, v alike

FP8 modules have the same names in both: weight F8_E4M3 [N, K], weight_scale and input_scale F32 [] / [1], decode scales.
The names, dtypes and shapes are those of the formats' records (qad.numerics.formats).

The reciprocal is FP32, rounded to nearest. A scale whose significand is below sqrt(2) comes back from there and back as
it was; another one comes back within one ulp, and to the same bits from then on.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qad.errors import UsageError
from qad.numerics.formats import FORMATS, KV_FORMATS, NVFP4, Format, InLayout, Quantized, Stored
from qad.untrusted.safetensors_header import Entry

ROTARY = "inv_freq"  # a buffer that old checkpoints store
KV_LEAVES = ("k_scale", "v_scale")


@dataclasses.dataclass(frozen=True)
class Layout:
    """name: the word for `--layout`, for `quant_method`, and in the formats' records. scalar: shape of global and input
    scales. kv_in_projection: KV scales lie in k_proj and v_proj, not in the attention module."""

    name: str
    scalar: tuple[int, ...]
    kv_in_projection: bool

    def of(self, format: str) -> InLayout:
        """What the layout calls a format."""
        return FORMATS[format].layouts[self.name]

    def leaf(self, format: str, role: str) -> str:
        """Last part of the name of a module's tensor; "" for a role that the format does not know."""
        return self.of(format).leaves.get(role, "")

    def leaves_of(self, format: str = NVFP4) -> tuple[str, ...]:
        """Last parts of all tensor names of a module of a format, the weight's first, without its bias."""
        return tuple(self.leaf(format, tensor.role) for tensor in FORMATS[format].tensors)

    def scalars_of(self, format: str) -> tuple[str, ...]:
        """Those of one element: every member of a scale group stores the same."""
        return tuple(self.leaf(format, tensor.role) for tensor in FORMATS[format].tensors if tensor.per is None)

    def find(self, leaf: str, dtype: str) -> tuple[Format, Stored] | None:
        """The first format that has a tensor of this name and dtype, and which of its tensors it is."""
        found = ((format, tensor) for format in FORMATS.values() for tensor in format.tensors)
        return next((f for f in found if f[1].dtype == dtype and self.leaf(f[0].name, f[1].role) == leaf), None)

    def entries(self, module: str, n: int, k: int, format: str) -> list[Entry]:
        """What one quantized module [n, k] stores."""
        return [
            Entry(
                f"{module}.{self.leaf(format, tensor.role)}",
                tensor.dtype,
                self.scalar if tensor.per is None else tensor.shape(n, k),
            )
            for tensor in FORMATS[format].tensors
        ]

    def tensors(self, module: str, q: Quantized, input_scale: Tensor | None, format: str) -> dict[str, Tensor]:
        """The tensors of `entries`, by name. input_scale: decode scale; None leaves it out."""
        given = (*q.tensors, input_scale)
        stored = {}
        for place, tensor in zip(FORMATS[format].tensors, given, strict=False):
            if tensor is not None:
                name = f"{module}.{self.leaf(format, place.role)}"
                stored[name] = self.store_scale(tensor, format) if place.per is None else tensor
        return stored

    def store_scale(self, decode_scale: Tensor, format: str = NVFP4) -> Tensor:
        """A global or input scale of one element, FP32 as this layout stores it. An FP64 one keeps all bits of a reciprocal; of
        an FP32 one the reciprocal is what FP32 would give (53 bits are enough for rounding twice)."""
        scale = decode_scale.double().reshape(self.scalar)
        return (1.0 / scale if self.of(format).reciprocal else scale).float()

    def decode_scale(self, stored: Tensor, format: str = NVFP4) -> Tensor:
        """The decode scale of a stored global or input scale, FP32 scalar."""
        scale = stored.float().reshape(())
        return 1.0 / scale if self.of(format).reciprocal else scale

    def kv_scale(self, attention: str, cache: str) -> str:
        """Full name of a KV cache scale. cache: k or v."""
        return f"{attention}.{cache}_proj.{cache}_scale" if self.kv_in_projection else f"{attention}.{cache}_scale"


MODELOPT = Layout("modelopt", (), kv_in_projection=True)
COMPRESSED_TENSORS = Layout("compressed-tensors", (1,), kv_in_projection=False)
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS)}


def require_kv_form(format: str | None, layout: Layout, what: str) -> None:
    """Raises UsageError where a layout has no words for a KV cache of this format."""
    if format is not None and (format not in KV_FORMATS or layout.name not in KV_FORMATS[format].schemes):
        knows = ", ".join(name for name, known in KV_FORMATS.items() if layout.name in known.schemes)
        raise UsageError(f"{what} has a {format} KV cache, and the {layout.name} layout knows {knows}: choose another of the two")


def scale_leaves() -> frozenset[str]:
    """Last parts of the names of all scales, of every format in every layout."""
    return frozenset(leaf for layout in LAYOUTS.values() for format in FORMATS for leaf in layout.leaves_of(format)[1:])


def code_dtypes() -> frozenset[str]:
    """Dtypes of the codes of every format: a weight of one of them is quantized."""
    return frozenset(format.tensors[0].dtype for format in FORMATS.values())


def bits_of(tensor: Tensor) -> Tensor:
    """Its bytes, U8 [bytes]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
