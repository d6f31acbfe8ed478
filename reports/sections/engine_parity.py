"""Whether an engine computes what a checkpoint says: the parity records, an arm a row."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from harness.records.record import Engine, ParityData, ParityLayer, ParityPrompt, Record
from qad.untrusted import clean
from reports.numbers import plural, significant
from reports.parts import Cell, Group, Row, Table
from reports.sections.outcome import arm_name, engine_tags

FAILURES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Parity:
    """One record, summed up. layout: of the folder that was served; None: the record does not tell.

    max_difference, mean_difference: of a log-probability, nats, over every position of every prompt. mean_kl: KL(reference ||
    engine), nats per position. None: not a number, or not recorded. worst_layer: the Linear furthest from the reference on the
    reference's own input; None: none was compared.
    """

    engine: Engine
    layout: str | None
    holds: bool
    max_difference: float | None
    mean_difference: float | None
    mean_kl: float | None
    tokens_equal: int
    tokens: int
    worst_layer: ParityLayer | None
    data: ParityData


def parity_of(records: Iterable[Record]) -> dict[str, Parity]:
    """arm -> its parity record."""
    return {record.arm: _summed(record, record.data) for record in records if isinstance(record.data, ParityData)}


def _summed(record: Record, data: ParityData) -> Parity:
    layout = record.settings.get("layout")
    largest = [prompt.max_difference for prompt in data.prompts]
    return Parity(
        engine=record.engine,
        layout=layout if isinstance(layout, str) else None,
        holds=data.holds,
        max_difference=max((one for one in largest if one is not None), default=None) if None not in largest else None,
        mean_difference=_mean(data.prompts, [prompt.mean_difference for prompt in data.prompts]),
        mean_kl=_mean(data.prompts, [prompt.mean_kl for prompt in data.prompts]),
        tokens_equal=sum(prompt.tokens_equal for prompt in data.prompts),
        tokens=sum(prompt.output_tokens for prompt in data.prompts),
        worst_layer=max(data.layers, key=lambda layer: _size(layer.max_difference), default=None),
        data=data,
    )


def _mean(prompts: list[ParityPrompt], values: list[float | None]) -> float | None:
    """Weighted by positions; None where one is not a number."""
    known = [value for value in values if value is not None]
    positions = [prompt.input_tokens - 1 + prompt.output_tokens for prompt in prompts]
    if not sum(positions) or len(known) < len(values):
        return None
    return sum(value * n for value, n in zip(known, positions, strict=True)) / sum(positions)


def _size(value: float | None) -> float:
    return float("inf") if value is None else value


def parity(records: list[Record]) -> Table | None:
    """Engine, kernels, layout, differences and verdict of every arm that was held against the reference."""
    found = parity_of(records)
    if not found:
        return None
    rows = [Row(arm_name(arm), _cells(one, _compiled(records, arm))) for arm, one in found.items()]
    columns = ["", "Verdict", "Engine", "Largest difference, nats", "KL, nats", "Greedy tokens equal", "Worst Linear alone"]
    references = sorted({clean(one.data.reference, 160) for one in found.values()})
    note = (
        "The engine’s log-probabilities of the same tokens beside the torch reference’s, over the whole vocabulary at every "
        "position. Quantized activations turn a last bit into another FP4 code. Where the engine shows its activations, such "
        "ties are decided as it decided them; elsewhere parity is that the engine is not much further away than the reference "
        f"is from itself in a finer dtype. Every Linear alone agrees as well. Reference: {'; '.join(references)}."
    )
    return Table("An engine beside the torch reference", columns, [Group("", rows)], note, align="left", breakable=True)


def _cells(found: Parity, compiled: str) -> list[Cell]:
    engine, data = found.engine, found.data
    name = " ".join(clean(part, 40) for part in (engine.name, engine.version, engine.dtype) if part)
    layout = f"{clean(found.layout, 40)} layout" if found.layout else "layout not recorded"
    device = f"on {clean(engine.device, 60)}" if engine.device else ""
    how = ", ".join(p for p in (clean(engine.kernel_path or "kernels unknown", 120), device, layout, compiled) if p)
    failed = "; ".join(clean(line, 160) for line in data.failures[:FAILURES_SHOWN])
    more = len(data.failures) - FAILURES_SHOWN
    failed += f"; and {more} more" if more > 0 else ""
    floors = [prompt.floor_kl for prompt in data.prompts if prompt.floor_kl is not None]
    floor = f"the reference in a finer dtype up to {significant(max(floors))}" if floors else ""
    mean = "not recorded" if _unrecorded(data) else _number(found.mean_difference)
    worst = found.worst_layer
    alone = Cell("not compared")
    if worst is not None:
        alone = Cell(_number(worst.max_difference), f"{clean(worst.module, 60)}, of {plural(len(data.layers), 'Linear')}")
    return [
        Cell("holds" if found.holds else "fails", failed),
        Cell(name, how, engine_tags(engine)),
        Cell(_number(found.max_difference), f"mean {mean}; limit {significant(data.tolerance)}{_ties(data)}"),
        Cell(_number(found.mean_kl), floor),
        Cell(f"{found.tokens_equal:,} of {found.tokens:,}", plural(len(data.prompts), "prompt")),
        alone,
    ]


def _ties(data: ParityData) -> str:
    """How many ties were decided as the engine did, and what the difference is without."""
    tied = [prompt for prompt in data.prompts if prompt.ties is not None]
    if not tied:
        return ""
    untied = max(prompt.untied_difference or 0.0 for prompt in tied)
    return f"; {plural(sum(prompt.ties or 0 for prompt in tied), 'tie')} as the engine, {significant(untied)} without"


def _unrecorded(data: ParityData) -> bool:
    """Records from before mean differences were kept have none, and numbers all the same."""
    return any(prompt.mean_difference is None and prompt.max_difference is not None for prompt in data.prompts)


def _number(value: float | None) -> str:
    return "not a number" if value is None else significant(value)


def _compiled(records: list[Record], arm: str) -> str:
    settings = next(record.settings for record in records if record.arm == arm and isinstance(record.data, ParityData))
    return {True: "not compiled", False: "compiled"}.get(bool(settings["eager"]), "") if "eager" in settings else ""
