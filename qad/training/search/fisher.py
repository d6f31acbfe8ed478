"""The KL of each unit's formats from gradients: one backward pass a batch in place of a forward pass a choice.

    KL(p || p + d) = 1/2 d^T F d + O(d^3),    F = E[g g^T],  g the gradient of log p(y) for a y drawn from p

F is the Fisher information of the output. A unit that is quantized alone changes its own outputs by dy, so that

    kl[u, f] ~ 1/2 mean over tokens and draws of (sum over the unit's modules of g . dy)^2

where g . dy is taken token by token: what the changes of two tokens do together is left out. The model has to be loaded, with the
activations of a batch. On SmolLM2 it ranks as the KL itself does (Spearman .97, LOG.md).

Shape suffixes: T tokens, N outputs, K inputs of a module, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qad.errors import UsageError
from qad.model.experts import Expert, split_experts
from qad.model.names import names_of
from qad.numerics.linear import quantize_input
from qad.text.windows import Windows, WindowSet
from qad.training.head import Head
from qad.training.search.sensitivity import BATCH, Treatment, Unit

_DRAWS = 2  # of every token's next one
_CHUNK = 256  # tokens whose logits exist at one time


def estimated(
    model: Any,
    treatment: Treatment,
    windows: WindowSet,
    units: Sequence[Unit],
    formats: Sequence[str],
    seed: int,
    progress: Callable[[int], object] = lambda passes: None,
) -> dict[tuple[str, str], float]:
    """(unit's name, format) -> estimated KL, nats a token. As qad.training.search.sensitivity.sensitivities, of a loaded model.

    Raises UsageError where the output head is among the units: what it is given has no gradient here.
    """
    split_experts(model)
    model.requires_grad_(False)
    head, names = Head.of(model), names_of(model)
    modules = {name: names.inner(name) for unit in units for name in unit.modules}
    if any(model.get_submodule(inner) is model.get_output_embeddings() for inner in modules.values()):
        raise UsageError("quantize.search.by gradient does not measure the output head: take by kl, or leave it out of include")
    batches = list(windows.batches(BATCH))
    inputs = treatment.input_scales(model, batches, formats)
    generator = torch.Generator(head.weight_VH.device).manual_seed(seed)
    total = {(unit.name, format): 0.0 for unit in units for format in formats}
    for batch in batches:
        seen = _Seen(model, modules, batch)
        draws = [seen.gradients(head, generator, draw < _DRAWS - 1) for draw in range(_DRAWS)]
        for unit in units:
            for format in formats:
                changes = {
                    name: seen.change(name, weight_NK, quantize_input(seen.inputs[name], inputs[format].get(name), format))
                    for name, weight_NK in treatment.decoded(unit, format, head.weight_VH.device)
                    if name in seen.inputs
                }
                for gradients in draws:
                    total[unit.name, format] += 0.5 * float((seen.products(gradients, changes) ** 2).sum())
                progress(1)
    counted = sum(int(batch.counted_ST.sum()) for batch in batches)
    return {choice: value / (_DRAWS * counted) for choice, value in total.items()}


class _Seen:
    """One forward pass of a batch. inputs: of every module that a token reached, as given. Padding has no gradient: nothing that
    counts sees it."""

    def __init__(self, model: Any, modules: Mapping[str, str], batch: Windows) -> None:
        self.inputs: dict[str, Tensor] = {}
        self._model, self._modules, self._tokens = model, modules, batch.input_ids_ST.numel()
        self._outputs: dict[str, Tensor] = {}
        self._positions: dict[str, Tensor] = {}
        handles = [self._submodule(name).register_forward_hook(functools.partial(self._keep, name)) for name in modules]
        embedding = model.get_input_embeddings()
        handles.append(embedding.register_forward_hook(lambda module, args, output: output.requires_grad_()))
        device = next(model.parameters()).device
        with torch.enable_grad():
            self._hidden_BTH: Tensor = model.base_model(**batch.model_inputs(device)).last_hidden_state
        for handle in handles:
            handle.remove()
        self._counted_BT = batch.counted_ST.to(device)

    def _submodule(self, name: str) -> nn.Module:
        module: nn.Module = self._model.get_submodule(self._modules[name])
        return module

    def _keep(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        parent = self._model.get_submodule(self._modules[name].rpartition(".")[0])
        if isinstance(parent, Expert) and parent.positions_t is not None:
            self._positions[name] = parent.positions_t
        self.inputs[name], self._outputs[name] = args[0].detach(), output

    def gradients(self, head: Head, generator: torch.Generator, again: bool) -> dict[str, Tensor]:
        """Module -> gradient in its output of the sum of log p(y) over what counts, y drawn anew. again: another one follows."""
        hidden_tH = self._hidden_BTH.detach()[self._counted_BT]
        gradient_BTH = torch.zeros_like(self._hidden_BTH)
        parts = []
        for part_tH in hidden_tH.split(_CHUNK):
            part_tH = part_tH.requires_grad_()
            with torch.enable_grad():
                log_p_tV = head.logits(part_tH).log_softmax(-1)
                y_t1 = torch.multinomial(log_p_tV.detach().exp(), 1, generator=generator)
                (gradient_tH,) = torch.autograd.grad(log_p_tV.gather(1, y_t1).sum(), part_tH)
            parts.append(gradient_tH)
        gradient_BTH[self._counted_BT] = torch.cat(parts)
        outputs = list(self._outputs.values())
        found = torch.autograd.grad(self._hidden_BTH, outputs, gradient_BTH, retain_graph=again, allow_unused=True)
        return {name: gradient for name, gradient in zip(self._outputs, found, strict=True) if gradient is not None}

    def change(self, name: str, weight_NK: Tensor, quantized: Tensor) -> Tensor:
        """Of a module's output, by another weight and a quantized input."""
        before = self._submodule(name).weight
        assert isinstance(before, Tensor)
        x = self.inputs[name]
        return F.linear(quantized, weight_NK.to(x.dtype)) - F.linear(x, before)

    def products(self, gradients: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> Tensor:
        """g . dy of a unit, FP32, one a token."""
        total_T = torch.zeros(self._tokens, device=self._hidden_BTH.device)
        for name, change in changes.items():
            if name in gradients:
                product_t = (gradients[name].float() * change.float()).sum(-1).flatten()
                positions_t = self._positions.get(name)
                total_T = total_T + product_t if positions_t is None else total_T.index_add_(0, positions_t, product_t)
        return total_T
