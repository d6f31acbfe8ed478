"""The form of one question of the shipped tasks, and how its answers are put in order."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, its one right continuation, the wrong ones, and the template it came from (its cluster)."""

    cluster: str
    query: str
    right: str
    wrong: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Relation:
    """A sentence up to its last word, {x} filled by the keys of `pairs`, continued by their values.

    Wrong answers are right answers of the template's other items, and `also`.
    """

    cluster: str
    pattern: str
    pairs: dict[str, str]
    also: tuple[str, ...] = ()


def rank(*parts: str) -> str:
    """Sort key that looks random and is the same on every machine and Python version."""
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()


def pick(candidates: Iterable[str], right: str, query: str, count: int) -> tuple[str, ...]:
    """`count` wrong answers for `query` out of the other answers of its template."""
    others = sorted({c for c in candidates if c != right}, key=lambda c: rank(query, c))
    if len(others) < count:
        raise ValueError(f"{query!r} has {len(others)} other answers, needs {count}")
    return tuple(others[:count])


def expand(relations: list[Relation]) -> list[Question]:
    """All items of the templates, with three wrong answers each, template after template."""
    questions = []
    for relation in relations:
        answers = [*relation.pairs.values(), *relation.also]
        for key, right in relation.pairs.items():
            query = relation.pattern.format(x=key)
            questions.append(Question(relation.cluster, query, right, pick(answers, right, query, 3)))
    return questions


def records(questions: list[Question]) -> list[dict[str, object]]:
    """Rows of the JSONL file. The right answer moves through the positions, so that each is right equally often."""
    rows: list[dict[str, object]] = []
    for number, question in enumerate(questions):
        gold = number % (len(question.wrong) + 1)
        choices = [*question.wrong[:gold], question.right, *question.wrong[gold:]]
        rows.append({"query": question.query, "choices": choices, "gold": gold, "cluster": question.cluster})
    return rows
