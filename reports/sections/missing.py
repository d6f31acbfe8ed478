"""What a report could show and its records do not hold, each with its reason: on the page and in report.json."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.records.comparison import Comparison, FidelityRow
from harness.records.record import AccuracyData, EngineMemory, FidelityData, MemoryData, Record
from harness.records.serving import ServingData
from qad.untrusted import clean
from reports.load import Run
from reports.numbers import people_list
from reports.sections.engine_parity import parity_of
from reports.sections.items import SAMPLES
from reports.sections.outcome import BASELINE, PTQ, QAD, arm_name, memory_of

Found = Iterator[tuple[str, str]]
_READ_BY = {"calibration": "calibrate", "train": "train", "validation": "train", "test": "measure"}  # role of a text -> section
_SERVED = {
    "weights_bytes": "Weights after load",
    "kv_cache_tokens": "KV capacity",
    "activation_bytes": "Peak of the activations",
    "process_bytes": "Memory of the process tree",
}
NO_ENGINE = "not measured: KV capacity and peak memory need a serving engine"
NO_SERVER = "not measured: time to first token, latencies and Pareto front need a server (qad measure throughput --engine vllm)"
NO_FLOOR = "not measured: no arm was run against itself, so nothing tells how much a rerun moves"
NO_PARITY = "not measured: no engine was held against the torch reference (qad measure parity)"


def not_measured(run: Run, comparison: Comparison, records: list[Record]) -> list[tuple[str, str]]:
    """(what, why), in the order of the report. records: the arms', without controls."""
    found = [*run.missing]
    for part in (
        _accuracy(run, comparison, records),
        _floors(run, comparison),
        _fidelity(comparison, records),
        _training(run, comparison),
        _memory(comparison, records),
        _speed(comparison, records),
        _parity(run, comparison, records),
        _origins(run),
    ):
        found += part
    return [(_capital(clean(what)), clean(why, 300)) for what, why in dict.fromkeys(found)]


def merged(found: list[tuple[str, str]], arms: list[str]) -> list[tuple[str, str]]:
    """For a page: one entry for what is missing of several arms for one reason."""
    names = [name for arm in arms for name in (arm_name(arm), clean(arm, 40))]
    arm = re.compile(rf"(?<= of | on )(?:{'|'.join(map(re.escape, dict.fromkeys(names)))})(?![\w-])") if names else None
    groups: dict[tuple[str, str], list[str]] = {}
    for what, why in found:
        named = arm.search(what) if arm else None
        key = (f"{what[: named.start()]}\0{what[named.end() :]}" if named else what, why)
        groups.setdefault(key, []).append(named[0] if named else "")
    return [(what.replace("\0", people_list(who)), why) for (what, why), who in groups.items()]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _accuracy(run: Run, comparison: Comparison, records: list[Record]) -> Found:
    for arm, source in comparison.sources.items():
        yield f"Scores of {arm_name(arm)}", f"imported from {clean(source, 200)}"
    for note in comparison.not_compared:
        yield "Left out", note
    measured = [record for record in records if isinstance(record.data, AccuracyData)]
    for record in measured:
        if isinstance(record.data, AccuracyData) and record.data.failed:
            yield f"Answers of {arm_name(record.arm)}", record.data.failed
        if f"{record.arm}/{SAMPLES}" not in run.samples:
            yield f"Questions and answers of {arm_name(record.arm)}", f"not shown: the run holds no {SAMPLES} of it"
    if measured and not comparison.outputs:
        yield (
            "Length, cut-offs and loops of answers",
            "not measured: no benchmark here generates text, or no record tells of it",
        )
    for row in comparison.outputs:
        for arm in (arm for arm in row.truncated if arm not in row.tokens):
            yield (f"Tokens of {arm_name(arm)} on {clean(row.benchmark, 60)}", "not measured: its server counted no tokens")
    if not set(comparison.arms) - {BASELINE}:
        yield "Verdict", f"there is none: no arm besides {arm_name(BASELINE)} was measured"


def _floors(run: Run, comparison: Comparison) -> Found:
    if not comparison.noise_floor:
        yield "Noise floor", run.unasked("noise_floor") or NO_FLOOR
        return
    have = {(arm, "accuracy") for arm, floor in comparison.noise_floor.items() if floor.differing}
    have |= {(arm, "fidelity") for arm, floor in comparison.noise_floor.items() if floor.kl}
    for arm in (arm for arm in (BASELINE, PTQ) if arm in comparison.arms):
        for kind in (kind for kind in ("accuracy", "fidelity") if (arm, kind) not in have):
            yield (f"Noise floor of {arm_name(arm)}, {kind}", "not measured: there is no second measurement of its weights")


