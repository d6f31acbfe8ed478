"""Fidelity: how far folders are from their teacher on text; or one from itself under another attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.accuracy.section import ServerChoice
from harness.fidelity.distance import measure_fidelity
from harness.fidelity.section import measure_distances
from harness.fidelity.topk import measure_topk
from harness.measure.accuracy import OTHER_ATTENTION
from harness.measure.subject import Found, Subject
from qad.errors import UsageError
from qad.model.limits import require_positions
from qad.recipes.recipe import Fidelity
from qad.text.packing import Sequences

TOP_K = 20  # log-probabilities asked of a server; vLLM's own limit
TEACHER = "bf16"


def measure(
    subjects: Sequence[Subject],
    teacher: Subject,
    section: Fidelity,
    text: Sequences,
    settings: dict[str, object],
    progress: Callable[[int], object] | None = None,
) -> dict[str, Found]:
    """By arm. The arm bf16 is the teacher itself. settings: those of `harness.fidelity.section.test_sequences`."""
    require_positions(teacher.loaded.model, teacher.folder, {"seq_len": section.seq_len})
    students = {subject.arm: subject.loaded.model for subject in subjects if subject.arm != TEACHER}
    measured = measure_distances(section, students, teacher.loaded.model, text, teacher.seed, progress)
    return {s.arm: Found(measured[s.arm], s.loaded.engine, settings) for s in subjects}


def measure_served(
    server: ServerChoice, teacher: Subject, section: Fidelity, text: Sequences, settings: dict[str, object]
) -> Found:
    """What a server tells of its likeliest tokens bounds the distance. Raises UsageError for text that shows images."""
    if text.shows_images:
        raise UsageError("fidelity over an API scores ids alone, and this text shows images: measure the folder, or give text")
    name, engine = server.describe()
    data = measure_topk(server.url, name, teacher.loaded.model, text.pairs, section.data.name, TOP_K)
    return Found(data, engine, {**settings, "top_k": TOP_K})


def measure_again(subject: Subject, section: Fidelity, text: Sequences, settings: dict[str, object]) -> Found:
    """Distance of a folder under another attention kernel from itself."""
    loaded = subject.load(OTHER_ATTENTION)
    measured = measure_fidelity(
        {"again": loaded.model}, subject.loaded.model, text.pairs, section.data.name, teacher_name="first", seen=text.seen
    )
    return Found(measured["again"], loaded.engine, settings, {"attention": OTHER_ATTENTION})
