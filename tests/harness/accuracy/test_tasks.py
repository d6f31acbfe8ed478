from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import generate
import pytest
import yaml
from item import pick

from harness.accuracy.scores import SHIPPED

TASKS = sorted(generate.TASKS)


def rows(task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHIPPED / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_generator_reproduces_the_shipped_bytes(tmp_path: Path) -> None:
    generate.main(tmp_path)
    assert sorted(p.stem for p in tmp_path.iterdir()) == TASKS == sorted(p.stem for p in SHIPPED.glob("*.jsonl"))
    for task in TASKS:
        assert (tmp_path / f"{task}.jsonl").read_bytes() == (SHIPPED / f"{task}.jsonl").read_bytes(), task


@pytest.mark.parametrize("task", TASKS)
def test_items_are_many_unique_and_well_formed(task: str) -> None:
    items = rows(task)
    assert len(items) >= 300
    assert len({item["query"] for item in items}) == len(items)
    for item in items:
        assert set(item) == {"query", "choices", "gold", "cluster"}
        assert 0 <= item["gold"] < len(item["choices"])
        assert len(set(item["choices"])) == len(item["choices"])
        assert item["query"] == item["query"].strip(), "a blank before the answer changes its tokens"
        assert all(choice == choice.strip() != "" for choice in item["choices"])
        assert len(item["query"]) <= 120


@pytest.mark.parametrize("task", TASKS)
def test_clusters_and_positions_are_balanced(task: str) -> None:
    items = rows(task)
    clusters = Counter(item["cluster"] for item in items)
    assert len(clusters) >= 30
    assert max(clusters.values()) <= 15
    assert {len(item["choices"]) for item in items} == {2 if task == "qad_agreement" else 4}
    positions = Counter(item["gold"] for item in items)
    assert max(positions.values()) - min(positions.values()) <= 1


def test_agreement_asks_for_both_forms_equally_often() -> None:
    """Always preferring one form of a template scores one half of it, wherever the forms are the template's own."""
    by_cluster: dict[str, list[str]] = {}
    for item in rows("qad_agreement"):
        by_cluster.setdefault(item["cluster"], []).append(item["choices"][item["gold"]])
    for cluster in ("near_be", "met_be", "reflexive", "possessive", "comparison", "each_all"):
        assert len(by_cluster[cluster]) == 10
    assert Counter(by_cluster["near_be"]) == {"is": 5, "are": 5}
    assert Counter(by_cluster["comparison"]) == {"than": 5, "as": 5}


@pytest.mark.parametrize("task", TASKS)
def test_task_file_reads_its_own_data(task: str) -> None:
    text = (SHIPPED / f"{task}.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text.replace("!function ", ""))
    assert config["task"] == task
    assert config["dataset_kwargs"]["file"] == f"{task}.jsonl"
    assert config["num_fewshot"] == 0
    assert config["metadata"]["version"] == 1


def test_wrong_answers_are_other_answers() -> None:
    assert pick(["a", "b", "b", "c", "d"], "a", "q", 3) == pick(["d", "c", "b", "a"], "a", "q", 3)
    assert set(pick(["a", "b", "c", "d"], "a", "q", 3)) == {"b", "c", "d"}
    with pytest.raises(ValueError, match="2 other answers"):
        pick(["a", "b", "c"], "a", "q", 3)