def _fidelity(comparison: Comparison, records: list[Record]) -> Found:
    rows = {arm: row for arm, row in comparison.fidelity.items() if arm != BASELINE}
    for arm, row in rows.items():
        name = arm_name(arm)
        if row.bound:
            yield f"Exact KL of {name}", f"not measured: what is shown is a bound of it, {clean(row.bound, 200)}"
        yield from ((f"{what} of {name}", why) for what, why in _parts(row, _settings(records, arm)))
    if rows and PTQ in comparison.arms and QAD in comparison.arms and comparison.kl_ratio is None:
        yield "KL of QAD relative to PTQ", "n/a: it takes the KL of both, and one of PTQ above 0"
    if cached := _quantized_caches(records):
        yield (f"Quantized KV cache of {people_list(cached)}", "not measured: transformers keeps K and V as they are")


def _settings(records: list[Record], arm: str) -> dict[str, object]:
    return next((r.settings for r in records if r.arm == arm and isinstance(r.data, FidelityData)), {})


def _parts(row: FidelityRow, settings: dict[str, object]) -> Found:
    """What of a distance from the teacher a record may leave out."""
    only_sums = "not recorded: the record holds no sums by token, as those of a server and of earlier versions"
    if not row.by_position:
        yield "KL by position", only_sums
    if not row.by_entropy:
        yield "KL by the teacher's entropy", only_sums
    sources = settings.get("sources")
    if not row.by_domain:
        several = isinstance(sources, dict) and len(sources) > 1
        yield "KL by source of the text", only_sums if several else "there is none: the test text has one source"
    if not row.by_part:
        yield "KL of weights alone and of inputs alone", "not measured: it was not asked for (split), or no input is quantized"
    if not row.by_layer:
        yield "Error of the hidden states by layer", "not measured: it was not asked for (per_layer)"
    if row.equal_tokens is None:
        yield (
            "First divergence of greedy decoding, and perplexity of text the teacher wrote",
            "not measured: it was not asked for (new_tokens)",
        )


def _quantized_caches(records: list[Record]) -> list[str]:
    """Arms whose folder announces a quantized KV cache, where transformers, which does without, told their quality."""
    announced = {r.arm for r in records if isinstance(r.data, MemoryData) and r.data.cache and r.data.cache.kv_dtype != "bf16"}
    here = {r.arm for r in records if r.kind in ("accuracy", "fidelity") and r.engine.name == "transformers"}
    return [arm_name(arm) for arm in dict.fromkeys(r.arm for r in records) if arm in announced & here]


def _training(run: Run, comparison: Comparison) -> Found:
    for arm in (arm for arm in ("qat", QAD) if arm in comparison.arms and arm not in comparison.training_seeds):
        yield f"Spread of {arm_name(arm)} between training seeds", "not measured: one training is compared"
    if "qat" in comparison.arms and "qat" not in run.other_steps:
        yield "Training curve of QAT", "not measured: the run holds no readable metrics-qat.jsonl"
    for arm, steps in {QAD: run.steps, **run.other_steps}.items():
        if steps and not any(step.val_kl is not None for step in steps):
            yield f"Validation of {arm_name(arm)}", "not measured: its log holds no validation"


def _memory(comparison: Comparison, records: list[Record]) -> Found:
    memory = memory_of(records)
    for arm in (arm for arm in comparison.arms if arm in memory and memory[arm].cache is None):
        yield f"KV cache of {arm_name(arm)}, per token and sequence", "not known: its record tells nothing of the cache"
    served = {arm: data.serving for arm, data in memory.items() if data.serving is not None}
    if not served:
        yield "Memory while serving", NO_ENGINE
        return
    for arm in comparison.arms:
        if arm in served:
            yield from _unreported(arm_name(arm), served[arm])
        elif arm in memory:
            yield f"Memory of {arm_name(arm)} while serving", "not measured: no engine served it"


def _unreported(name: str, facts: EngineMemory) -> Found:
    for field, label in _SERVED.items():
        if getattr(facts, field) is None:
            yield f"{label} of {name} while serving", "not measured: the engine does not report it"


def _speed(comparison: Comparison, records: list[Record]) -> Found:
    served = {r.arm: r.data for r in records if isinstance(r.data, ServingData)}
    if not served:
        yield "Latency and throughput of serving", NO_SERVER
        return
    for arm in comparison.arms:
        if arm not in served:
            yield f"Latency and throughput of serving {arm_name(arm)}", "not measured: no server was asked"


def _parity(run: Run, comparison: Comparison, records: list[Record]) -> Found:
    """A damaged record is named already."""
    found, damaged = parity_of(records), {what for what, _ in run.missing}
    for arm in (arm for arm in comparison.arms if arm != BASELINE):
        if arm not in found and f"parity of {arm}" not in damaged:
            yield f"Parity of an engine on {arm_name(arm)}", NO_PARITY


def _origins(run: Run) -> Found:
    known = {text.role for text in run.text}
    if unknown := [role for role, section in _READ_BY.items() if role not in known and section not in run.left_out]:
        yield f"Text of {people_list(unknown)}", "not known: neither arms nor records of the run tell its sources"
    if not run.manifests:
        yield "Stages of the run", "not known: the folder holds no manifest of one"
