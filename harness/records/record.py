"""What a measurement is: typed records with their raw values, written as one JSON file each. No torch here.

A record holds raw values per item (sequence, question, repeat), never only a mean, so that a report can pair and
resample them. Units are in the field names: bytes, seconds, nats, tokens_per_s. Unknown is None, never 0.

RUN/measure/ARM/KIND.json holds one `Record`; KIND is the lower-case name of its data class without "Data".
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import SkipValidation

from harness.records.fidelity import LATER
from harness.records.fidelity import Continuation as Continuation
from harness.records.fidelity import FidelityData as FidelityData
from harness.records.fidelity import FidelitySequence as FidelitySequence
from harness.records.fidelity import FidelityStratum as FidelityStratum
from harness.records.fidelity import LayerDistance as LayerDistance
from harness.records.parity import ParityData as ParityData
from harness.records.parity import ParityLayer as ParityLayer
from harness.records.parity import ParityPrompt as ParityPrompt
from harness.records.rebuild import STRICT, build, require_measurable
from harness.records.serving import ServingData
from qad.place import write_whole
from qad.untrusted import clean, strict_json, utf8

SCHEMA_VERSION = 1
GPU_GIGABYTES = (24, 32, 48, 80, 96, 141, 192)  # memory of cards; counted as 10^9 bytes, which is what one has at least
ARMS = ("bf16", "ptq", "qad")  # what every run has
PLAIN = "ptq_plain"  # as other tools quantize, see `quantize.plain`
NAMED_ARMS = ("bf16", PLAIN, "ptq", "qat", "qad")  # in the order of tables; other arms come behind, by name
STOP, LENGTH, ERROR = "stop", "length", "error"  # how an answer ended, see `Outputs.finish`
SERVER = "server"  # the engine's name where requests went to one


def arm_order(arm: str) -> tuple[int, str]:
    """Sort key of an arm's name."""
    return (NAMED_ARMS.index(arm) if arm in NAMED_ARMS else len(NAMED_ARMS), arm)


def arm_label(arm: str) -> str:
    """How a text calls an arm: its name, in capitals where it is one of the method's."""
    if arm == PLAIN:
        return "plain PTQ"
    return arm.upper() if arm in NAMED_ARMS else arm


@dataclasses.dataclass(frozen=True)
class Engine:
    """What computed the numbers. `emulated`: the FP4 arithmetic was simulated, so speed says nothing of Blackwell.

    native_fp4: whether FP4 matrix units multiplied. False: FP4 weights, other arithmetic (weight-only fallback,
    emulation). None: the model has no FP4 weights, or the engine did not say. kernel_path and native_fp4 come from what
    the engine reports, never from the name of the device.
    """

    name: str
    version: str
    dtype: str
    device: str
    kernel_path: str
    emulated: bool
    native_fp4: bool | None = None


