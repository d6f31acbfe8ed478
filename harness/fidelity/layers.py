"""Where inside the model the distance from the teacher arises: hidden states, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.records.record import LayerDistance
from qad.errors import DataError
from qad.text.sight import Seen


def measure_layers(
    students: Mapping[str, nn.Module],
    teacher: nn.Module,
    sequences: Sequence[tuple[str, Tensor]],
    seen: Sequence[Seen | None] = (),
) -> dict[str, list[LayerDistance]]:
    """Relative squared error of the hidden states after the embedding and after every layer, over all tokens of `sequences`,
    (cluster, int64 [T]) pairs: sum |h_student - h_teacher|^2 / sum |h_teacher|^2, in FP32.

    seen: what goes with each sequence, where any shows images.
    The last entry is what the head sees: the final norm is in it. Raises DataError where the models have unlike layers.
    """
    errors: dict[str, Tensor] = {}
    power: Tensor | None = None
    with torch.no_grad():
        for number, (_, ids_T) in enumerate(sequences):
            beside = seen[number] if seen else None
            theirs = _hidden(teacher, ids_T, beside)
            norm_L = torch.stack([(h.float() ** 2).sum().double().cpu() for h in theirs])
            power = norm_L if power is None else power + norm_L
            for name, student in students.items():
                ours = _hidden(student, ids_T, beside)
                if [h.shape for h in ours] != [h.shape for h in theirs]:
                    raise DataError(f"{name} has other layers than its teacher: leave out the distance by layer")
                error_L = torch.stack(
                    [((s.to(t.device).float() - t.float()) ** 2).sum().double().cpu() for s, t in zip(ours, theirs, strict=True)]
                )
                errors[name] = errors[name] + error_L if name in errors else error_L
    assert power is not None
    names = ["embedding", *(f"layer {number}" for number in range(1, len(power)))]
    return {name: list(map(LayerDistance, names, (error_L / power).tolist())) for name, error_L in errors.items()}


def _hidden(model: nn.Module, ids_T: Tensor, beside: Seen | None) -> tuple[Tensor, ...]:
    device = next(model.parameters()).device
    held = {name: value.to(device) for name, value in beside.inputs().items()} if beside else {}
    out = model(input_ids=ids_T[None].to(device), use_cache=False, output_hidden_states=True, **held)
    states: tuple[Tensor, ...] = out.hidden_states
    return states
