"""The teacher's own text: exact samples, the same whatever the batch, kept and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qad.errors import DataError
from qad.model.loader import load_model, load_tokenizer
from qad.model.source import open_checkpoint
from qad.text.data import Generations
from qad.text.documents import Document
from qad.text.generate import GumbelNoise, TeacherText, prompt_ids
from qad.text.sources import Need


def settings(**fields: Any) -> Generations:
    return Generations(source="teacher", **{"length": 5, "batch_size": 4, **fields})


class Teacher:
    """A TeacherText over the tiny model that counts how often a batch is written."""

    def __init__(self, model_dir: Path, folder: Path, seed: int = 0) -> None:
        self.folder, self.batches = folder, 0
        self.tokenizer = load_tokenizer(model_dir)
        checkpoint = open_checkpoint(model_dir)

        def load() -> Any:
            model = load_model(checkpoint, "float32", "cpu")
            generate = model.generate

            def counted(**kwargs: Any) -> Any:
                self.batches += 1
                return generate(**kwargs)

            model.generate = counted
            return model

        self.text = TeacherText(checkpoint, self.tokenizer, seed, folder, load, "float32")

    def __call__(self, made: Generations, need: Need, prompts: list[Document] | None = None, taken: Any = ()) -> list[Document]:
        return self.text(made, prompts, need, 0, set(taken))


def prompts(count: int) -> list[Document]:
    return [Document.of(f"{i} sacks of flour stand in the house and the {'old ' * (i % 4)}miller counts") for i in range(count)]


def test_from_bos_alone_enough_is_written_and_kept(tiny_llama_dir: Path, tmp_path: Path) -> None:
    teacher = Teacher(tiny_llama_dir, tmp_path)
    docs = teacher(settings(), Need("train", 60))
    assert all(d.ids and d.ids[0] == teacher.tokenizer.bos_token_id and d.prompt == 1 for d in docs)
    assert all(len(d.ids or ()) <= 6 for d in docs)
    assert sum(len(d.ids or ()) for d in docs[:-1]) < 60 <= sum(len(d.ids or ()) for d in docs)
    assert len({d.key for d in docs}) == len(docs)
    rows = [json.loads(line) for line in (tmp_path / "train" / "documents.jsonl").read_text().splitlines()]
    assert [tuple(row["ids"]) for row in rows][: len(docs)] == [d.ids for d in docs]
    written = teacher.batches
    assert teacher(settings(), Need("train", 60)) == docs
    fewer = teacher(settings(), Need("train", 20))
    assert fewer == docs[: len(fewer)] != docs
    assert teacher.batches == written  # reused, also for less
    more = teacher(settings(), Need("train", 120))
    assert more[: len(docs)] == docs  # and continued for more
    assert teacher.batches < 2 * written + 2


def test_the_text_is_a_function_of_seed_role_and_prompt_not_of_the_batch(tiny_llama_dir: Path, tmp_path: Path) -> None:
    need = Need("train", 130)
    docs = Teacher(tiny_llama_dir, tmp_path / "a")(settings(batch_size=1), need, prompts(7))
    assert Teacher(tiny_llama_dir, tmp_path / "b")(settings(batch_size=5), need, prompts(7)) == docs
    assert Teacher(tiny_llama_dir, tmp_path / "c", seed=1)(settings(), need, prompts(7)) != docs
    assert Teacher(tiny_llama_dir, tmp_path / "a")(settings(), Need("validation", 130), prompts(7)) != docs


def test_prompts_are_the_first_tokens_of_texts_or_a_conversation_up_to_its_first_answer(tiny_llama_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama_dir)
    text = prompts(1)[0]
    assert prompt_ids(tokenizer, text, 5) == tokenizer(text.text)["input_ids"][:5]
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    asked = tokenizer.decode(prompt_ids(tokenizer, Document.of_messages(turns), 5))
    assert asked == "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(DataError, match="begins with the assistant"):
        prompt_ids(tokenizer, Document.of_messages(turns[1:], "x line 1"), 5)


def test_a_prompt_is_kept_before_what_the_teacher_wrote(tiny_llama_dir: Path, tmp_path: Path) -> None:
    teacher = Teacher(tiny_llama_dir, tmp_path)
    given = {tuple(prompt_ids(teacher.tokenizer, d, 6)) for d in prompts(12)}
    docs = teacher(settings(prompt_tokens=6), Need("train", 30), prompts(12))
    assert {(d.ids or ())[: d.prompt] for d in docs} <= given
    assert {d.prompt for d in docs} == {6}


def test_prompts_that_do_not_suffice_say_how_far_they_went(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train: 3 generations have \d+ tokens, 10,000 needed: give more prompts"):
        Teacher(tiny_llama_dir, tmp_path)(settings(), Need("train", 10_000), prompts(3))


def test_an_interrupted_text_goes_on_where_it_stopped(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Teacher(tiny_llama_dir, tmp_path / "whole")(settings(), Need("train", 60))
    write = TeacherText._write

    def killed(self: TeacherText, *args: Any) -> Any:
        if len((tmp_path / "parts/train.partial/documents.jsonl").read_text().splitlines()) >= 8:
            raise KeyboardInterrupt
        return write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TeacherText, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            Teacher(tiny_llama_dir, tmp_path / "parts")(settings(), Need("train", 60))
    file = tmp_path / "parts/train.partial/documents.jsonl"
    file.write_text(file.read_text() + '{"prompt": 1, "id')  # a line that the kill cut off
    teacher = Teacher(tiny_llama_dir, tmp_path / "parts")
    assert teacher(settings(), Need("train", 60)) == whole
    assert teacher.batches < len(whole) / 4


def test_documents_of_another_role_are_made_up_for(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Where a text would be shared, another one is written; what is there stays."""
    docs = Teacher(tiny_llama_dir, tmp_path)(settings(), Need("train", 40))
    taken = {d.key for d in docs[:3]}
    others = Teacher(tiny_llama_dir, tmp_path)(settings(), Need("train", 40), taken=taken)
    assert not taken & {d.key for d in others}
    assert others[: len(docs) - 3] == docs[3:]
    assert sum(len(d.ids or ()) for d in others) >= 40


