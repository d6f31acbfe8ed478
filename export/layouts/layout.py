"""How a quantized Linear lies in a checkpoint: the layouts name and place one quantized form, none computes another.

role          modelopt          compressed-tensors     dtype     shape
codes         weight            weight_packed          U8        [N, K/2]   even element in the low nibble
block scales  weight_scale      weight_scale           F8_E4M3   [N, K/16]  row-major
global scale  weight_scale_2    weight_global_scale    F32       [] / [1]   decode scale / its reciprocal
input scale   input_scale       input_global_scale     F32       [] / [1]   NVFP4 (W4A4) only; decode scale / its reciprocal
KV cache      k_proj.k_scale    k_scale                F32       [] / [1]   of the attention module, v alike

FP8 modules have the same names in both: weight F8_E4M3 [N, K], weight_scale and input_scale F32 [] / [1], decode scales.

The reciprocal is FP32, rounded to nearest. A scale whose significand is below sqrt(2) comes back from there and back as
it was; another one comes back within one ulp, and to the same bits from then on.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from export.files.safetensors_writer import Entry
from qad.numerics.formats import FORMATS, FP8, NVFP4, quantizes_activations
from qad.numerics.fp8 import Fp8Tensor
from qad.numerics.groups import Quantized
from qad.numerics.nvfp4 import BLOCK_SIZE

_FP8_LEAVES = ("weight", "weight_scale", "input_scale")


@dataclasses.dataclass(frozen=True)
class Layout:
    """name: the word for `--layout` and for `quant_method`. codes ... input_scale: last parts of the tensor names of 4-bit
    modules.

    scalar: shape of global and input scales. reciprocal: they are stored as 1 / decode scale, but those of FP8 are not.
    """

    name: str
    codes: str
    block_scale: str
    global_scale: str
    input_scale: str
    scalar: tuple[int, ...]
    reciprocal: bool

    @property
    def scales(self) -> tuple[str, str, str]:
        return self.block_scale, self.global_scale, self.input_scale

    @property
    def leaves(self) -> tuple[str, str, str, str]:
        return self.codes, *self.scales

    def leaves_of(self, format: str) -> tuple[str, ...]:
        """Last parts of all tensor names of a module of a format, the weight's first, without its bias."""
        leaves = _FP8_LEAVES if format == FP8 else self.leaves
        return leaves if quantizes_activations(format) else leaves[:-1]

    def scalars_of(self, format: str) -> tuple[str, ...]:
        """Those of one element: every member of a scale group stores the same."""
        return self.leaves_of(format)[1 if format == FP8 else 2 :]

    def entries(self, module: str, n: int, k: int, format: str) -> list[Entry]:
        """What one quantized module [n, k] stores."""
        if format == FP8:
            weight = Entry(f"{module}.weight", "F8_E4M3", (n, k))
            return [weight, *(Entry(f"{module}.{leaf}", "F32", self.scalar) for leaf in self.scalars_of(FP8))]
        stored = [
            Entry(f"{module}.{self.codes}", "U8", (n, k // 2)),
            Entry(f"{module}.{self.block_scale}", "F8_E4M3", (n, k // BLOCK_SIZE)),
            Entry(f"{module}.{self.global_scale}", "F32", self.scalar),
        ]
        with_input = quantizes_activations(format)
        return [*stored, Entry(f"{module}.{self.input_scale}", "F32", self.scalar)] if with_input else stored

    def tensors(self, module: str, q: Quantized, input_scale: Tensor | None) -> dict[str, Tensor]:
        """The tensors of `entries`, by name. input_scale: decode scale."""
        if isinstance(q, Fp8Tensor):
            weight, *scales = (f"{module}.{leaf}" for leaf in _FP8_LEAVES)
            decode = zip(scales, (q.scale, input_scale), strict=True)
            return {weight: q.values} | {name: s.float().reshape(self.scalar) for name, s in decode if s is not None}
        stored = {
            f"{module}.{self.codes}": q.packed,
            f"{module}.{self.block_scale}": q.block_scale,
            f"{module}.{self.global_scale}": self.store_scale(q.global_scale),
        }
        if input_scale is not None:
            stored[f"{module}.{self.input_scale}"] = self.store_scale(input_scale)
        return stored

    def store_scale(self, decode_scale: Tensor, format: str = NVFP4) -> Tensor:
        """A global or input scale, FP32 of one element, as this layout stores it."""
        scale = decode_scale.float().reshape(self.scalar)
        return 1.0 / scale if self.reciprocal and format != FP8 else scale

    def decode_scale(self, stored: Tensor, format: str = NVFP4) -> Tensor:
        """The decode scale of a stored global or input scale, FP32 scalar."""
        scale = stored.float().reshape(())
        return 1.0 / scale if self.reciprocal and format != FP8 else scale

    def kv_scale(self, attention: str, cache: str) -> str:
        """Full name of a KV cache scale. cache: k or v."""
        return f"{attention}.{cache}_scale" if self.reciprocal else f"{attention}.{cache}_proj.{cache}_scale"


MODELOPT = Layout("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", (), reciprocal=False)
COMPRESSED_TENSORS = Layout(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    (1,),
    reciprocal=True,
)
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS)}
SCALES = frozenset(leaf for layout in LAYOUTS.values() for format in FORMATS for leaf in layout.leaves_of(format)[1:])
