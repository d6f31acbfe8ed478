"""How a quantized Linear lies in a checkpoint: the layouts name and place one quantized form, none computes another.

role          modelopt          compressed-tensors     dtype     shape
codes         weight            weight_packed          U8        [N, K/2]   even element in the low nibble
block scales  weight_scale      weight_scale           F8_E4M3   [N, K/16]  row-major
global scale  weight_scale_2    weight_global_scale    F32       [] / [1]   decode scale / its reciprocal
input scale   input_scale       input_global_scale     F32       [] / [1]   NVFP4 (W4A4) only; decode scale / its reciprocal
KV cache      k_proj.k_scale    k_scale                F32       [] / [1]   of the attention module, v alike

The reciprocal is FP32, rounded to nearest. A scale whose significand is below sqrt(2) comes back from there and back as
it was; another one comes back within one ulp, and to the same bits from then on.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from export.safetensors_writer import Entry
from qad.nvfp4 import BLOCK_SIZE, QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """name: the word for `--layout` and for `quant_method`. codes ... input_scale: last parts of tensor names.

    scalar: shape of global and input scales. reciprocal: they are stored as 1 / decode scale.
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

    def entries(self, module: str, n: int, k: int, activations: bool) -> list[Entry]:
        """What one quantized module [n, k] stores; `activations`: with an input scale."""
        stored = [
            Entry(f"{module}.{self.codes}", "U8", (n, k // 2)),
            Entry(f"{module}.{self.block_scale}", "F8_E4M3", (n, k // BLOCK_SIZE)),
            Entry(f"{module}.{self.global_scale}", "F32", self.scalar),
        ]
        return [*stored, Entry(f"{module}.{self.input_scale}", "F32", self.scalar)] if activations else stored

    def tensors(self, module: str, q: QuantizedTensor, input_scale: Tensor | None) -> dict[str, Tensor]:
        """The tensors of `entries`, by name. input_scale: decode scale."""
        stored = {
            f"{module}.{self.codes}": q.packed,
            f"{module}.{self.block_scale}": q.block_scale,
            f"{module}.{self.global_scale}": self.store_scale(q.global_scale),
        }
        if input_scale is not None:
            stored[f"{module}.{self.input_scale}"] = self.store_scale(input_scale)
        return stored

    def store_scale(self, decode_scale: Tensor) -> Tensor:
        """A global or input scale, FP32 of one element, as this layout stores it."""
        scale = decode_scale.float().reshape(self.scalar)
        return 1.0 / scale if self.reciprocal else scale

    def decode_scale(self, stored: Tensor) -> Tensor:
        """The decode scale of a stored global or input scale, FP32 scalar."""
        scale = stored.float().reshape(())
        return 1.0 / scale if self.reciprocal else scale

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
SCALES = frozenset(scale for layout in LAYOUTS.values() for scale in layout.scales)
