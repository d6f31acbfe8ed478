"""Calibration: how large the inputs of the selected Linears, and K and V, get in the unquantized model.

input_scale = headroom * amax / (largest magnitude of the format: 6 * 448 for NVFP4, 448 for FP8). FP32, frozen from here
on, one value per group of input scales
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qad.arms.kv_cache import CALIBRATES, OFF, KVObserver, attentions, kv_scales
from qad.arms.selection import Selection
from qad.errors import SourceError
from qad.model.experts import Expert, split_experts
from qad.model.families import experts_of
from qad.model.names import names_of
from qad.numerics.formats import FORMATS
from qad.numerics.widened import widened_linears
from qad.text.windows import WindowSet
from qad.training.ranks.group import here
from qad.training.ranks.shards import gathered


@dataclasses.dataclass(frozen=True)
class Calibration:
    """input_scales: by module, equal within a group; empty for weight-only formats. kv_scales: `ATTENTION.k_scale` and
    `.v_scale`; empty where the policy calibrates none. without_tokens: experts that saw no token, whose input scale is that
    of the layer's other experts."""

    input_scales: dict[str, Tensor]
    kv_scales: dict[str, Tensor]
    without_tokens: tuple[str, ...]


class AmaxObserver:
    """Largest |input| of each named Linear, FP32, over everything the model is fed inside the `with` block.

    counted_BT: bool [B, T], which tokens of the next forward pass are real; None where all are."""

    def __init__(self, model: nn.Module, modules: list[str]) -> None:
        self.amax: dict[str, Tensor] = {}
        self.counted_BT: Tensor | None = None
        self._model, self._modules = model, modules
        self._handles: list[Any] = []

    def __enter__(self) -> AmaxObserver:
        names = names_of(self._model)
        for name in self._modules:
            inner = names.inner(name)
            hook = self._hook(name, self._model.get_submodule(inner.rpartition(".")[0]))
            self._handles.append(self._model.get_submodule(inner).register_forward_pre_hook(hook))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str, parent: nn.Module) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def observe(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs = real_inputs(args[0].detach(), self.counted_BT, parent)
            if not inputs.numel():
                return
            amax = inputs.abs().amax().float()
            seen = self.amax.get(name)
            self.amax[name] = amax if seen is None else torch.maximum(seen, amax)

        return observe


def real_inputs(x: Tensor, counted_BT: Tensor | None, parent: nn.Module) -> Tensor:
    """Of a Linear's input, what belongs to the tokens that are real; all of it where counted_BT is None. parent: the module
    that holds the Linear, which knows an expert's tokens."""
    if counted_BT is None:
        return x
    counted_t = counted_BT.flatten()
    expert = parent.positions_t if isinstance(parent, Expert) else None
    return x.flatten(0, -2)[counted_t if expert is None else counted_t[expert]]


@torch.no_grad()
def calibrate(
    model: Any,
    selection: Selection,
    windows: WindowSet,
    headroom: float = 1.0,
    progress: Callable[[int], object] = lambda tokens: None,
    batch_size: int = 8,
    kv_cache: str = OFF,
) -> Calibration:
    """Input scales of every selected module, and KV scales under the policy `kv_cache` (qad.arms.kv_cache).

    Experts of the model are split, in place. Packed windows hold no padding; where a caller adds some it is not observed.
    A module that sees only zeros gets the scale of amax 1.0. Experts without a token are warned about.
    Raises SourceError for activations that are not finite, and for a selected module that the forward pass never reached,
    be it all experts of a layer; UsageError for a model without the K and V that a policy asks for.
    """
    modules = selection.with_input_scale
    caches = attentions(model) if kv_cache in CALIBRATES else []
    if not modules and not caches:
        return Calibration({}, {}, ())
    split_experts(model)
    device = next(model.parameters()).device
    with contextlib.ExitStack() as stack:
        observer = stack.enter_context(AmaxObserver(model, modules))
        kv_observer = stack.enter_context(KVObserver(model, caches)) if caches else None
        forward = stack.enter_context(forward_to(model, modules))
        stack.enter_context(widened_linears(device.type))
        batches, ranks = torch.arange(len(windows)).split(batch_size), here()
        for number in ranks.part(range(len(batches))):
            batch = windows.at(batches[number or 0])  # a rank with fewer sees the first again, which changes no maximum
            counted = batch.counted_ST
            observer.counted_BT = None if counted.all() else counted.to(device)
            if kv_observer:
                kv_observer.counted_BT = observer.counted_BT
            gathered(model, functools.partial(forward, **batch.model_inputs(device)))
            progress(batch.tokens * ranks.size)
    observer.amax = _of_all(observer.amax, modules)
    if kv_observer:
        kv_observer.amax = _of_all(kv_observer.amax, [f"{name}.{cache}_scale" for name in caches for cache in ("k", "v")])
    return Calibration(  # the scales first: where nothing was seen, an error says so
        group_input_scales(observer.amax, selection, headroom) if modules else {},
        kv_scales(kv_observer.amax, caches, kv_cache) if kv_observer else {},
        _without_tokens(observer.amax, modules),
    )


def _of_all(amax: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The largest of all ranks, of those among `names` that any of them saw."""
    ranks = here()
    if ranks.alone or not names:
        return amax
    unseen = torch.tensor(-1.0, device=ranks.device)
    every = torch.stack([amax.get(name, unseen).float().to(ranks.device) for name in names])
    largest = ranks.largest(every.nan_to_num(nan=float("inf")))
    return {name: value for name, value in zip(names, largest, strict=True) if value >= 0}


@contextlib.contextmanager
def forward_to(model: Any, modules: list[str]) -> Iterator[Callable[..., object]]:
    """What runs the model up to the last module: without the output head, unless that is observed too. Its input is cut to
    one token after the observer has seen it, so that no logits of whole windows exist."""
    head = model.get_output_embeddings()
    if head is None or not any(model.get_submodule(names_of(model).inner(name)) is head for name in modules):
        yield model.base_model
        return
    handle = head.register_forward_pre_hook(lambda module, args: (args[0][:, :1], *args[1:]))
    try:
        yield model
    finally:
        handle.remove()


def _without_tokens(amax: dict[str, Tensor], modules: list[str]) -> tuple[str, ...]:
    experts = tuple(dict.fromkeys(name.rpartition(".")[0] for name in modules if name not in amax))
    if experts:
        warnings.warn(
            f"{len(experts)} experts saw no token in calibration, first {experts[0]}: they take the input scales of their "
            "layer's other experts; more or other calibration text would reach them",
            stacklevel=3,
        )
    return experts


def group_input_scales(amax: dict[str, Tensor], selection: Selection, headroom: float) -> dict[str, Tensor]:
    """One input scale per group of input scales, from the amax of its members. Experts may be unseen, all of a layer not."""
    scales: dict[str, Tensor] = {}
    quantized = set(selection.with_input_scale)
    for group in selection.input_groups:
        if group[0] not in quantized:
            continue
        seen = [amax[name] for name in group if name in amax]
        unseen = [name for name in group if name not in amax]
        if unseen and (not seen or experts_of(unseen[0]) is None):
            raise SourceError(f"calibration never reached {unseen[0]}: exclude it, or give text that does")
        largest = torch.stack(seen).amax()
        if not torch.isfinite(largest):
            raise SourceError(f"the input of {group[0]} is {largest.item()} in the BF16 model: the source is damaged")
        rule = FORMATS[selection.format_of(group[0])].numerics()
        scale = rule.global_scale_from_amax(largest * headroom).cpu()
        scales.update(dict.fromkeys(group, scale))
    return scales
