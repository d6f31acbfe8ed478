from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scored import score_tasks

from harness.accuracy.scores import SHIPPED
from harness.accuracy.suite import of_tasks
from harness.accuracy.task_files import Places, require_known
from harness.engines.transformers import LoadedModel
from harness.records.record import AccuracyData
from qad.errors import DataError

ANIMALS = [
    {"query": "A heron", "choices": ["stands", "sings"], "gold": 0, "cluster": "birds"},
    {"query": "The ducks", "choices": ["swim", "read", "write"], "gold": 0, "cluster": "birds"},
    {"query": "The miller", "choices": ["counts", "is a stone bridge", "flies", "snow"], "gold": 2},
]
CHOICE = """
task: mine
dataset_path: json
dataset_kwargs:
  data_files:
    test: rows.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata:
  version: 2.5
"""
GENERATE = """
task: mine
dataset_path: json
dataset_kwargs:
  data_files:
    test: rows.jsonl
test_split: test
output_type: generate_until
doc_to_text: query
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - name: strict
    filter: [{function: regex, regex_pattern: "^(never)$"}, {function: take_first}]
  - name: flexible
    filter: [{function: regex, regex_pattern: "(.*)"}, {function: take_first}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ANIMALS))
    (tmp_path / "mine" / "mine.yaml").write_text(CHOICE)
    return tmp_path / "mine"


def score(tiny: LoadedModel, tasks: list[str], **options: Any) -> AccuracyData:
    return score_tasks(tiny.model, tiny.tokenizer, tasks, **options)


def log_likelihoods(tiny: LoadedModel, row: dict[str, Any]) -> list[float]:
    """Of every choice after the query, one forward each, no padding."""
    context = tiny.tokenizer.encode(row["query"])
    result = []
    for choice in row["choices"]:
        ids = tiny.tokenizer.encode(f"{row['query']} {choice}")
        with torch.no_grad():
            log_probs = tiny.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        result.append(sum(float(log_probs[i - 1, ids[i]]) for i in range(len(context), len(ids))))
    return result


@pytest.mark.parametrize("task", ["qad_agreement", "qad_facts", "qad_phrases"])
def test_scores_are_those_of_the_log_likelihoods(tiny: LoadedModel, task: str) -> None:
    rows = [json.loads(line) for line in (SHIPPED / f"{task}.jsonl").read_text().splitlines()[:24]]
    (result,) = score(tiny, [task], limit=24).tasks
    expected = []
    for row in rows:
        values = log_likelihoods(tiny, row)
        expected.append(float(values.index(max(values)) == row["gold"]))
    assert [item.score for item in result.items] == expected
    assert 0 < sum(expected) < 24, "a model that is always right or wrong shows nothing"
    assert [item.cluster for item in result.items] == [row["cluster"] for row in rows]
    assert len({item.doc_hash for item in result.items}) == len({item.prompt_hash for item in result.items}) == 24
    assert (result.task, result.metric, result.filter, result.version) == (task, "acc", "none", "1")
    assert (result.n_shot, result.limit, result.higher_is_better) == (0, 24, True)
    assert result.chance == (0.5 if task == "qad_agreement" else 0.25)


def test_two_runs_pair_item_by_item(tiny: LoadedModel) -> None:
    tasks = ["qad_facts", "qad_agreement"]
    first, second = score(tiny, tasks, limit=12, batch_size=1), score(tiny, tasks, limit=12, batch_size=5)
    assert [task.task for task in first.tasks] == tasks
    assert first == second


def test_a_folder_of_ones_own(tiny: LoadedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data files are found beside the task file from any directory, and no copy stays behind."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (result,) = score(tiny, ["mine"], task_path=folder).tasks
    assert not (tmp_path / "cache").exists()
    assert (result.version, result.metric, result.limit, len(result.items)) == ("2.5", "acc", None, 3)
    assert result.chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert [item.cluster for item in result.items] == ["birds", "birds", result.items[2].doc_hash]
    for row, item in zip(ANIMALS, result.items, strict=True):
        values = log_likelihoods(tiny, row)
        assert item.score == float(values.index(max(values)) == row["gold"])


def test_few_shot_count_is_recorded_and_changes_the_prompt(tiny: LoadedModel, folder: Path) -> None:
    (zero,), (one,) = (score(tiny, ["mine"], task_path=folder, n_shot=n).tasks for n in (None, 1))
    assert (zero.n_shot, one.n_shot) == (0, 1)
    for a, b in zip(zero.items, one.items, strict=True):
        assert (a.doc_hash, a.target_hash) == (b.doc_hash, b.target_hash)
        assert a.prompt_hash != b.prompt_hash
    (shipped,) = score(tiny, ["qad_facts"], n_shot=1, limit=4).tasks
    assert shipped.n_shot == 0, "the shipped tasks say 0 themselves, which lm-eval does not overrule"


def test_every_filter_is_a_score_of_its_own(tiny: LoadedModel, folder: Path) -> None:
    (folder / "mine.yaml").write_text(GENERATE)
    words = ["The river", "In spring", "A heron", "Children", "The miller", "When the wheel", "flour", "It waits"]
    rows = [{"query": word, "answer": continuation(tiny, word)} for word in words]
    rows = [row for row in rows if row["answer"]][:2]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    strict, flexible = score(tiny, ["mine"], task_path=folder).tasks
    assert (strict.filter, flexible.filter, flexible.metric) == ("strict", "flexible", "exact_match")
    assert [item.score for item in strict.items] == [0.0, 0.0]
    assert [item.score for item in flexible.items] == [1.0, 1.0]
    assert strict.chance is flexible.chance is None


def continuation(tiny: LoadedModel, prompt: str) -> str:
    ids = torch.tensor([tiny.tokenizer.encode(prompt)])
    out = tiny.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    text: str = tiny.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text.split("\n")[0].strip()


def test_lm_eval_is_silent_and_left_as_it_was(tiny: LoadedModel, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import datasets
    import lm_eval.api.task

    before = (lm_eval.api.task.tqdm, logging.getLogger("lm_eval").level, datasets.are_progress_bars_disabled())
    seen: list[tuple[int, int]] = []
    score(tiny, ["mine"], task_path=folder, progress=lambda done, total: seen.append((done, total)))
    after = (lm_eval.api.task.tqdm, logging.getLogger("lm_eval").level, datasets.are_progress_bars_disabled())
    assert before == after
    assert capfd.readouterr() == ("", "")
    assert seen == [(i, 9) for i in range(1, 10)]


def test_tasks_that_cannot_be_scored(tiny: LoadedModel, folder: Path) -> None:
    task = folder / "mine.yaml"
    task.write_text(CHOICE.replace("rows.jsonl", "absent.jsonl"))
    with pytest.raises(DataError, match=r"mine cannot be loaded: .*absent\.jsonl"):
        score(tiny, ["mine"], task_path=folder)
    task.write_text(CHOICE + "repeats: 4\n")
    with pytest.raises(DataError, match="samples each item 4 times"):
        score(tiny, ["mine"], task_path=folder)
    rolling = CHOICE.replace("multiple_choice", "loglikelihood_rolling").replace("doc_to_choice: choices\n", "")
    rolling = rolling[: rolling.index("metric_list")].replace("doc_to_target: gold", "doc_to_target: query")
    task.write_text(
        rolling + "metric_list:\n  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}\n"
    )
    with pytest.raises(DataError, match=r"no score per item \(word_perplexity\)"):
        score(tiny, ["mine"], task_path=folder)


def known(tasks: list[str], folder: Path | None = None) -> None:
    require_known(of_tasks(tasks).tasks, Places.of(folder))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["qad_facts", "qad_fact"], "task 'qad_fact' is neither shipped nor known to lm-eval: did you mean qad_facts?"),
        (["qad_zzzzzz"], "shipped tasks are qad_agreement, qad_facts, qad_phrases"),
        ([], "no tasks given"),
    ],
)
def test_unknown_names_are_refused_at_once(tiny: LoadedModel, tasks: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message.replace("?", r"\?")) as caught:
        known(tasks)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=message.replace("?", r"\?")):
        score(tiny, tasks)


def test_known_names_pass_without_lm_eval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    known(["qad_facts", "qad_agreement", "mine"], folder)
    with pytest.raises(DataError, match="does not exist"):
        known(["mine"], folder / "absent")
    (folder / "broken.yaml").write_text("task: [")
    with pytest.raises(DataError, match=r"broken\.yaml is not YAML"):
        known(["mine"], folder)


@pytest.mark.slow
def test_names_of_lm_eval(folder: Path) -> None:
    known(["arc_easy", "qad_facts"])
    with pytest.raises(DataError, match=r"'arc_esy' is neither .* did you mean arc_easy\?"):
        known(["arc_esy"])
