"""What was not measured is complete, on the page and in report.json, each with its reason; and what each arm was checked with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.compare.recovery import compare
from harness.records.record import EngineMemory, FidelityData, LayerDistance, MemoryData, Record
from reports.load import load_run
from reports.render import render
from reports.sections.missing import NO_PARITY, merged, not_measured

OF_EVERY_RUN_WITHOUT_AN_ENGINE = {
    "Questions and answers of BF16",
    "Questions and answers of PTQ",
    "Questions and answers of QAD",
    "Length, cut-offs and loops of answers",
    "Noise floor",
    "KV cache of BF16, per token and sequence",
    "KV cache of PTQ, per token and sequence",
    "KV cache of QAD, per token and sequence",
    "Memory while serving",
    "Latency and throughput of serving",
    "Parity of an engine on PTQ",
    "Parity of an engine on QAD",
    "Text of calibration, train, validation and test",
    "Spread of QAD between training seeds",
}
OF_A_PLAIN_FIDELITY_RECORD = (
    "KL by position",
    "KL by the teacher's entropy",
    "KL by source of the text",
    "KL of weights alone and of inputs alone",
    "Error of the hidden states by layer",
    "First divergence of greedy decoding, and perplexity of text the teacher wrote",
)


def missing(run: Path, records: list[Record]) -> dict[str, str]:
    return dict(not_measured(load_run(run, records), compare(records), records))


def control_of(record: Record) -> Record:
    return dataclasses.replace(record, control={"batch_size": 7, "attention": "eager"}, created="2026-01-16T00:00:00Z")


def rendered(run: Path, records: list[Record]) -> tuple[str, dict[str, Any]]:
    paths = render(run, compare(records), records)
    return paths[1].read_text(encoding="utf-8"), json.loads(paths[2].read_text(encoding="utf-8"))


def test_everything_a_report_could_show_is_listed(run: Path, records: list[Record]) -> None:
    of_fidelity = {f"{what} of {arm}" for arm in ("PTQ", "QAD") for what in OF_A_PLAIN_FIDELITY_RECORD}
    assert set(missing(run, records)) == OF_EVERY_RUN_WITHOUT_AN_ENGINE | of_fidelity


def test_the_page_and_the_json_list_the_same(run: Path, records: list[Record]) -> None:
    md, raw = rendered(run, [r for r in records if (r.arm, r.kind) != ("ptq", "fidelity")])
    listed = [(entry["what"], entry["why"]) for entry in raw["not_measured"]]
    section = md.partition("## What was not measured, and why")[2].partition("\n## ")[0]
    entries = merged(listed, ["bf16", "ptq", "qad"])
    assert section.count("\n- **") == len(entries) < len(listed)
    assert ("Parity of an engine on PTQ", NO_PARITY) in listed
    several = [what for what, _ in entries if what.endswith("PTQ and QAD")]
    assert several
    assert all(f"**{what}**" in section for what in several)
    assert ("Fidelity of ptq", "not measured: there is no record") in listed
    assert any(what == "Left out" for what, _ in listed)


def test_the_recipe_tells_why_a_kind_is_missing(run: Path, records: list[Record]) -> None:
    text = (run / "recipe.yaml").read_text(encoding="utf-8")
    section = "measure:\n  noise_floor: false\n  throughput: null\n  accuracy: {tasks: [qad_facts]}\n"
    (run / "recipe.yaml").write_text(text + section, encoding="utf-8")
    found = missing(run, [r for r in records if r.kind not in ("throughput", "accuracy")])
    assert found["Throughput of qad"] == "not measured: the recipe does not ask for it (measure.throughput)"
    assert found["Accuracy of qad"] == "not measured: there is no record"
    assert found["Noise floor"] == "not measured: the recipe does not ask for it (measure.noise_floor)"


def test_what_was_measured_is_not_listed(run: Path, records: list[Record], keep_samples: Callable[..., None]) -> None:
    keep_samples(run, records)
    controls = [control_of(r) for r in records if (r.arm, r.kind) in {("bf16", "accuracy"), ("ptq", "fidelity")}]
    served = []
    for record in records:
        if isinstance(record.data, MemoryData) and record.arm != "ptq":
            facts = EngineMemory(weights_bytes=1, kv_cache_tokens=2, process_bytes=3)
            record = dataclasses.replace(record, data=dataclasses.replace(record.data, serving=facts))
        if isinstance(record.data, FidelityData) and record.arm == "qad":
            layers = [LayerDistance("0", 0.5)]
            record = dataclasses.replace(record, data=dataclasses.replace(record.data, by_layer=layers))
        served.append(record)
    floors = compare([*served, *controls])
    found = dict(not_measured(load_run(run, served), floors, served))
    assert not any(what.startswith("Questions and answers") for what in found)
    assert "Error of the hidden states by layer of QAD" not in found
    assert "Error of the hidden states by layer of PTQ" in found
    assert {what for what in found if "while serving" in what} == {
        "Memory of PTQ while serving",
        "Peak of the activations of BF16 while serving",
        "Peak of the activations of QAD while serving",
    }
    assert not {"Noise floor", "Noise floor of BF16, accuracy", "Noise floor of PTQ, fidelity"} & set(found)
    assert "Noise floor of BF16, fidelity" in found


def test_controls_are_in_the_provenance_with_what_was_changed(run: Path, records: list[Record]) -> None:
    control = control_of(next(r for r in records if (r.arm, r.kind) == ("ptq", "accuracy")))
    md, raw = rendered(run, [*records, control])
    assert len(raw["records"]) == len(records) + 1
    last = raw["records"][-1]
    assert (last["arm"], last["kind"], last["control"]) == ("ptq", "accuracy", {"batch_size": 7, "attention": "eager"})
    assert all(record["control"] is None for record in raw["records"][:-1])
    section = md.partition("**Records**")[2]
    row = next(line for line in section.splitlines() if "again" in line)
    assert row.startswith("| PTQ (again, for the noise floor: batch\\_size 7, attention eager) | accuracy")
    assert last["sha256"][:16] in row
    assert len(raw["changed"]) == len(rendered(run, records)[1]["changed"])


def test_every_arm_is_listed_with_what_it_was_checked_with(run: Path, records: list[Record]) -> None:
    (run / "metrics-qat.jsonl").write_text('{"step": 0, "tokens": 0, "val_kl": 0.5, "val_cross_entropy": 2.5}\n')
    controls = [control_of(r) for r in records if (r.arm, r.kind) == ("ptq", "accuracy")]
    trained = [dataclasses.replace(r, arm="qat", checkpoint="q" * 64) for r in records if (r.arm, r.kind) == ("qad", "memory")]
    md, _ = rendered(run, [*records, *controls, *trained])
    section = md.partition("## What each arm was checked with")[2].partition("\n## ")[0]
    rows = {line.split(" | ")[0]: line for line in section.splitlines() if line.startswith("| ")}
    assert list(rows) == ["| ", "| ---", "| BF16", "| PTQ", "| QAT", "| QAD"] or list(rows)[-4:] == [
        "| BF16",
        "| PTQ",
        "| QAT",
        "| QAD",
    ]
    assert "not trained" in rows["| BF16"]
    assert "step 0 of QAD and QAT" in rows["| PTQ"]
    assert "accuracy (batch\\_size 7, attention eager)" in rows["| PTQ"]
    assert "1 validation (text not recorded)" in rows["| QAT"]
    assert "6 validations (text not recorded)" in rows["| QAD"]
    assert "2 benchmarks (606 answers: qad\\_agreement and qad\\_facts)" in rows["| QAD"]
    assert "python-docs (24 sequences, 6,120 tokens)" in rows["| QAD"]
    assert rows["| QAT"].count("not measured") == 4


def test_validations_are_listed_for_every_trained_arm(run: Path, records: list[Record]) -> None:
    lines = [{"step": s, "tokens": s, "val_kl": 0.4 + s, "val_cross_entropy": 2.0 - s} for s in range(2)]
    (run / "metrics-qat.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    md, raw = rendered(run, records)
    table = md.partition("**Validations**")[2].partition("\n\n**")[0]
    assert "| **QAD: 6 validations** |" in table
    assert "| **QAT: 2 validations** |" in table
    assert "| Step 1 | 1 | 1.40 (cross-entropy 1.00) *best* |" in table  # of QAT the cross-entropy chooses
    assert raw["training_of"]["qat"][0]["val_cross_entropy"] == 2.0
