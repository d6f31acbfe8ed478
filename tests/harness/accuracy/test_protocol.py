"""How a model is asked, case by case: no cache between models, one BOS, stop strings and thinking, room for the prompt,
explicit sampling; and the same scores from plain lm-eval."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scored import score_tasks

from harness.accuracy.protocol import explicit_generation
from harness.accuracy.scores import SHIPPED
from harness.engines.transformers import LoadedModel, load
from harness.records.record import AccuracyData
from qad.errors import DataError

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: query
doc_to_target: answer
generation_kwargs: {generation}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


def sums(folder: Path, generation: str, query: str = "The river", answer: str = "42") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text(json.dumps({"query": query, "answer": answer}) + "\n")
    (folder / "sums.yaml").write_text(TASK.format(generation=generation))
    return folder


# --- nothing is credited to another model ---


def test_a_second_model_is_asked_itself(tiny: LoadedModel, make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """The same questions, one process, one working folder: every question reaches the second model."""
    other = load(make_llama(tmp_path / "other", seed=3), "float32", "cpu")
    seen: dict[str, list[tuple[int, ...]]] = {}
    results = {}
    for name, loaded in (("first", tiny), ("second", other), ("again", tiny)):
        shapes = seen.setdefault(name, [])
        hook = loaded.model.register_forward_pre_hook(
            lambda _m, args, kwargs, s=shapes: s.append(tuple((args or (kwargs["input_ids"],))[0].shape)), with_kwargs=True
        )
        results[name] = score_tasks(loaded.model, loaded.tokenizer, ["qad_facts"], limit=48)
        hook.remove()
    assert seen["first"] == seen["second"] == seen["again"]
    assert seen["first"]
    assert results["first"] == results["again"] != results["second"]


# --- one BOS ---


def with_bos(tokenizer: Any) -> Any:
    """A copy that puts BOS before every text, as Llama's does."""
    import copy

    from tokenizers.processors import TemplateProcessing

    changed = copy.deepcopy(tokenizer)
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{changed.bos_token} $A",
        pair=f"{changed.bos_token} $A $B",
        special_tokens=[(changed.bos_token, changed.bos_token_id)],
    )
    return changed