def test_a_teacher_that_repeats_itself_is_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="keeps writing the same train documents"):
        Teacher(tiny_llama_dir, tmp_path)(settings(temperature=1e-4, length=3), Need("train", 8))


def test_gumbel_noise_samples_from_the_distribution_and_each_row_from_its_own_generator() -> None:
    p_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = GumbelNoise([f"{i}" for i in range(8)], "cpu")
    draws = torch.stack([noise(torch.empty(8, 0), p_V.log().expand(8, -1)).argmax(-1) for _ in range(2000)])
    share_V = torch.bincount(draws.flatten(), minlength=4) / draws.numel()
    assert ((share_V - p_V).abs() < 4 * (p_V * (1 - p_V) / draws.numel()).sqrt()).all()
    alone = GumbelNoise(["5"], "cpu")
    assert draws[:50, 5].tolist() == [int(alone(torch.empty(1, 0), p_V.log()[None]).argmax()) for _ in range(50)]


def test_the_models_own_generation_settings_play_no_part(tiny_llama_dir: Path, tmp_path: Path) -> None:
    docs = Teacher(tiny_llama_dir, tmp_path / "a")(settings(), Need("train", 60))
    teacher = Teacher(tiny_llama_dir, tmp_path / "b")
    model = teacher.text._loaded()
    own = {"do_sample": True, "temperature": 0.1, "repetition_penalty": 5.0, "max_length": 4}
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    assert teacher(settings(), Need("train", 60)) == docs
    assert model.generation_config.repetition_penalty == 5.0
