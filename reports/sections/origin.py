"""Where the numbers come from: records and their hashes, checkpoints, code, machine, seeds."""

from __future__ import annotations

import hashlib
import json

from harness.records import record as record_files
from harness.records.record import Record, arm_order
from qad.untrusted import clean, mapping
from reports.load import KINDS, Run
from reports.parts import Block, Cell, Group, Notes, Row, Table, Text
from reports.sections.outcome import arm_name, engine_tags


def provenance(records: list[Record], others: list[Record], run: Run) -> list[Block]:
    every = [*records, *others]
    blocks: list[Block] = [_records(every), _checkpoints(every), *_producers(every)]
    if run.manifests:
        blocks.append(_manifests(run))
    return blocks


def record_hash(record: Record) -> str:
    """sha256 of the record's canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(record_files.to_json(record), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def ordered(records: list[Record]) -> list[Record]:
    """By arm, then by kind: the order of a report, whatever order the records were given in."""

    def place(record: Record) -> tuple[int, str, int, str]:
        kind = KINDS.index(record.kind) if record.kind in KINDS else len(KINDS)
        return *arm_order(record.arm), kind, record_hash(record)

    return sorted(records, key=place)


def _records(records: list[Record]) -> Table:
    rows = []
    for record in records:
        engine = record.engine
        how = " ".join(clean(part, 60) for part in (engine.name, engine.version, engine.dtype) if part)
        path = f"{clean(engine.kernel_path, 120)}{f', on {clean(engine.device, 60)}' if engine.device else ''}"
        when = Cell(clean(record.created, 30), f"{record.seconds:,.0f} s")
        cells = [Cell(record.kind), Cell(how, path, engine_tags(engine)), when, Cell(record_hash(record)[:16])]
        rows.append(Row(arm_name(record.arm), cells, _about(record)))
    columns = ["", "Record", "Engine", "Made", "sha256 of the record"]
    return Table("Records", columns, [Group("", rows)], "Hashes are cut to 16 digits.", align="left", breakable=True)


def _about(record: Record) -> str:
    """What was changed on purpose for a second measurement; the seed of a training."""
    if record.control is None:
        return f"training seed {record.training.seed}" if record.training else ""
    changed = ", ".join(f"{clean(name, 40)} {clean(value, 40)}" for name, value in record.control.items())
    return f"again, for the noise floor: {changed or 'nothing changed'}"


def _checkpoints(records: list[Record]) -> Table:
    seen = {(record.arm, record.checkpoint): record for record in records}
    rows = [Row(arm_name(arm), [Cell(clean(weights, 80)), Cell(_seeds(records, arm))]) for arm, weights in seen]
    columns = ["", "Hash of the measured folder", "Seeds"]
    return Table("Checkpoints", columns, [Group("", rows)], align="left", breakable=True)


def _seeds(records: list[Record], arm: str) -> str:
    found = {f"{record.kind} {record.settings['seed']}" for record in records if record.arm == arm and "seed" in record.settings}
    return clean(", ".join(sorted(found)) or "none recorded")


def _producers(records: list[Record]) -> list[Block]:
    """Code and machine; once, if all records share them."""
    groups: dict[str, tuple[dict[str, object], list[str]]] = {}
    for record in records:
        facts = {key: value for key, value in record.provenance.items() if key != "argv"}
        entry = groups.setdefault(json.dumps(facts, sort_keys=True, default=str), (record.provenance, []))
        entry[1].append(f"{record.kind} of {arm_name(record.arm)}{', again' if record.control is not None else ''}")
    blocks: list[Block] = []
    for facts, names in groups.values():
        which = "All records" if len(groups) == 1 else ", ".join(names)
        blocks.append(Text(f"{which}:"))
        blocks.append(Notes(_facts(facts)))
    return blocks


def _facts(facts: dict[str, object]) -> list[tuple[str, str]]:
    producer, machine = mapping(facts.get("producer")), mapping(facts.get("environment"))
    commit = producer.get("commit") or "no commit known (not run from a checkout)"
    state = " with uncommitted changes" if producer.get("dirty") else ""
    items = [("Code", f"{producer.get('name', 'unknown')} {producer.get('version', '')}, {commit}{state}")]
    packages = mapping(machine.get("packages"))
    if packages or machine.get("python"):
        versions = [f"{name} {version}" for name, version in sorted(packages.items())]
        items.append(("Versions", ", ".join([f"Python {machine.get('python', 'unknown')}", *versions])))
    items.append(
        ("Processor", f"{machine.get('cpu', 'unknown')}, {machine.get('cores', 'unknown')} cores, {machine.get('os', '')}")
    )
    memory = machine.get("memory_bytes")
    if isinstance(memory, int):
        items.append(("Memory", f"{memory / 2**30:.1f} GiB"))
    gpus = machine.get("gpus")
    items.append(("GPUs", ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else "none"))
    argv = facts.get("argv")
    if isinstance(argv, list) and argv:
        items.append(("Command", " ".join(map(str, argv))))
    return [(term, clean(text, 600)) for term, text in items]


def _manifests(run: Run) -> Table:
    rows = []
    for path, facts in run.manifests.items():
        producer = mapping(facts.get("producer"))
        commit = clean(producer.get("commit") or "unknown", 12) + (" (dirty)" if producer.get("dirty") else "")
        cells = [Cell(clean(facts.get("kind", "unknown"), 30)), Cell(clean(facts.get("digest", "unknown"), 16)), Cell(commit)]
        rows.append(Row(clean(path, 60), cells))
    columns = ["Folder", "Kind", "Digest", "Commit"]
    return Table("Stages of the run", columns, [Group("", rows)], align="left", breakable=True)