@pytest.mark.parametrize("in_text", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_prompt_has_one_bos_where_the_model_wants_one(tiny: LoadedModel, tmp_path: Path, in_text: bool, adds: bool) -> None:
    tokenizer = with_bos(tiny.tokenizer) if adds else tiny.tokenizer
    query = f"{tokenizer.bos_token}The river" if in_text else "The river"
    folder = sums(tmp_path / "t", '{until: ["\\n"], max_gen_toks: 2}', query)
    (task,) = score_tasks(tiny.model, tokenizer, ["sums"], task_path=folder).tasks
    bos = tokenizer.bos_token_id
    ids = task.protocol["first_ids"]
    assert ids.count(bos) == int(in_text or adds)
    assert ids[int(in_text or adds) :] == tiny.tokenizer.encode("The river")[:8]


def test_two_bos_are_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer
    folder = sums(tmp_path / "t", "{max_gen_toks: 2}", f"{tokenizer.bos_token}{tokenizer.bos_token}The river")
    with pytest.raises(DataError, match="begin with two BOS tokens"):
        score_tasks(tiny.model, tokenizer, ["sums"], task_path=folder)


# --- stop strings and thinking ---


def say(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, text: str) -> list[dict[str, Any]]:
    """The model answers `text`, token by token, and stops where a stopping criterion says so. Returns its requests."""
    ids = tiny.tokenizer.encode(text)
    requests: list[dict[str, Any]] = []

    def generate(input_ids: torch.Tensor, max_length: int, stopping_criteria: Any, **kwargs: Any) -> torch.Tensor:
        requests.append(kwargs)
        out = input_ids
        for token in ids:
            out = torch.cat([out, torch.full((len(out), 1), token)], dim=1)
            if out.shape[1] >= max_length or any(bool(torch.as_tensor(c(out, None)).all()) for c in stopping_criteria):
                break
        return out

    monkeypatch.setattr(tiny.model, "generate", generate)
    return requests


def test_stop_strings_do_not_fire_while_the_model_thinks(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of "<think>a\\n\\nb</think>42", stop at an empty line: 42 is scored, and what follows the stop string is not."""
    folder = sums(tmp_path / "t", '{until: ["\\n\\n"], max_gen_toks: 200}')
    say(tiny, monkeypatch, "<think>a\n\nb</think>42\n\nmore")

    def score(**options: Any) -> float:
        return score_tasks(tiny.model, tiny.tokenizer, ["sums"], task_path=folder, **options).tasks[0].items[0].score

    assert score(think_end="</think>") == 1.0
    assert score() == 0.0, "taken as an ordinary model it stops inside its thinking"


# --- room for the prompt ---


def test_generation_that_leaves_no_room_for_a_prompt_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    folder = sums(tmp_path / "t", "{max_gen_toks: 512}")
    with pytest.raises(DataError, match="generates up to 512 tokens, the model takes 512 with the prompt"):
        score_tasks(tiny.model, tiny.tokenizer, ["sums"], task_path=folder)


# --- nothing is taken from generation_config ---


def test_sampling_is_explicit_and_recorded(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that would sample at temperature 1 answers greedily, and the record says so."""
    monkeypatch.setattr(tiny.model.generation_config, "do_sample", True)
    monkeypatch.setattr(tiny.model.generation_config, "temperature", 1.0)
    requests = say(tiny, monkeypatch, "42\n")
    folder = sums(tmp_path / "t", '{until: ["\\n"], max_gen_toks: 8}')
    (task,) = score_tasks(tiny.model, tiny.tokenizer, ["sums"], task_path=folder).tasks
    assert requests[0]["do_sample"] is False
    assert task.protocol["generation"] == {"do_sample": False, "temperature": 0.0, "until": ["\n"], "max_gen_toks": 8}
    assert task.protocol["chat_template"] is None


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"do_sample": False, "temperature": 0.0}),
        ({"temperature": 0.6}, {"do_sample": True, "temperature": 0.6, "top_p": 1.0, "top_k": 0}),
        ({"do_sample": True, "top_p": 0.95}, {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}),
    ],
)
def test_what_a_task_leaves_open_is_filled(own: dict[str, Any], expected: dict[str, Any]) -> None:
    config = {"generation_kwargs": own}
    task = SimpleNamespace(
        OUTPUT_TYPE="generate_until", get_config=config.get, set_config=lambda key, value: config.update({key: value})
    )
    explicit_generation(task)
    assert config["generation_kwargs"] == expected


# --- the same scores from lm-eval itself ---


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("arm", ["bf16", "nvfp4"])
def test_plain_lm_eval_gives_the_same_scores(tiny_llama_dir: Path, packed_dir: Path, arm: str) -> None:
    """`lm_eval.simple_evaluate` opens the folder by itself, after `import qad.hf`; every item scores the same."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    import qad.hf  # noqa: F401 - registers the NVFP4 quantizer with transformers

    folder = tiny_llama_dir if arm == "bf16" else packed_dir
    names = ["qad_facts", "qad_phrases"]
    loaded = load(folder, "float32", "cpu")
    ours: AccuracyData = score_tasks(loaded.model, loaded.tokenizer, names, limit=20)
    plain = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        device="cpu",
        batch_size=16,
        tasks=names,
        task_manager=TaskManager(include_path=str(SHIPPED), include_defaults=False),
        limit=20,
        bootstrap_iters=0,
    )
    for task in ours.tasks:
        samples = plain["samples"][task.task]
        assert [item.doc_hash for item in task.items] == [sample["doc_hash"] for sample in samples]
        assert [item.prompt_hash for item in task.items] == [sample["prompt_hash"] for sample in samples]
        assert [item.score for item in task.items] == [sample["acc"] for sample in samples]
        assert sum(item.score for item in task.items) / 20 == plain["results"][task.task]["acc,none"]
        assert 0 < sum(item.score for item in task.items) < 20
