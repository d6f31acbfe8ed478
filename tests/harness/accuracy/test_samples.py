"""Many samples of one question, what they look like, and going on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scored import read_samples

from harness.accuracy.in_memory import InMemory
from harness.accuracy.journal import Answer, Journal, ends_in_a_loop, scored_text
from harness.accuracy.samples import Sample, samples_path, write_samples
from harness.accuracy.scores import Measured, measure_suite
from harness.accuracy.suite import Generation, Suite, SuiteTask
from harness.accuracy.task_files import Places
from harness.engines.transformers import LoadedModel
from harness.records.record import LENGTH, STOP
from qad.errors import DataError


def suite(**options: Any) -> Suite:
    think_end = options.pop("think_end", None)
    return Suite(name="mine", think_end=think_end, tasks=[SuiteTask(task="sums", **options)])


def backend(tiny: LoadedModel, think_end: str | None = None, batch_size: int = 2) -> InMemory:
    return InMemory(tiny.model, tiny.tokenizer, batch_size, think_end)


@pytest.fixture
def speak(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], str]], list[int]]:
    """The model says what a function returns, asked once a row; returns the batch sizes it was asked for."""

    def install(text: Callable[[], str]) -> list[int]:
        batches: list[int] = []

        def generate(input_ids: torch.Tensor, max_length: int, **_: Any) -> torch.Tensor:
            room = max_length - input_ids.shape[1]
            batches.append(len(input_ids))
            end = tiny.tokenizer.eos_token_id
            rows = [[*tiny.tokenizer.encode(text()), end][:room] for _ in input_ids]
            width = max(map(len, rows))
            padded = [row + [end] * (width - len(row)) for row in rows]
            return torch.cat([input_ids, torch.tensor(padded)], dim=1)

        monkeypatch.setattr(tiny.model, "generate", generate)
        return batches

    return install


Speak = Callable[[Callable[[], str]], list[int]]


def test_avg_at_k_is_the_mean_over_samples_of_different_seeds(tiny: LoadedModel, sums: Places, speak: Speak) -> None:
    """Each pass draws anew, the same seeds draw the same, and every sample counts, not only a question's first."""
    speak(lambda: str(int(torch.randint(6, 9, ()))) + "\n")
    protocol = suite(repeats=40, generation=Generation(temperature=1.0))
    first, again = (measure_suite(backend(tiny), protocol, sums) for _ in range(2))
    other = measure_suite(backend(tiny), protocol, sums, seed=1000)
    (score,) = first.data.tasks
    assert first == again
    assert [s.scored for s in first.samples] != [s.scored for s in other.samples]
    assert len(score.items) == len(first.samples) == 120
    assert {s.scored for s in first.samples} == {"6", "7", "8"}
    scores = [item.score for item in score.items]
    assert scores == [float(s.scored == "7") for s in first.samples]
    assert 0.2 < sum(scores) / 120 < 0.5
    assert score.protocol["samples_per_item"] == 40
    assert score.protocol["generation"]["temperature"] == 1.0
    by_question: dict[str, list[Sample]] = {}
    for sample in first.samples:
        by_question.setdefault(sample.doc_hash, []).append(sample)
    assert [len(samples) for samples in by_question.values()] == [40, 40, 40]
    assert all([s.repeat for s in samples] == list(range(40)) for samples in by_question.values())
    assert len({item.cluster for item in score.items}) == 3
    state = torch.random.get_rng_state()
    measure_suite(backend(tiny), suite(repeats=2, generation=Generation(temperature=1.0)), sums)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("text", "think_end", "finish", "tokens", "scored", "thinking"),
    [
        ("7\n", None, STOP, 2, "7", None),
        ("7", None, STOP, 2, "7", None),  # and the end-of-text token
        ("7 7 7 7 7 7 7 7", None, LENGTH, 6, None, None),
        ("a\nb|7\nc", "|", STOP, 8, "7", 4),
        ("7 a a a a a a a", "|", LENGTH, 6, "", 6),  # cut off while thinking: nothing was answered
        ("7\nx", "|", STOP, 4, "7", 0),  # it did not think
    ],
)
def test_length_finish_and_thinking(
    tiny: LoadedModel,
    sums: Places,
    speak: Speak,
    text: str,
    think_end: str | None,
    finish: str,
    tokens: int,
    scored: str | None,
    thinking: int | None,
) -> None:
    speak(lambda: text)
    room = 6 if finish == LENGTH else 30
    task = suite(think_end=think_end, generation=Generation(max_gen_toks=room), limit=1)
    measured = measure_suite(backend(tiny, think_end), task, sums)
    (sample,) = measured.samples
    assert (sample.finish, sample.tokens, sample.thinking_tokens) == (finish, tokens, thinking)
    if scored is not None:
        assert (sample.scored, sample.score) == (scored, float(scored == "7"))
    assert sample.empty == (scored == "")
    outputs = measured.data.tasks[0].outputs
    assert outputs is not None
    assert (outputs.tokens, outputs.finish, outputs.empty) == ([tokens], [finish], [scored == ""])


