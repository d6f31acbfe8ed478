"""How far a model's output moves when one unit alone is quantized.

    unit      what engines run in one format: a scale group, or all experts of a layer
    kl[u, f]  forward KL from the unquantized model, nats a token, with unit u in format f (weights and inputs) and nothing else

Every pass runs the calibrated model once more. Layers before the unit's own give what they gave in the unquantized model,
where that is proved to change nothing, so units * formats passes over the text cost half of that. A streamed model
(qad.model.streamed) does not even read the layers that are skipped.

Shape suffixes: B windows of a batch, T tokens, H hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from qad.arms.arm import DYNAMIC
from qad.arms.selection import Selection
from qad.model.experts import split_experts
from qad.model.families import experts_of
from qad.model.names import names_of
from qad.numerics.formats import FORMATS
from qad.numerics.groups import fake_quantize_group
from qad.numerics.linear import quantize_input
from qad.numerics.nvfp4 import FrozenScales
from qad.numerics.scale_search import search_scales
from qad.numerics.widened import widened_linears
from qad.recipes.quantize import BF16
from qad.text.windows import Windows, WindowSet
from qad.training.calibrate import AmaxObserver, forward_to, group_input_scales
from qad.training.chunked import TeacherLogits, chunked_loss
from qad.training.head import Head, Weights

BATCH = 4  # windows of a pass


@dataclasses.dataclass(frozen=True)
class Unit:
    """name: the glob that takes all of it. modules: its members. weights: their number. share: of the unit that a token
    meets, below 1 for experts."""

    name: str
    modules: tuple[str, ...]
    weights: int
    share: float = 1.0

    def bytes(self, shapes: Mapping[str, tuple[int, int]], format: str) -> int:
        """Stored in a format."""
        if format == BF16:
            return 2 * self.weights
        return sum(FORMATS[format].bytes(*shapes[module]) for module in self.modules)


def units_of(selection: Selection, routed_share: float) -> list[Unit]:
    """In model order. routed_share: the share of a layer's experts that a token meets."""
    members: dict[str, list[str]] = {}
    for group in selection.groups:
        layer = experts_of(group[0])
        members.setdefault(f"{layer}.*" if layer else group[0], []).extend(group)
    found = []
    for name, modules in members.items():
        weights = sum(n * k for n, k in (selection.modules[module] for module in modules))
        found.append(Unit(name, tuple(modules), weights, routed_share if name.endswith(".*") else 1.0))
    return found


