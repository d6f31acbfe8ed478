"""The fidelity section of a recipe: distance on the test text, and what else of it the section asks for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from harness.fidelity.continuations import beginnings, measure_continuations
from harness.fidelity.distance import measure_fidelity
from harness.fidelity.layers import measure_layers
from harness.fidelity.parts import measure_parts
from harness.records.record import FidelityData
from qad.errors import UsageError
from qad.model.source import Checkpoint
from qad.numerics.input_saturation import InputSaturation
from qad.recipes.recipe import Fidelity
from qad.text.documents import Part, digest_documents
from qad.text.packing import Sequences, sequences
from qad.text.sight import sight_for

_EXTRAS = ("per_layer", "split", "new_tokens", "prompt_tokens")


def _section_settings(section: Fidelity) -> dict[str, object]:
    """For the record: extras only where they are asked for, so that records without them stay comparable."""
    settings = section.model_dump(mode="json", exclude=set(_EXTRAS))
    if section.per_layer:
        settings["per_layer"] = True
    if section.split:
        settings["split"] = True
    if section.new_tokens:
        settings |= {"new_tokens": section.new_tokens, "prompt_tokens": section.prompt_tokens}
    return settings


def measure_distances(
    section: Fidelity,
    students: Mapping[str, nn.Module],
    teacher: nn.Module,
    text: Sequences,
    seed: int,
    progress: Callable[[int], object] | None = None,
) -> dict[str, FidelityData]:
    """As harness.fidelity.distance.measure_fidelity; the extras are in the students' data."""
    inputs = {name: InputSaturation() for name in students}
    with contextlib.ExitStack() as watched:
        for name, student in students.items():
            watched.enter_context(inputs[name].watching(student.modules()))
        measured = measure_fidelity(
            students, teacher, text.pairs, section.data.name, progress, domains=text.domains, seen=text.seen
        )
    for name, counted in inputs.items():
        measured[name] = dataclasses.replace(measured[name], saturated_inputs=counted.share)
    if not students:
        return measured
    if section.per_layer:
        for name, layers in measure_layers(students, teacher, text.pairs, seen=text.seen).items():
            measured[name] = dataclasses.replace(measured[name], by_layer=layers)
    if section.split:
        for name, parts in measure_parts(students, teacher, text.pairs, section.data.name, text.seen).items():
            measured[name] = dataclasses.replace(measured[name], by_part=parts)
    if section.new_tokens:
        written = measure_continuations(
            students, teacher, text.pairs, prompt_tokens=section.prompt_tokens, new_tokens=section.new_tokens, seed=seed
        )
        for name, entries in written.items():
            measured[name] = dataclasses.replace(measured[name], continuations=entries)
    return measured


def require_test_text(section: Fidelity, parts: list[Part], tokenizer: Any, seed: int, teacher: Checkpoint, dtype: str) -> None:
    """Raises DataError, before anything is measured, for text that is too short for what is asked."""
    found, _ = test_sequences(section, parts, tokenizer, seed, teacher, dtype)
    if section.new_tokens:
        beginnings(found.pairs, section.prompt_tokens)


def test_sequences(
    section: Fidelity, parts: list[Part], tokenizer: Any, seed: int, teacher: Checkpoint, dtype: str
) -> tuple[Sequences, dict[str, object]]:
    """The test split as token sequences, and the settings that two comparable records share.

    Raises UsageError where models are to continue text that shows images.
    """
    sight = sight_for(parts, teacher.folder, tokenizer)
    if sight and section.new_tokens:
        raise UsageError("measure.fidelity.new_tokens: nothing is written after images here: leave it out, or give text alone")
    found = sequences(parts, tokenizer, section.tokens, section.seq_len, seed, sight=sight)
    used = digest_documents(parts)
    settings = {**_section_settings(section), "text": used, "seed": seed, "teacher": teacher.digest}
    settings |= {"processor": sight.digest} if sight else {}
    return found, {**settings, "sources": found.sources, "dtype": dtype}