# --- memory --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """What a running engine says about its memory, all workers together where it says so. Unknown is None, never 0.

    weights_bytes    of the weights after load          kv_cache_bytes, kv_cache_tokens   what the cache was given
    max_concurrency  sequences of max_model_len tokens that fit in the cache at once
    activation_bytes peak while profiling               other_bytes   CUDA graphs and what else the engine names
    process_bytes    of the server's process tree, by process_method: PSS (RAM, shared pages divided), RSS, or NVML (GPU).
                     It contains what a server allocates in advance, so it says nothing about what a model needs.
    """

    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_dtype: str | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None
    activation_bytes: int | None = None
    other_bytes: int | None = None
    process_bytes: int | None = None
    process_method: str | None = None


@dataclasses.dataclass(frozen=True)
class SequenceMemory:
    """The least memory that serves one sequence of `tokens`: weights, KV cache and states, without activations."""

    tokens: int
    kv_bytes: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class CacheCost:
    """What a sequence costs beside the weights, from the config.

    kv_bytes_per_token: by the cache's element type (bf16, fp8, nvfp4), while no window is full.
    kv_dtype: the one the folder announces, which `sequences` are counted with.
    windowed_layers: attention layers that keep a window only.
    sequences: of 4K, 32K and 128K tokens, as far as the model's context goes.
    """

    kv_bytes_per_token: dict[str, float]
    kv_dtype: str
    state_bytes_per_sequence: int
    windowed_layers: int
    sequences: list[SequenceMemory]


@dataclasses.dataclass(frozen=True)
class MemoryData:
    """Bytes on disk from safetensors headers. `bytes_by_class` sums to `tensor_bytes`; with headers to `file_bytes`.

    Classes: fp4_codes, block_scales, global_scales, fp8, bf16, other.
    `parameters` counts logical weights (a packed byte is two); tied tensors count once. cache: what a sequence costs, None
    where the config describes an unknown layer. serving: what an engine reported, None where none was started.
    """

    KIND: ClassVar[str] = "memory"
    __pydantic_config__ = STRICT
    bytes_by_class: dict[str, int]
    tensor_bytes: int
    file_bytes: int
    parameters: int
    quantized_parameters: int
    cache: CacheCost | None = None
    serving: EngineMemory | None = None

    @property
    def effective_bits(self) -> float:
        """Bits on disk per logical parameter."""
        return 8 * self.file_bytes / self.parameters

    @property
    def quantized_share(self) -> float:
        """Share of the parameters that is stored in four bits."""
        return self.quantized_parameters / self.parameters


# --- accuracy ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Item:
    """One scored question. Items pair across arms on (doc_hash, prompt_hash) and must agree in target_hash."""

    doc_hash: str
    prompt_hash: str
    target_hash: str
    cluster: str
    score: float


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What generated answers looked like, one entry an item, in the items' order.

    tokens: generated, thinking included; None where nobody counted.
    finish: stop, length (cut off), error (the request failed), "" (not told).
    loops: the text ends in a repetition.
    empty: nothing was left to score.
    """

    tokens: list[int | None]
    thinking_tokens: list[int | None]
    finish: list[str]
    loops: list[bool]
    empty: list[bool]


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """Scores of one task under one filter. `chance`: what guessing scores, None where that has no meaning.

    protocol: what else decides a score and has to be equal between arms: generation settings, chat template hash, the
    first token ids of the first prompt. {}: not recorded. n_shot None: not known. Several samples of one question are
    items of equal hashes. outputs: of a task that generates, where they were kept.
    """

    task: str
    version: str
    metric: str
    filter: str
    n_shot: int | None
    higher_is_better: bool
    chance: float | None
    limit: int | None
    items: list[Item]
    protocol: dict[str, object] = dataclasses.field(default_factory=dict)
    outputs: Outputs | None = dataclasses.field(default=None, metadata=LATER)


@dataclasses.dataclass(frozen=True)
class AccuracyData:
    """samples: name of the file of all samples, beside the record. failures: requests by the reason why they failed."""

    KIND: ClassVar[str] = "accuracy"
    __pydantic_config__ = STRICT
    tasks: list[TaskScore]
    samples: str | None = dataclasses.field(default=None, metadata=LATER)
    failures: dict[str, int] | None = dataclasses.field(default=None, metadata=LATER)

    @property
    def failed(self) -> str:
        """How many requests failed and why, the most frequent reasons first; "" for none."""
        if not self.failures:
            return ""
        reasons = sorted(self.failures.items(), key=lambda found: -found[1])
        more = f"; {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
        return f"{sum(self.failures.values())} requests failed: " + "; ".join(f"{why} ({n})" for why, n in reasons[:3]) + more


