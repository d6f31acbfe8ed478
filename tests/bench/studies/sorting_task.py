"""A task whose answers can be checked, and text of people who mostly do it wrong: 7,3,9,1=1,3,7,9 sorts digits.

In the text a share RIGHT of the writers sort; the others leave the smallest digit to the end: 3,7,9,1. A model of that text is
wrong where it is greedy and sometimes right where it samples, which is what reinforcement needs.
Shape suffixes: B problems, D digits, T tokens, V vocabulary.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

DIGITS, RIGHT, LINES = 4, 0.35, 16
ANSWER = 2 * DIGITS - 1  # tokens of an answer: digits with , between
_CHARACTERS = "0123456789,=\n"


def documents(count: int, seed: int) -> list[str]:
    """Documents of LINES problems, each with the answers of one writer."""
    draw = random.Random(seed)
    return [_document(draw, draw.random() < RIGHT) for _ in range(count)]


def _document(draw: random.Random, right: bool) -> str:
    lines = []
    for _ in range(LINES):
        digits = draw.sample(range(10), DIGITS)
        first, *others = sorted(digits)
        given = [first, *others] if right else [*others, first]
        lines.append(f"{','.join(map(str, digits))}={','.join(map(str, given))}\n")
    return "".join(lines)


class Task:
    """Problems as ids of a tokenizer that has a token for each character of theirs."""

    def __init__(self, tokenizer: Any) -> None:
        ids = tokenizer(list(_CHARACTERS), add_special_tokens=False)["input_ids"]
        assert all(len(one) == 1 for one in ids)
        self._id = {character: one[0] for character, one in zip(_CHARACTERS, ids, strict=True)}
        self._digits_V = torch.tensor([self._id[c] for c in "0123456789"])

    def problems(self, count: int, seed: int) -> Tensor:
        """Digits int64 [B, D]."""
        noise_BD = torch.rand(count, 10, generator=torch.Generator().manual_seed(seed))
        return noise_BD.argsort(1)[:, :DIGITS]

    def prompts(self, digits_BD: Tensor) -> Tensor:
        """Ids int64 [B, T]: a line break, the problem and =."""
        ends = {0: "\n", -1: "="}
        ids_BT = torch.full((len(digits_BD), 2 * DIGITS + 1), self._id[","])
        for place, character in ends.items():
            ids_BT[:, place] = self._id[character]
        ids_BT[:, 1::2] = self._digits_V[digits_BD]
        return ids_BT

    def answers(self, digits_BD: Tensor) -> Tensor:
        """What is right, int64 [B, ANSWER]."""
        ids_BT = torch.full((len(digits_BD), ANSWER), self._id[","])
        ids_BT[:, 0::2] = self._digits_V[digits_BD.sort(1).values]
        return ids_BT

    @torch.no_grad()
    def written(self, model: Any, digits_BD: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What a model answers, int64 [B, ANSWER]: greedily, or sampled by a generator at temperature 1."""
        ids_BT = self.prompts(digits_BD)
        for _ in range(ANSWER):
            logits_BV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits[:, -1].float()
            if generator is None:
                next_B = logits_BV.argmax(-1)
            else:
                next_B = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]
            ids_BT = torch.cat([ids_BT, next_B[:, None]], 1)
        return ids_BT[:, -ANSWER:]

    def accuracy(self, model: Any, count: int, seed: int, generator: torch.Generator | None = None) -> float:
        """Share of problems whose whole answer is right, greedily or sampled by a generator."""
        digits_BD = self.problems(count, seed)
        return float((self.written(model, digits_BD, generator) == self.answers(digits_BD)).all(1).float().mean())
