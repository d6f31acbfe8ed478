from __future__ import annotations

from pathlib import Path

import pytest

from harness.accuracy import task_files
from harness.accuracy.section import Scoring
from harness.accuracy.suite import SHIPPED, SuiteTask, load_suite, of_tasks
from harness.accuracy.task_files import Places, load_tasks, require_known
from qad.errors import DataError, QadError, UsageError
from qad.recipes.recipe import Accuracy
from qad.recipes.strict_yaml import shipped_names

SUITE = """
name: mine
tasks:
  - {task: qad_facts, repeats: 2, generation: {temperature: 0.6}}
"""


def test_shipped_suites_load_and_state_the_published_protocols() -> None:
    suites = {name: load_suite(name)[0] for name in shipped_names(SHIPPED)}
    assert set(suites) >= {"smoke", "local", "aime25", "gpqa-diamond", "livecodebench", "scicode", "ifbench", "mmlu-pro"}
    published = {name: (t.items, t.repeats) for name, s in suites.items() if s.think_end for t in s.tasks}
    assert published == {
        "aime25": (30, 64),
        "gpqa-diamond": (198, 8),
        "livecodebench": (None, 8),
        "scicode": (None, 8),
        "ifbench": (300, 5),
        "mmlu-pro": (12032, 1),
    }
    for name, suite in suites.items():
        assert suite.name == name
        assert all(task.needs for task in suite.tasks) or name == "smoke"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SUITE.replace("repeats", "repeat"), r"tasks\.0\.repeat: unknown key; its keys are described in"),
        (SUITE.replace("0.6", "hot"), r"tasks\.0\.generation\.temperature"),
        (SUITE.replace("2", "0"), r"tasks\.0\.repeats: .* \(got 0\)"),
        (SUITE + "  - {task: qad_facts}\n", "task qad_facts stands in it twice"),
        ("name: mine\ntasks: []\n", "tasks: List should have at least 1"),
        ("name: [", "is not YAML"),
    ],
)
def test_a_suite_is_read_strictly(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_suite(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value)


def test_an_unknown_suite_names_the_shipped_ones() -> None:
    with pytest.raises(UsageError, match="'smoke2' is neither a file nor shipped: shipped suites are aime25, "):
        load_suite("smoke2")


def test_data_that_is_not_here_is_named(tmp_path: Path) -> None:
    suite, folder = load_suite("arc-easy")
    with pytest.raises(DataError, match=r"there is no arc_easy\.jsonl in .*needs arc_easy\.jsonl, a question a line"):
        load_tasks(suite.tasks, Places.of(folder, data=tmp_path), tmp_path / "cache")
    with pytest.raises(DataError, match=r"data folder .* does not exist"):
        Places.of(folder, data=tmp_path / "absent")


def test_a_task_that_nobody_has_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "_full_index", lambda *folders: task_files._index(folders, defaults=False))
    suite, folder = load_suite("livecodebench")
    with pytest.raises(DataError, match=r"'livecodebench' is neither .*needs a task file of that name"):
        require_known(suite.tasks, Places.of(folder if folder.is_dir() else None))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"repeats": 4}, "samples each item 4 times, which gives 4 equal answers"),
        ({"generation": {"temperature": 0.6}}, "generates nothing"),
        ({"items": 7}, r"has 240 items, the suite's protocol 7|has \d+ items, the suite's protocol 7: the data differ"),
    ],
)
def test_settings_that_make_no_sense_for_a_task(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks([SuiteTask.model_validate({"task": "qad_facts", **entry})], Places.of(), tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "either tasks or a suite"),
        ({"tasks": ["qad_facts"], "suite": "smoke"}, "either tasks or a suite"),
        ({"suite": "smoke", "n_shot": 3}, "n_shot is the suite's"),
        ({"tasks": ["qad_facts"], "suite_data": "d"}, "suite_data is the folder"),
    ],
)
def test_a_recipe_gives_one_of_both(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Accuracy.model_validate(section)


def test_what_a_suite_says_is_part_of_the_settings(tmp_path: Path) -> None:
    """A changed file is a changed protocol; where its data lie is none."""
    path = tmp_path / "mine.yaml"
    path.write_text(SUITE.replace("qad_facts, repeats: 2, generation: {temperature: 0.6}", "qad_facts, n_shot: 0"))
    first = Scoring.of(Accuracy(suite=str(path), limit=3), 0).settings
    assert first["suite"] == {"name": "mine", "tasks": [{"task": "qad_facts", "n_shot": 0, "limit": 3}]}
    path.write_text(path.read_text().replace("n_shot: 0", "n_shot: 1"))
    assert Scoring.of(Accuracy(suite=str(path), limit=3), 0).settings != first
    moved = Scoring.of(Accuracy(suite=str(path), suite_data=str(tmp_path)), 0).settings
    assert moved == Scoring.of(Accuracy(suite=str(path)), 0).settings
    by_name = Scoring.of(Accuracy(tasks=["qad_facts"]), 0).settings
    assert by_name == {"tasks": ["qad_facts"], "limit": None, "n_shot": None, "batch_size": 16, "seed": 0}


def test_tasks_as_a_suite() -> None:
    assert of_tasks(["a", "b"], limit=2).names == ["a", "b"]
    for tasks, message in (([], "no tasks given"), (["a", "a"], "stands in it twice")):
        with pytest.raises(QadError, match=message):
            of_tasks(tasks)
