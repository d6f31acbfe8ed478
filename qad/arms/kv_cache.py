"""The quantized KV cache: what K and V of each attention get to be, and the scales that follow by policy.

    off            K and V stay in the compute dtype
    calibrated     scale = amax / 448, one for K and one for V of each attention      FP32
    at_least_one   max(scale, 1): small caches keep their distance to FP8's smallest numbers
    cast           no scales; the engine uses 1.0, and whatever is larger than 448 saturates

Scales are the same for FP8 and for NVFP4 (qad.numerics.formats.KVFormat says why). Only the engine quantizes the cache; a scale
of a policy and the format's name are all that an export can say about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qad.errors import SourceError, UsageError
from qad.model.families import family_of
from qad.model.names import names_of

OFF, CALIBRATED, AT_LEAST_ONE, CAST = "off", "calibrated", "at_least_one", "cast"
CALIBRATES = (CALIBRATED, AT_LEAST_ONE)
_E4M3_MAX = 448.0


def attentions(model: nn.Module) -> list[str]:
    """Names in the checkpoint of the attention modules whose cache has scales of its own: those with a k_proj and a v_proj,
    outside of towers.

    Raises UsageError where there is none, or where a module has a k_proj only: engines read K's and V's scales in pairs.
    """
    leaves: dict[str, set[str]] = {}
    family = family_of(getattr(model, "config", None) or {})
    names = names_of(model)
    for inner, _ in model.named_modules():
        parent, _, leaf = names.module(inner).rpartition(".")
        if family.never_quantized(parent):
            continue
        leaves.setdefault(parent, set()).add(leaf)
    found = [parent for parent, children in leaves.items() if "k_proj" in children]
    odd = next((parent for parent in found if "v_proj" not in leaves[parent]), None)
    if not found or odd is not None:
        what = "no attention has a k_proj and a v_proj" if odd is None else f"{odd} has a k_proj but no v_proj"
        raise UsageError(f"{what}, which a scaled KV cache needs: set quantize.kv_cache to off")
    return found


class KVObserver:
    """Largest |K| and |V| of each attention as they go into the cache (after rotary embedding), FP32, over everything the
    model is fed inside the `with` block. amax: `ATTENTION.k_scale` and `ATTENTION.v_scale` -> amax.

    counted_BT: bool [B, T], which tokens of the next forward pass are real; None where all are. Raises SourceError where
    the model's attention does not go through transformers' interface.
    """

    def __init__(self, model: Any, names: list[str]) -> None:
        self.amax: dict[str, Tensor] = {}
        self.counted_BT: Tensor | None = None
        self._names = {id(model.get_submodule(names_of(model).inner(name))): name for name in names}
        self._implementation = str(model.config._attn_implementation)

    def __enter__(self) -> KVObserver:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self._implementation not in ALL_ATTENTION_FUNCTIONS:
            raise SourceError(
                f"K and V cannot be observed under {self._implementation!r} attention: set quantize.kv_cache to off"
            )
        self._original: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self._implementation]
        ALL_ATTENTION_FUNCTIONS[self._implementation] = self._observe
        return self

    def __exit__(self, *exc: object) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS[self._implementation] = self._original

    def _observe(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = self._names.get(id(module))
        if name is not None:
            for cache, states_BNTD in (("k", key), ("v", value)):
                self._see(f"{name}.{cache}_scale", states_BNTD.detach())
        return self._original(module, query, key, value, *args, **kwargs)

    def _see(self, name: str, states_BNTD: Tensor) -> None:
        if self.counted_BT is not None:
            states_BNTD = states_BNTD.transpose(1, 2)[self.counted_BT]
        if states_BNTD.numel():
            amax = states_BNTD.abs().amax().float()
            seen = self.amax.get(name)
            self.amax[name] = amax if seen is None else torch.maximum(seen, amax)


def kv_scales(amax: dict[str, Tensor], names: list[str], policy: str) -> dict[str, Tensor]:
    """`ATTENTION.k_scale` and `ATTENTION.v_scale` -> FP32 scalar, under a policy that calibrates. A cache that sees only
    zeros gets the scale of amax 1.0. Raises SourceError for K or V that are not finite or were never seen."""
    scales = {}
    for name in (f"{attention}.{cache}_scale" for attention in names for cache in ("k", "v")):
        if name not in amax:
            raise SourceError(
                f"calibration never saw what {name} is for: give text that reaches it, or set quantize.kv_cache to off"
            )
        if not torch.isfinite(amax[name]):
            raise SourceError(f"{name} would be made from {amax[name].item()} in the BF16 model: the source is damaged")
        scale = torch.where(amax[name] > 0, amax[name], 1.0).cpu() / _E4M3_MAX
        scales[name] = scale.clamp(min=1.0) if policy == AT_LEAST_ONE else scale
    return scales
