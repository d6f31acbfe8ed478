"""Where a model's channels can be evened out, and by how much (qad.training.balance)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from qad.arms.selection import Selection
from qad.model.built_config import built_config
from qad.model.source import Checkpoint
from qad.numerics.formats import FORMATS

_ATTENTION = "self_attn.q_proj.weight"
_FARTHEST = 2.0**-12  # of the largest channel: one that is hardly ever there is not made as large as the others


@dataclasses.dataclass(frozen=True)
class Site:
    """What multiplies the input channels of Linears beside each other.

    kind: the last parts of the names, such as `input_layernorm -> q_proj k_proj v_proj`.
    grown: tensors whose rows, or elements, take s.
    shrunk: weights whose columns lose it.
    repeat: (heads, times): of K input channels, each of so many heads stands for so many query heads.
    """

    kind: str
    grown: tuple[str, ...]
    shrunk: tuple[str, ...]
    repeat: tuple[int, int] = (1, 1)

    @property
    def observed(self) -> str:
        """The module whose inputs tell the channels."""
        return self.shrunk[0].removesuffix(".weight")


def sites_of(source: Checkpoint, selection: Selection) -> list[Site]:
    """Sites whose consumers are all there, one of them at least in 4 bits, by the usual names of a layer's parts."""
    found: list[Site] = []
    four_bits = {m for m in selection.modules if FORMATS[selection.format_of(m)].nvfp4_weights}
    heads = getattr(getattr(built_config(source.config), "get_text_config", lambda: None)(), "num_key_value_heads", None)
    layers = [
        name.removesuffix("self_attn.q_proj.weight") for name in source.tensors if name.endswith(".self_attn.q_proj.weight")
    ]
    for layer in layers:
        norm = (
            "pre_feedforward_layernorm"
            if f"{layer}pre_feedforward_layernorm.weight" in source.tensors
            else "post_attention_layernorm"
        )
        for above, below in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (norm, ("mlp.gate_proj", "mlp.up_proj")),
            ("mlp.up_proj", ("mlp.down_proj",)),
            ("self_attn.v_proj", ("self_attn.o_proj",)),
        ):
            names = [f"{layer}{module}.weight" for module in (above, *below)]
            if not source.tensors.keys() >= set(names) or not four_bits & {name.removesuffix(".weight") for name in names[1:]}:
                continue
            bias = f"{layer}{above}.bias"
            grown = (names[0], bias) if bias in source.tensors else (names[0],)
            rows, columns = source.tensors[names[0]].shape[0], source.tensors[names[1]].shape[1]
            repeat = (1, 1)
            if rows != columns:
                if not heads or columns % rows or rows % heads:
                    continue
                repeat = (int(heads), columns // rows)
            kind = f"{above.rpartition('.')[2]} -> {' '.join(module.rpartition('.')[2] for module in below)}"
            found.append(Site(kind, grown, tuple(names[1:]), repeat))
    return found


def exponent_of(power_K: Tensor, repeat: tuple[int, int]) -> Tensor:
    """log2 s, int32, of the channels that are grown. power_K: sums of squares of the inputs, FP64; those of the query heads that
    read one head of v are taken together."""
    heads, times = repeat
    power = power_K.view(heads, times, -1).mean(1).flatten()
    size = power.sqrt()
    size = size.clamp(min=float(size.max()) * _FARTHEST) if size.max() > 0 else torch.ones_like(size)
    wanted = -size.log2() / 2
    return (wanted - wanted.mean()).round().int()


@dataclasses.dataclass(frozen=True)
class Factor:
    """Powers of two, FP32, that a tensor is multiplied by: rows_N (of a vector its elements), columns_K of a weight [N, K]."""

    rows_N: Tensor | None = None
    columns_K: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Exact but where an exponent ends. In the tensor's dtype."""
        value = tensor.float()
        if self.rows_N is not None:
            rows_N = self.rows_N.to(value.device)
            value = value * (rows_N if value.dim() == 1 else rows_N[:, None])
        if self.columns_K is not None:
            value = value * self.columns_K.to(value.device)
        return value.to(tensor.dtype)


def factors_of(sites: Collection[Site], exponents: Mapping[str, Tensor]) -> dict[str, Factor]:
    """By tensor. A weight may be grown by one site and shrunk by another."""
    factors: dict[str, Factor] = {}
    for site in sites:
        exponent = exponents[site.observed]
        heads, times = site.repeat
        across = exponent.view(heads, 1, -1).expand(-1, times, -1).flatten()
        for name in site.grown:
            factors[name] = dataclasses.replace(factors.get(name, Factor()), rows_N=torch.exp2(exponent.float()))
        for name in site.shrunk:
            factors[name] = dataclasses.replace(factors.get(name, Factor()), columns_K=torch.exp2(-across.float()))
    return factors
