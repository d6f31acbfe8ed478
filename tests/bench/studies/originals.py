"""The BF16 originals of a seed, trained here: a Llama of three kinds of text, and one that learned from its own right answers.

Four bits have to hurt, or nothing shows: four layers of 64 channels whose norms begin unlike each other (log-normal), as those of
trained models are, a vocabulary that leaves no slack, and training to the end of its budget at a high rate.
Shape suffixes: S windows, B problems, T tokens.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sorting_task
import torch
from tiny_teacher import Size, domains, make_tokenizer, new_llama, windows_of
from torch import Tensor

from qad.text.documents import Document, split_of

SIZE = Size(vocabulary=512, hidden=64, layers=4, heads=4, intermediate=160)
NORMS = 0.5  # standard deviation of the logarithm
STEPS, BATCH, SEQ_LEN, RATE = 2000, 16, 64, 4e-3
FILES, CHARACTERS, LISTS = 80, 2000, 1500  # modules of the library, of a document, documents of sorted digits
ROUNDS, PROBLEMS, ROUND_STEPS, ROUND_RATE = 3, 4000, 60, 1e-3
DOMAINS = ("prose", "code", "lists")

Say = Callable[[str], None]


def make_text(folder: Path, seed: int) -> None:
    """A file of each kind of text."""
    texts = dict(zip(DOMAINS, (*domains(FILES), sorting_task.documents(LISTS, seed)), strict=True))
    for name, held in texts.items():
        lines = [json.dumps({"text": text[:CHARACTERS]}) + "\n" for text in held]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def read_text(folder: Path, name: str) -> list[str]:
    """Of the train split."""
    texts = [json.loads(line)["text"] for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [text for text in texts if split_of(Document.of(text)) == "train"]


def make_base(text: Path, out: Path, seed: int, say: Say) -> None:
    """The model of the text, into a new folder."""
    from transformers import AutoTokenizer

    texts = {name: read_text(text, name) for name in DOMAINS}
    make_tokenizer(out, [*texts["prose"], *texts["code"], *texts["lists"][:50]], SIZE.vocabulary)
    tokenizer = AutoTokenizer.from_pretrained(out)
    windows_ST = windows_of(tokenizer, [text for held in texts.values() for text in held], SEQ_LEN)
    model, draw = new_llama(SIZE, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.exp(NORMS * torch.randn(parameter.shape, generator=draw)))

    def batches() -> Tensor:
        return windows_ST[torch.randint(len(windows_ST), (BATCH,), generator=draw)]

    loss = _train(model, lambda: (ids_BT := batches(), ids_BT), STEPS, RATE, decay=0.1)
    say(f"base original: cross-entropy {loss:.3f}, {sorting_task.Task(tokenizer).accuracy(model, 500, 0):.1%} sorted")
    model.to(torch.bfloat16).save_pretrained(out)


def sharpen(base: Path, out: Path, seed: int, say: Say) -> None:
    """Reinforcement at its plainest, into a new folder: sample answers, keep the right ones, learn them, again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for file in base.glob("tokenizer*"):
        shutil.copyfile(file, out / file.name)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    sorting, draw = sorting_task.Task(AutoTokenizer.from_pretrained(base)), torch.Generator().manual_seed(seed)
    for number in range(ROUNDS):
        digits_BD = sorting.problems(PROBLEMS, seed + 1000 * (number + 1))
        answers_BT = sorting.written(model, digits_BD, draw)
        right_B = (answers_BT == sorting.answers(digits_BD)).all(1)
        if not right_B.any():
            raise ValueError(f"round {number + 1}: none of {PROBLEMS} samples is right: train the base original longer")
        prompts_BT = sorting.prompts(digits_BD[right_B])
        ids_BT = torch.cat([prompts_BT, answers_BT[right_B]], 1)
        labels_BT = ids_BT.clone()
        labels_BT[:, : prompts_BT.shape[1]] = -100

        def batch(ids_BT: Tensor = ids_BT, labels_BT: Tensor = labels_BT) -> tuple[Tensor, Tensor]:
            chosen = torch.randint(len(ids_BT), (4 * BATCH,), generator=draw)
            return ids_BT[chosen], labels_BT[chosen]

        _train(model, batch, ROUND_STEPS, ROUND_RATE)
        say(
            f"round {number + 1}: {right_B.float().mean():.1%} of the samples right; greedy {sorting.accuracy(model, 500, 0):.1%}"
        )
    model.to(torch.bfloat16).save_pretrained(out)


def _train(model: Any, batch: Callable[[], tuple[Tensor, Tensor]], steps: int, lr: float, decay: float = 0.0) -> float:
    """AdamW with warm-up, then down a cosine. Returns the mean loss of the last tenth, nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=decay)
    losses = []
    for step in range(steps):
        rate = min(1.0, (step + 1) / 20) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = lr * rate
        ids_BT, labels_BT = batch()
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    tail: Sequence[float] = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def make_originals(folder: Path, seed: int, say: Say) -> None:
    """folder/{base,sharpened} beside the text, whatever of it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "lists.jsonl").is_file():
        make_text(folder, seed)
    steps = {
        "base": lambda out: make_base(folder, out, seed, say),
        "sharpened": lambda out: sharpen(folder / "base", out, seed, say),
    }
    for name, make in steps.items():
        if not (folder / name / "model.safetensors").is_file():
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
            make(folder / name)
