"""Memory beyond the files: what a sequence costs, and what an engine made of the memory it was given."""

# ruff: noqa: RUF001 - typographic characters are what is printed
from __future__ import annotations

from collections.abc import Callable

from harness.records.record import CacheCost, EngineMemory, MemoryData, Record, smallest_gpu
from qad.untrusted import clean
from reports.numbers import gigabytes, people_list, significant
from reports.parts import Cell, Group, Row, Table, Text
from reports.sections.outcome import BASELINE, arm_name, memory_of

NOT_REPORTED = Cell("not reported")
_LABELS = {"bf16": "BF16", "fp8": "FP8", "nvfp4": "NVFP4"}


def memory_records(records: list[Record]) -> dict[str, Record]:
    """arm -> its memory record."""
    return {record.arm: record for record in records if isinstance(record.data, MemoryData)}


def sequences(arms: list[str], records: list[Record]) -> Table | None:
    """KV bytes per token, and the least memory for one sequence, from the config."""
    known = {arm: data.cache for arm, data in memory_of(records).items() if arm in arms and data.cache is not None}
    if not known:
        return None

    def row(label: str, cell: Callable[[CacheCost], Cell], detail: str = "") -> Row:
        return Row(label, [cell(known[arm]) if arm in known else Cell("unknown") for arm in arms], detail)

    def per_token(cost: CacheCost) -> Cell:
        others = ", ".join(
            f"{_LABELS[name]} {_kilobytes(size)}"
            for name, size in cost.kv_bytes_per_token.items()
            if name != cost.kv_dtype and name in _LABELS
        )
        return Cell(f"{_kilobytes(cost.kv_bytes_per_token[cost.kv_dtype])} kB", f"{_LABELS[cost.kv_dtype]}; {others}")

    rows = [row("KV cache per token", per_token)]
    if any(cost.state_bytes_per_sequence for cost in known.values()):
        rows.append(row("State per sequence", lambda c: _size_cell(c.state_bytes_per_sequence), "recurrent layers"))
    for tokens in sorted({s.tokens for cost in known.values() for s in cost.sequences}):
        rows.append(row(f"One sequence of {tokens:,} tokens", lambda c, n=tokens: _sequence_cell(c, n)))  # type: ignore[misc]
    windowed = any(cost.windowed_layers for cost in known.values())
    note = (
        "From the config: weights, KV cache and states; a lower bound, without activations and the engine's own. A card of "
        "N GB counts as N × 10⁹ bytes. The cache counts in the type that the folder announces"
        f"{', and layers with a window keep that many tokens' if windowed else ''}."
    )
    return Table("Least memory for one sequence", ["", *map(arm_name, arms)], [Group("", rows)], note)


def _kilobytes(size: float) -> str:
    return significant(size / 1000)


def _size_cell(size: int, extra: str = "") -> Cell:
    """GB, and GiB below it."""
    binary = f"{gigabytes(size, binary=True)} GiB"
    return Cell(f"{gigabytes(size)} GB", ", ".join(part for part in (binary, extra) if part))


def _sequence_cell(cost: CacheCost, tokens: int) -> Cell:
    found = next((s for s in cost.sequences if s.tokens == tokens), None)
    if found is None:
        return Cell("beyond its context")
    card = smallest_gpu(found.bytes)
    return _size_cell(found.bytes, f"{card} GB card" if card else "no single card")


def serving(arms: list[str], records: list[Record]) -> Table | None:
    """What the engine reported, each kind of memory in a row of its own; the total last, since it says least."""
    found = _served(records)
    arms = [arm for arm in arms if arm in found]
    if not arms:
        return None

    def row(label: str, cell: Callable[[EngineMemory], Cell | None], detail: str = "") -> Row:
        return Row(label, [cell(found[arm]) or NOT_REPORTED for arm in arms], detail)

    def size(name: str) -> Callable[[EngineMemory], Cell | None]:
        return lambda facts: None if (value := getattr(facts, name)) is None else _size_cell(value)

    def capacity(facts: EngineMemory) -> Cell | None:
        return None if facts.kv_cache_tokens is None else Cell(f"{facts.kv_cache_tokens:,} tokens")

    def concurrency(facts: EngineMemory) -> Cell | None:
        if facts.max_concurrency is None:
            return None
        length = "" if facts.max_model_len is None else f"of {facts.max_model_len:,} tokens"
        return Cell(f"{significant(facts.max_concurrency)} sequences", length)

    def whole(facts: EngineMemory) -> Cell | None:
        return None if facts.process_bytes is None else _size_cell(facts.process_bytes, facts.process_method or "")

    rows = [
        row("Weights after load", size("weights_bytes"), "one device"),
        row("KV cache", size("kv_cache_bytes"), "one device"),
        row("KV capacity", capacity),
        row("At once", concurrency, "longest sequences"),
        row("Activations", size("activation_bytes"), "peak, one device"),
        row("CUDA graphs and other", size("other_bytes"), "one device"),
        row("Process tree", whole, "of the server"),
    ]
    devices = {memory_records(records)[arm].engine.device for arm in arms}
    note = (
        "As the engine reports it; sizes come rounded to 0.01 GiB. A server fills what it may with KV cache, so the "
        "process tree says nothing about what a model needs: weights and capacity do."
        f"{' On a CPU the cache has the size it was given.' if 'cpu' in devices else ''}"
    )
    engines = people_list(sorted({_engine(memory_records(records)[arm]) for arm in arms}))
    return Table(f"Memory while serving, {engines}", ["", *map(arm_name, arms)], [Group("", rows)], note)


def _served(records: list[Record]) -> dict[str, EngineMemory]:
    return {arm: memory.serving for arm, memory in memory_of(records).items() if memory.serving is not None}


def _engine(record: Record) -> str:
    return f"{clean(record.engine.name, 40)} {clean(record.engine.version, 40)} on {clean(record.engine.device, 60)}"


def headline(arms: list[str], records: list[Record]) -> Text | None:
    """What a quantized arm saves where an engine served it: weights, and the tokens of KV cache that fit instead.

    None unless both arms were served by the same engine on the same device to the same longest sequence; on a CPU, where the
    cache has the size it was given, whatever the weights leave.
    """
    found, by_arm = _served(records), memory_records(records)
    last = next((arm for arm in reversed(arms) if arm in found and arm != BASELINE), None)
    if last is None or BASELINE not in found or _engine(by_arm[last]) != _engine(by_arm[BASELINE]):
        return None
    base, small = found[BASELINE], found[last]
    if by_arm[last].engine.device == "cpu":
        return None
    if base.max_model_len != small.max_model_len or None in (base.kv_cache_tokens, small.kv_cache_tokens):
        return None
    assert base.kv_cache_tokens is not None
    assert small.kv_cache_tokens is not None
    more = small.kv_cache_tokens - base.kv_cache_tokens
    if base.weights_bytes is not None and small.weights_bytes is not None:
        weights = f"weights take {gigabytes(small.weights_bytes)} GB after load against {gigabytes(base.weights_bytes)} GB"
    else:
        weights = "the engine does not report the weights after load"
    cache = f"{small.kv_cache_tokens:,} tokens of KV cache fit against {base.kv_cache_tokens:,} ({more:+,})"
    return Text(f"Served by {_engine(by_arm[last])}, {arm_name(last)} against {arm_name(BASELINE)}: {weights}; {cache}.")
