"""What the hub reads in a card: the scores themselves, unrounded, and nothing that a hostile name could turn into YAML."""

from __future__ import annotations

import dataclasses

import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from export.card import name_of, with_recovery
from harness.compare.recovery import compare
from harness.records.record import AccuracyData, Record
from reports.hub import eval_results, model_index

CARD = "---\nmodel_name: Tiny, NVFP4 (QAD)\ntags:\n- nvfp4-qad\n---\n\n# Tiny\n"


def test_scores_and_recovery_are_read_by_the_hub_library(records: list[Record]) -> None:
    comparison = compare(records)
    card = with_recovery(CARD, "| table |", model_index(comparison, "qad", name_of(CARD)))
    read = ModelCard(card).data
    assert read.model_name == "Tiny, NVFP4 (QAD)"
    results = read.eval_results or []
    assert [(r.dataset_type, r.metric_type) for r in results] == [
        ("qad_agreement", "acc"),
        ("qad_agreement", "recovery"),
        ("qad_facts", "acc"),
        ("qad_facts", "recovery"),
    ]
    row = comparison.benchmarks[0]
    recovery = row.recovery["qad"]
    assert recovery is not None
    assert [r.metric_value for r in results[:2]] == [row.score["qad"].value, recovery.value]
    assert results[0].dataset_args == {"num_few_shot": 0, "items": 300}
    assert "95 % interval" in str(results[1].metric_name)


def test_a_second_report_replaces_the_first(records: list[Record]) -> None:
    index = model_index(compare(records), "qad", "Tiny")
    once = with_recovery(CARD, "| table |", index)
    assert with_recovery(once, "| table |", index) == once
    assert once.count("model-index") == 1


def test_bf16_and_unmeasured_arms_have_none(records: list[Record]) -> None:
    comparison = compare([record for record in records if record.kind != "accuracy"])
    assert model_index(comparison, "qad", "Tiny") is None
    assert model_index(compare(records), "bf16", "Tiny") is None


def test_a_card_whose_front_matter_was_broken_keeps_it(records: list[Record]) -> None:
    broken = CARD.replace("tags:", "tags: [")
    assert "model-index" not in with_recovery(broken, "| table |", model_index(compare(records), "qad", "Tiny"))
    assert name_of(broken) == ""


def test_hostile_names_stay_names(records: list[Record]) -> None:
    name = "a: b\n---\n<script>\x00\u202e'\"" + "W" * 10_000

    def renamed(record: Record) -> Record:
        if not isinstance(record.data, AccuracyData):
            return record
        tasks = [dataclasses.replace(task, task=name + task.task, metric=name) for task in record.data.tasks]
        return dataclasses.replace(record, data=AccuracyData(tasks))

    index = model_index(compare([renamed(r) for r in records if r.kind == "accuracy"]), "qad", name)
    card = with_recovery(CARD, "| table |", index)
    facts = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    assert sorted(facts) == ["model-index", "model_name", "tags"]
    assert facts["model-index"][0]["name"].startswith("a: b\ufffd---\ufffd<script>\ufffd\ufffd'\"W")
    assert card.split("\n---\n", 1)[1].startswith("\n# Tiny")


def test_scores_of_a_benchmark_with_a_leaderboard_are_in_the_hubs_own_form(records: list[Record]) -> None:
    """Read back by huggingface_hub; percent, whole benchmarks alone, nothing that is in doubt."""
    comparison = compare(records)
    assert eval_results(comparison, "qad") == []  # tasks that no leaderboard knows
    row = dataclasses.replace(comparison.benchmarks[0], task="gsm8k")
    held = dataclasses.replace(comparison, benchmarks=[row])
    (entry,) = parse_eval_result_entries(yaml.safe_load(yaml.safe_dump(eval_results(held, "qad"))))
    assert (entry.dataset_id, entry.task_id) == ("openai/gsm8k", "gsm8k")
    assert entry.value == round(100 * row.score["qad"].value, 4)
    assert entry.notes == "lm-evaluation-harness, 0-shot, acc, 300 items"
    for change in (
        {"limit": 10},
        {"imported": True},
        {"headline": False},
        {"failed": {"qad": (1, 300)}},
        {"doubt": {"qad": "x"}},
    ):
        assert eval_results(dataclasses.replace(held, benchmarks=[dataclasses.replace(row, **change)]), "qad") == []