@dataclasses.dataclass(frozen=True)
class Treatment:
    """How an arm would quantize.

    weight_of: a module's weight [N, K] in the source.
    scales: of 4-bit weights, as `quantize.scales`.
    headroom: of inputs, as `calibrate.headroom`.
    """

    selection: Selection
    weight_of: Callable[[str], Tensor]
    scales: str = DYNAMIC
    headroom: float = 1.0
    _frozen: dict[tuple[str, str], FrozenScales] = dataclasses.field(default_factory=dict)

    def decoded(self, unit: Unit, format: str, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Module name -> its weight in a format, decoded, FP32 [N, K]."""
        for group in self.selection.rules.scale_groups(unit.modules):
            weights = {name: self.weight_of(name).to(device).float() for name in group}
            searches = self.scales != DYNAMIC and FORMATS[format].nvfp4_weights
            if searches and (group[0], format) not in self._frozen:
                self._frozen.update({(name, format): found for name, found in search_scales(weights, self.scales).items()})
            frozen = {name: self._frozen[name, format] for name in group} if searches else {}
            yield from fake_quantize_group(weights, frozen, format)

    def input_scales(self, model: Any, batches: Sequence[Windows], formats: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Format -> module -> input scale, as `calibrate` finds them on the same text. model: with split experts."""
        modules, device = list(self.selection.modules), next(model.parameters()).device
        with torch.no_grad(), AmaxObserver(model, modules) as observer, forward_to(model, modules) as forward:
            for batch in batches:
                counted = batch.counted_ST
                observer.counted_BT = None if counted.all() else counted.to(device)
                forward(**batch.model_inputs(device))
        found = {}
        for format in formats:
            whole = dataclasses.replace(self.selection, format=format, formats={})
            quantizes = FORMATS[format].quantizes_inputs
            found[format] = group_input_scales(observer.amax, whole, self.headroom) if quantizes else {}
        return found


@torch.no_grad()
def sensitivities(
    model: Any,
    treatment: Treatment,
    windows: WindowSet,
    units: Sequence[Unit],
    formats: Sequence[str],
    progress: Callable[[int], object] = lambda passes: None,
) -> dict[tuple[str, str], float]:
    """(unit's name, format) -> KL, nats a token.

    model: in its compute dtype, its output head's weight in place; its experts are split, in place.
    windows: all of them are read, as often as there are units and formats.
    """
    split_experts(model)
    head, device = Head.of(model), next(model.parameters()).device
    head = dataclasses.replace(head, output=Weights(head.weight_VH, head.bias_V))  # of the unquantized model, from here on
    with contextlib.ExitStack() as stack:
        stack.enter_context(widened_linears(device.type))
        passes = _Passes(model, head, windows)
        inputs = treatment.input_scales(model, passes.batches, formats)
        found = {}
        for unit in units:
            for format in formats:
                with _in_format(model, unit, format, treatment, inputs[format], head) as changed:
                    found[unit.name, format] = passes.kl(unit, changed)
                progress(1)
    return found


class _Passes:
    """The unquantized model's output on a text, and passes that are compared with it."""

    def __init__(self, model: Any, head: Head, windows: WindowSet) -> None:
        self.model, self.head = model, head
        self.device = next(model.parameters()).device
        self.batches = list(windows.batches(BATCH))
        self.tokens = sum(int(batch.counted_ST.sum()) for batch in self.batches)
        names = names_of(model)
        self._layers: dict[str, nn.Module] = {}
        self._outputs: list[dict[str, Any]] = [{} for _ in self.batches]
        layers = {n: m for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
        self._hidden: list[Tensor] = []
        for number, batch in enumerate(self.batches):
            handles = [
                layer.register_forward_hook(functools.partial(self._keep, number, names.module(name), layer))
                for name, layer in layers.items()
            ]
            self._hidden.append(self._run(batch))
            for handle in handles:
                handle.remove()
        if not self._skippable():
            self._layers = {}

    def _keep(self, number: int, name: str, layer: nn.Module, module: nn.Module, args: Any, output: Any) -> None:
        self._layers.setdefault(name, layer)
        self._outputs[number][name] = output

    def _skippable(self) -> bool:
        """Every layer but the last gives what it gave, and the model ends in the same bits."""
        with self._skipping(list(self._layers)[:-1], 0):
            return torch.equal(self._run(self.batches[0]), self._hidden[0])

    @contextlib.contextmanager
    def _skipping(self, layers: Sequence[str], number: int) -> Iterator[None]:
        given = [self._layers[name] for name in layers]
        for name, layer in zip(layers, given, strict=True):
            layer.forward = functools.partial(_given, self._outputs[number][name])
        try:
            yield
        finally:
            for layer in given:
                del layer.forward

    def kl(self, unit: Unit, head: Head) -> float:
        """Of the model as it is now, in which `unit` and nothing else was changed. head: its output head."""
        before = []
        for name in self._layers:
            if any(module.startswith(f"{name}.") for module in unit.modules):
                break
            before.append(name)
        total = 0.0
        for number, batch in enumerate(self.batches):
            with self._skipping(before, number):
                hidden_BTH = self._run(batch)
            counted_BT = batch.counted_ST.to(self.device)
            teacher = TeacherLogits(self._hidden[number][counted_BT], self.head)
            total += float(chunked_loss(hidden_BTH[counted_BT], head, teacher))
        return total / self.tokens

    def _run(self, batch: Windows) -> Tensor:
        hidden_BTH: Tensor = self.model.base_model(**batch.model_inputs(self.device)).last_hidden_state
        return hidden_BTH


def _given(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output


@contextlib.contextmanager
def _in_format(
    model: nn.Module, unit: Unit, format: str, treatment: Treatment, input_scales: Mapping[str, Tensor], head: Head
) -> Iterator[Head]:
    """The unit's weights decoded and its inputs quantized, as an arm of this format would have them; gives the output head."""
    handles, before, changed = [], {}, head
    names, like = names_of(model), head.weight_VH
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for name, decoded in treatment.decoded(unit, format, like.device):
        module = model.get_submodule(names.inner(name))
        before[name] = module.weight
        weight = nn.Parameter(decoded.to(like.dtype), requires_grad=False)
        quantize = functools.partial(quantize_input, input_scale=input_scales.get(name), format=format)
        handles.append(module.register_forward_pre_hook(functools.partial(_put, weight, quantize)))
        if module is output:
            changed = dataclasses.replace(head, output=Weights(weight, head.bias_V), quantize_input=quantize)
    try:
        yield changed
    finally:
        for handle in handles:
            handle.remove()
        for name, own in before.items():
            model.get_submodule(names.inner(name)).weight = own


def _put(weight: nn.Parameter, quantize: Callable[[Tensor], Tensor], module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    module.weight = weight  # here and not before: a streamed module reads its own first
    return quantize(args[0]), *args[1:]