@dataclasses.dataclass(frozen=True)
class PublishedScore:
    """One benchmark's mean score as somebody printed it, without its items. None: not printed.

    maximum: what a perfect score is (1, 100, ...).
    items, repeats: questions and answers per question.
    stderr: the standard error printed beside it, in the score's unit.
    settings: the protocol as far as known.
    """

    task: str
    metric: str
    value: float
    maximum: float
    higher_is_better: bool
    chance: float | None
    items: int | None
    repeats: int | None
    stderr: float | None
    filter: str = "none"
    settings: dict[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ScoresData:
    """Imported mean scores. source: where they come from, in words or as an address."""

    KIND: ClassVar[str] = "scores"
    __pydantic_config__ = STRICT
    source: str
    scores: list[PublishedScore]


# --- throughput ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ThroughputPoint:
    """One phase at one shape; every repeat is kept. phase: prefill (prompt tokens) or decode (generated tokens).

    requests, failed: requests sent to a server and those that failed; None where no server was asked.
    """

    phase: str
    batch: int
    input_tokens: int
    output_tokens: int
    tokens_per_s: list[float]
    requests: int | None = None
    failed: int | None = None


@dataclasses.dataclass(frozen=True)
class ThroughputData:
    KIND: ClassVar[str] = "throughput"
    __pydantic_config__ = STRICT
    points: list[ThroughputPoint]


# --- the record ----------------------------------------------------------------------------------

Data = MemoryData | FidelityData | AccuracyData | ScoresData | ThroughputData | ServingData | ParityData
_DATA: dict[str, type[Any]] = {d.KIND: d for d in get_args(Data)}


@dataclasses.dataclass(frozen=True)
class Training:
    """Of a trained checkpoint. recipe: everything besides the seed that decided its weights (see qad.arms.origin)."""

    seed: int
    recipe: dict[str, object]


@dataclasses.dataclass(frozen=True)
class Record:
    """One measurement of one checkpoint.

    arm          bf16, ptq, qad, or any name of a checkpoint measured by hand
    model        display name of the model
    checkpoint   identity of the measured weights (hash of the folder's files), so no score is credited to another
    settings     everything that must be equal for two records to be comparable
    training     of a trained checkpoint. None: not trained, or not told
    control      a second measurement of the arm's own weights, to see how far apart two such measurements are; what was
                 changed on purpose (batch size, seed, attention kernel). None: an arm's record
    provenance   producer, version, commit, dirty, packages, hardware, argv (see qad.provenance)
    """

    __pydantic_config__ = STRICT
    arm: str
    model: str
    checkpoint: str
    engine: Engine
    settings: dict[str, object]
    provenance: dict[str, object]
    created: str
    seconds: float
    data: Annotated[Data, SkipValidation]  # rebuilt by itself, as the kind says
    schema_version: int = SCHEMA_VERSION
    control: dict[str, object] | None = dataclasses.field(default=None, metadata=LATER)
    training: Training | None = dataclasses.field(default=None, metadata=LATER)

    @property
    def kind(self) -> str:
        return self.data.KIND


def smallest_gpu(size: int) -> int | None:
    """Memory of the smallest card that holds `size` bytes, in GB; None: none of GPU_GIGABYTES does."""
    return next((gigabytes for gigabytes in GPU_GIGABYTES if size <= gigabytes * 10**9), None)


def to_json(record: Record) -> dict[str, object]:
    """Plain JSON types; `kind` says which data class `data` is. Half a surrogate, which a server may send, is a question mark."""
    return {"kind": record.kind, **_plain(record)}


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.name: _plain(v) for f, v in fields if not (v is None and f.metadata.get("later"))}
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return utf8(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_json(raw: Any) -> Record:
    """Raises ValueError for what is no object, an unknown kind, a schema of another version, or fields that do not fit."""
    if not isinstance(raw, dict):
        raise ValueError(f"the file: it should be an object, got {clean(repr(raw), 40)}")
    raw = dict(raw)
    kind = raw.pop("kind", None)
    if not isinstance(kind, str) or kind not in _DATA:
        raise ValueError(f"unknown kind of record {kind!r}; known: {', '.join(_DATA)}")
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"record has schema {raw.get('schema_version')!r}, this version reads {SCHEMA_VERSION}")
    require_measurable(raw.get("data"))
    data = build(_DATA[kind], raw.get("data"), "data")
    return dataclasses.replace(build(Record, {**raw, "data": None}, "record"), data=data)


def write(record: Record, path: Path) -> None:
    """Whole or not at all. Raises StorageError."""
    write_whole(path, json.dumps(to_json(record), indent=1, allow_nan=False) + "\n")


def read(path: Path) -> Record:
    """Raises ValueError naming the file where it is not a record."""
    try:
        return from_json(strict_json(path.read_bytes()))
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a measurement record: {clean(error, 300)}") from error
