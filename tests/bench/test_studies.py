"""`make studies`: its task, its tables, the page of what was published."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import originals
import pytest
import sorting_task
import study_arms
import study_page
import study_tables
import torch

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "studies"


class Characters:
    """A tokenizer of the task's characters."""

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(text)] for text in texts]}


def test_the_page_is_that_of_the_record() -> None:
    record = json.loads((PUBLISHED / "result.json").read_text(encoding="utf-8"))
    assert (PUBLISHED / "result.md").read_text(encoding="utf-8") == study_page.page(record), "run make studies"
    assert len(record["results"]) >= 3
    described = json.loads(json.dumps(study_tables.described()))
    assert record["studies"] == described, "the studies have changed since: run make studies"


def test_a_claim_is_said_as_the_seeds_have_it() -> None:
    def record(differences: list[float]) -> list[str]:
        seeds = {str(n): {"a": {"end": 1.0 + d}, "b": {"end": 1.0}} for n, d in enumerate(differences)}
        claim = {"text": "a below b", "less": "a", "more": "b", "measure": "end"}
        return study_page._claims({"claims": [claim]}, seeds)

    assert record([-0.1, -0.11, -0.12])[0].startswith("- Appeared: a below b (-0.1100, ")
    assert record([0.1, 0.11, 0.12])[0].startswith("- The opposite appeared")
    assert record([-0.1, 0.1, -0.05])[0].startswith("- Not shown")
    assert record([-0.1])[0].startswith("- Not shown"), "one seed shows nothing"


def test_interval_over_seeds_is_students() -> None:
    """t of 2 degrees of freedom, .975: 4.3027 (any table)."""
    mean, low, high = study_page.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert high - mean == mean - low == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize("key", study_tables.STUDIES)
def test_what_is_claimed_is_shown(key: str) -> None:
    study = study_tables.STUDIES[key]
    assert {arm for claim in study.claims for arm in (claim.less, claim.more)} <= set(study.arms)
    assert {claim.measure for claim in study.claims} <= set(study.columns)


def test_the_task_knows_what_is_right() -> None:
    task = sorting_task.Task(Characters())
    digits_BD = torch.tensor([[7, 3, 9, 1]])
    assert "".join(map(chr, task.prompts(digits_BD)[0])) == "\n7,3,9,1="
    assert "".join(map(chr, task.answers(digits_BD)[0])) == "1,3,7,9"
    assert all(len(set(row)) == sorting_task.DIGITS for row in task.problems(100, 0).tolist())

    class Writes:
        """Writes the answer of a fixed list, whatever it is asked."""

        def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
            place = input_ids.shape[1] - 2 * sorting_task.DIGITS - 1
            logits = torch.zeros(len(input_ids), 1, 128)
            logits[:, :, ord("1,3,7,9"[place])] = 1
            return type("Out", (), {"logits": logits})

    right_BT = task.written(Writes(), digits_BD.repeat(2, 1)) == task.answers(digits_BD)
    assert right_BT.all()
    assert task.accuracy(Writes(), 200, 0) < 0.1


def test_most_writers_leave_the_smallest_to_the_end() -> None:
    documents = sorting_task.documents(200, 0)
    assert documents == sorting_task.documents(200, 0) != sorting_task.documents(200, 1)
    answers = [[line.split("=")[1].split(",") for line in text.splitlines()] for text in documents]
    assert all(len({given == sorted(given) for given in lines}) == 1 for lines in answers), "one writer, one way"
    assert 0.2 < sum(lines[0] == sorted(lines[0]) for lines in answers) / len(answers) < 0.5


@pytest.mark.slow
def test_a_seed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAD_COMPILE", "0")
    monkeypatch.setattr(originals, "STEPS", 30)
    monkeypatch.setattr(originals, "FILES", 12)
    monkeypatch.setattr(originals, "LISTS", 200)
    monkeypatch.setattr(study_arms, "STEPS", 4)
    monkeypatch.setattr(study_arms, "TOKENS", 4 * study_arms.BATCH * originals.SEQ_LEN)
    monkeypatch.setattr(originals, "sharpen", lambda base, out, *_: shutil.copytree(base, out, dirs_exist_ok=True))
    said: list[str] = []
    place = study_arms.Place(tmp_path, 0)
    originals.make_originals(place.originals, 0, said.append)
    every = study_tables.arms()
    names = ["PTQ sharpened", "QAD", "QAD balanced, gptq", "QAD apart, unified at export", "QAD W4A16, deployed W4A4"]
    first = study_arms.run_seed(place, {name: every[name] for name in names[:2]}, said.append)
    done = len(said)
    every_arm = study_arms.run_seed(place, {name: every[name] for name in names}, said.append)
    assert set(every_arm) == {"base", "sharpened", *names}
    assert {name: every_arm[name] for name in first} == first
    assert len(said) == done + 3
    assert all(0 < every_arm[name]["kl prose"] < 5 for name in names)
    assert every_arm["base"]["kl prose"] == 0
    unified = study_arms.open_arm(tmp_path / "arms" / "QAD-apart,-unified-at-export-deployed")
    assert unified.selection is not None
    assert any(len(group) == 3 for group in unified.selection.groups)