def test_scored_text_by_hand() -> None:
    assert scored_text(Answer("<think>a\n\nb</think>42", 9, STOP), ["\n\n"], "</think>") == "42"
    assert scored_text(Answer("a</think>b</think> 42\n\nc", 9, STOP), ["\n\n"], "</think>") == "42"
    assert scored_text(Answer("the answer is 42, or", 9, LENGTH), [], "</think>") == ""
    assert scored_text(Answer("42\n\nQuestion:", 9, STOP), ["Question:", "\n\n"], None) == "42"


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("so it is 5. " * 20, True),
        ("It begins well. " + "wait, " * 30, True),
        ("=" * 130, True),
        ("=" * 60, False),
        ("so it is 5. " * 3, False),
        ("".join(f"{i} is a number, " for i in range(60)), False),
        ("so it is 5. " * 20 + "Thus 5.", False),
        ("", False),
    ],
)
def test_loops(text: str, loops: bool) -> None:
    assert ends_in_a_loop(text) == loops


# --- what is kept ---


def test_an_interrupted_measurement_goes_on_sample_by_sample(
    tiny: LoadedModel, sums: Places, speak: Speak, tmp_path: Path
) -> None:
    draws = iter(range(1000))
    batches = speak(lambda: f"{next(draws)}\n")
    protocol = suite(repeats=4, generation=Generation(temperature=1.0))
    path = tmp_path / "accuracy.answers.jsonl"

    def run(stop_after: int = 99) -> Measured:
        journal = Journal(path, {"checkpoint": "a"})
        answered: list[int] = []

        def progress(done: int, total: int) -> None:
            answered.append(done)
            if len(answered) > stop_after:
                raise KeyboardInterrupt

        try:
            return measure_suite(backend(tiny), protocol, sums, journal=journal, progress=progress)
        finally:
            journal.close()

    with pytest.raises(KeyboardInterrupt):
        run(stop_after=6)
    with path.open("a") as file:
        file.write('{"key": "cut sho')
    kept = len(path.read_text().splitlines())
    asked = sum(batches)
    measured = run()
    assert sum(batches) - asked == 12 - 7  # seven answers were there
    assert kept >= 7
    assert {s.scored for s in measured.samples[:3]} == {"0", "1", "2"}
    assert len({s.scored for s in measured.samples}) == 12
    asked = sum(batches)
    assert run() == measured
    assert sum(batches) == asked


@pytest.mark.parametrize("changed", ["checkpoint", "engine"])
def test_answers_are_never_given_in_another_name(
    tiny: LoadedModel, sums: Places, speak: Speak, tmp_path: Path, changed: str
) -> None:
    """The same questions, the same file; another model, or the same under another engine, is asked itself."""
    path = tmp_path / "answers.jsonl"
    results = []
    for identity, text in (({"checkpoint": "a", "engine": "x"}, "7"), ({"checkpoint": "a", "engine": "x"} | {changed: "b"}, "8")):
        batches = speak(lambda said=text: f"{said}\n")  # type: ignore[misc]
        journal = Journal(path, identity)
        results.append(measure_suite(backend(tiny), suite(), sums, journal=journal).data.tasks[0])
        journal.close()
        assert sum(batches) == 3
    assert [item.score for task in results for item in task.items] == [1.0] * 3 + [0.0] * 3


def test_other_settings_are_asked_again(tiny: LoadedModel, sums: Places, speak: Speak, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    for n, options in enumerate(({}, {"generation": Generation(max_gen_toks=5)}, {"seed": 3}, {"seed": 3})):
        batches = speak(lambda: "7\n")
        journal = Journal(path, {})
        measure_suite(backend(tiny), suite(**options), sums, journal=journal)
        journal.close()
        assert sum(batches) == (0 if n == 3 else 3)


def test_samples_survive_a_file(tiny: LoadedModel, sums: Places, speak: Speak, tmp_path: Path) -> None:
    speak(lambda: "7\n")
    samples = measure_suite(backend(tiny), suite(), sums).samples
    samples.append(
        measure_suite(backend(tiny), Suite(name="m", tasks=[SuiteTask(task="qad_facts", limit=1)]), Places.of()).samples[0]
    )
    assert samples[-1].tokens is None
    assert samples[-1].text.strip() in samples[-1].text
    assert samples[-1].text
    path = samples_path(tmp_path / "accuracy.json")
    write_samples(samples, path)
    assert path.name == "accuracy.samples.parquet"
    assert read_samples(path) == samples
    assert not list(tmp_path.glob("*.partial"))


def test_a_vote_over_samples_is_refused(tiny: LoadedModel, sums: Places, sums_task: str) -> None:
    path = sums.folders[1] / "sums.yaml"
    path.write_text(sums_task + "filter_list:\n  - {name: maj@8, filter: [{function: majority_vote}, {function: take_first}]}\n")
    with pytest.raises(DataError, match="filter maj@8 of task sums votes over samples"):
        measure_suite(backend(tiny), suite(), sums)


def test_prompts_that_do_not_fit_are_refused(tiny: LoadedModel, sums: Places) -> None:
    """No prompt is cut on the left in silence."""
    (sums.folders[1] / "rows.jsonl").write_text(json.dumps({"query": "The river. " * 300, "answer": "7"}) + "\n")
    with pytest.raises(DataError, match=r"a prompt has [\d,]+ tokens and up to 6 generated ones, the model takes 512"):
        measure_suite(backend(tiny), suite(), sums)
