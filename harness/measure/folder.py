"""One record of one checkpoint folder, by hand: `qad measure KIND`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.accuracy.section import Scoring, ServerChoice, finished, score, score_loaded
from harness.engines.available import EngineChoice
from harness.fidelity.section import measure_distances, test_sequences
from harness.measure.again import accuracy_again, fidelity_again
from harness.measure.stamp import folder_identity, throughput_settings, write_record
from harness.memory.served import memory_of, memory_settings
from qad.arms.origin import reference_of, training_of
from qad.errors import UsageError
from qad.model.loader import default_device, load_tokenizer, resolve_dtype
from qad.model.source import Checkpoint, open_checkpoint
from qad.recipes.recipe import Accuracy, Fidelity, Throughput
from qad.text.packing import MINIMUM
from qad.text.sources import Need, Reader

if TYPE_CHECKING:
    from harness.records.record import Data, Engine

TOP_K = 20  # log-probabilities asked of a server; vLLM's own limit


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What is measured and how. source: `folder`, opened. dtype: resolved, in which this process computes."""

    folder: Path
    source: Checkpoint
    out: Path
    arm: str
    dtype: str
    device: str
    seed: int
    noise_floor: bool
    server: ServerChoice | None

    def load(self) -> Any:
        from harness.engines.transformers import load

        return load(self.folder, self.dtype, self.device)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """control: the conditions, of a control."""

    data: Data
    engine: Engine
    settings: dict[str, Any]
    control: dict[str, Any] | None = None


def measure_folder(
    folder: Path,
    out: Path,
    *,
    arm: str,
    section: Fidelity | Accuracy | Throughput | None,
    dtype: str,
    seed: int,
    teacher: Path | None = None,
    choice: EngineChoice | None = None,
    noise_floor: bool = False,
    server: ServerChoice | None = None,
    other_teacher: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """One record of one folder, by hand. `section` holds the kind's settings; fidelity needs a teacher. choice: memory as an
    engine reports it, whose log goes beside `out`. noise_floor: the arm's control instead, see `harness.measure.again`. server: a
    server that has loaded this folder is asked. other_teacher: the teacher is not the folder's original, on purpose.

    Raises UsageError where there is no teacher, or not the folder's own, or no control of this kind.
    """
    if server is not None and noise_floor:
        raise UsageError("--server and --noise-floor: a running server cannot be asked under other conditions")
    if isinstance(section, Fidelity) and teacher is None:
        raise UsageError("fidelity is a distance from a teacher: give --teacher BF16_DIR")
    source, started, device = open_checkpoint(folder, allow_quantized=True), time.monotonic(), default_device()
    asked = _Asked(folder, source, out, arm, resolve_dtype(dtype, device), device, seed, noise_floor, server)
    if section is None:
        found = _Measured(*memory_of(folder, choice, out.with_suffix(".log"), dtype), memory_settings(choice))
    elif isinstance(section, Accuracy):
        found = _accuracy(asked, section)
    elif isinstance(section, Throughput):
        found = _throughput(asked, section)
    else:
        assert teacher is not None
        original = open_checkpoint(teacher)
        reference, told = reference_of(source, original, other_teacher)
        if told:
            say(told)
        found = _fidelity(asked, section, original, reference)
    write_record(out, arm, source.display_name, folder_identity(source), found.settings, found.engine, found.data, started,
                 found.control, training_of(source.folder))  # fmt: skip
    finished(out)


def _accuracy(asked: _Asked, section: Accuracy) -> _Measured:
    scoring, identity = Scoring.of(section, asked.seed), folder_identity(asked.source)
    scoring.require_data()
    settings = {**scoring.settings, "dtype": asked.dtype}
    if asked.server is not None:
        backend, engine = asked.server.open(asked.folder, scoring.suite)
        data = score(backend, scoring, {"checkpoint": identity, "server": asked.server.url}, asked.out)
        return _Measured(data, engine, {**settings, "dtype": engine.dtype})
    if asked.noise_floor:
        again = accuracy_again(asked.folder, scoring, asked.dtype, asked.device, identity, asked.out)
        return _Measured(again.data, again.engine, settings, again.conditions)
    loaded = asked.load()
    return _Measured(score_loaded(loaded, scoring, identity, asked.out), loaded.engine, settings)


def _throughput(asked: _Asked, section: Throughput) -> _Measured:
    from harness.serving.in_process import measure_throughput

    loaded, settings = asked.load(), throughput_settings(section, asked.seed, asked.dtype)
    data = measure_throughput(loaded.model, **section.model_dump(), vocab_size=len(loaded.tokenizer), seed=asked.seed)
    return _Measured(data, loaded.engine, settings)


def _fidelity(asked: _Asked, section: Fidelity, original: Checkpoint, reference: str | None) -> _Measured:
    """reference: name of a teacher that is not the folder's original; such a record is compared with its like only."""
    from harness.engines.transformers import load
    from harness.fidelity.distance import TEACHER

    if asked.arm == TEACHER and asked.source.digest != original.digest:
        raise UsageError(
            f"--arm {TEACHER} is the original's name, and {asked.folder} is another model: name it otherwise"
        )
    teacher, tokenizer = original.folder, load_tokenizer(original.folder)
    need = Need("test", section.tokens, section.seq_len, MINIMUM)
    docs = Reader(tokenizer, asked.seed).parts(section.data, need)
    sequences, settings = test_sequences(section, docs, tokenizer, asked.seed, original, asked.dtype)
    settings |= {"reference": reference} if reference else {}
    if asked.server is not None:
        from harness.fidelity.topk import measure_topk

        name, engine = asked.server.describe()
        model = load(teacher, asked.dtype, asked.device).model
        data = measure_topk(asked.server.url, name, model, sequences.pairs, section.data.name, TOP_K)
        return _Measured(data, engine, {**settings, "top_k": TOP_K})
    loaded = asked.load()
    if asked.noise_floor:
        again = fidelity_again(
            loaded.model, asked.folder, sequences.pairs, section.data.name, asked.dtype, asked.device
        )
        return _Measured(again.data, again.engine, settings, again.conditions)
    students = {} if asked.arm == TEACHER else {asked.arm: loaded.model}
    original_model = load(teacher, asked.dtype, asked.device).model
    measured = measure_distances(section, students, original_model, sequences, asked.seed)
    return _Measured(measured[asked.arm], loaded.engine, settings)
