"""Where the distance from the teacher comes from: an arm's weights alone, and its quantized inputs alone.

    weights alone    the arm with inputs as they are (W4A16)
    inputs alone     the teacher's weights, inputs quantized as the arm's are (W16A4)

Small distances add up, so what the two leave of the whole is their interplay. What training can win from the weights ends
where the inputs alone begin, unless weights make up for rounded inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from harness.fidelity.distance import measure_fidelity
from harness.records.record import FidelityData, FidelityStratum
from qad.errors import UsageError
from qad.numerics.grouped import ExpertInputs
from qad.numerics.linear import QuantizedLinear
from qad.text.sight import Seen

WEIGHTS, INPUTS = "weights alone", "inputs alone"


def measure_parts(
    students: Mapping[str, nn.Module],
    teacher: nn.Module,
    sequences: Sequence[tuple[str, Tensor]],
    data_name: str,
    seen: Sequence[Seen | None] = (),
) -> dict[str, list[FidelityStratum]]:
    """Both parts of every student that quantizes inputs, as `measure_fidelity` measures the whole; the others are left out.

    Raises UsageError for a student whose channels were evened out otherwise than the teacher's.
    """
    quantizing = {name: student for name, student in students.items() if any(_quantizing(student))}
    if not quantizing:
        return {}
    for name, student in quantizing.items():
        _require_same_channels(name, student, teacher)
    found: dict[str, list[FidelityStratum]] = {name: [] for name in quantizing}
    for part, changed in ((WEIGHTS, _inputs_as_they_are), (INPUTS, _weights_of)):
        with contextlib.ExitStack() as stack:
            for student in quantizing.values():
                stack.enter_context(changed(student, teacher))
            for name, data in measure_fidelity(quantizing, teacher, sequences, data_name, seen=seen).items():
                if name in found:
                    found[name].append(_stratum(part, data))
    return found


def _require_same_channels(name: str, student: nn.Module, teacher: nn.Module) -> None:
    """Training moves a norm's weights by per cents, `quantize.balance` many of them by powers of two."""
    theirs = dict(teacher.named_parameters())
    for key, weight in student.named_parameters():
        if weight.ndim == 1 and key.endswith("norm.weight"):
            ratio = (weight.float() / theirs[key].to(weight.device).float()).abs()
            if ((ratio > 1.9) | (ratio < 0.53)).float().mean() > 0.1:
                raise UsageError(
                    f"{name}: channels were evened out (quantize.balance: {key} is another): the original's weights do not fit "
                    "its inputs: give RUN/balanced as --teacher, which has the original's bits, or leave --split out"
                )


def _quantizing(model: nn.Module) -> Iterator[QuantizedLinear | ExpertInputs]:
    """What of a model quantizes its inputs."""
    for module in model.modules():
        inputs = getattr(module, "inputs", None)
        if isinstance(inputs, ExpertInputs):
            if inputs.first is not None or inputs.second is not None:
                yield inputs
        elif isinstance(module, QuantizedLinear) and module.input_scale is not None:
            yield module


@contextlib.contextmanager
def _inputs_as_they_are(student: nn.Module, teacher: nn.Module) -> Iterator[None]:
    changed = list(_quantizing(student))
    for one in changed:
        one.quantizes_input = False
    try:
        yield
    finally:
        for one in changed:
            one.quantizes_input = True


@contextlib.contextmanager
def _weights_of(student: nn.Module, teacher: nn.Module) -> Iterator[None]:
    """All parameters are the teacher's, by name; nothing is copied where the device is the same."""
    theirs = dict(teacher.named_parameters())
    own = dict(student.named_parameters())
    kept = {name: parameter.data for name, parameter in own.items()}
    for name, parameter in own.items():
        parameter.data = theirs[name].data.to(device=parameter.device, dtype=parameter.dtype)
    try:
        yield
    finally:
        for name, parameter in own.items():
            parameter.data = kept[name]


def _stratum(name: str, data: FidelityData) -> FidelityStratum:
    columns = ([getattr(s, field) for s in data.sequences] for field in _FIELDS)
    return FidelityStratum(name, *columns)


_FIELDS = [field.name for field in dataclasses.fields(FidelityStratum) if field.name != "name"]
