"""Prompts of an exact length that no other prompt of a measurement equals, so that a prefix cache has nothing to hit."""

from __future__ import annotations

import random
import re
from typing import Any

from qad.artifact import digest_of
from qad.errors import UsageError

_WORD = re.compile(r" [a-z]{2,}")
_TRIES = 50


def random_prompts(tokenizer: Any, count: int, tokens: int, seed: object) -> list[str]:
    """`count` different texts of random words that the tokenizer reads as `tokens` tokens each, special ones included.

    seed: anything JSON can hold; other seeds, other prompts. Raises UsageError where the tokenizer gives no such texts.
    """
    generator = random.Random(digest_of(seed))
    words = _words(tokenizer)
    found: dict[str, None] = {}
    for _ in range(count * _TRIES):
        if len(found) == count:
            break
        text = _prompt(tokenizer, words, tokens, generator)
        if text is not None:
            found.setdefault(text)
    if len(found) < count:
        raise UsageError(
            f"{count} different prompts of {tokens} tokens cannot be made with this tokenizer ({len(found)} were): "
            "take longer prompts (--isl)"
        )
    return list(found)


def _words(tokenizer: Any) -> list[str]:
    """Words that are one token with the space before them; where there are few, whatever letters and words there are."""
    single = sorted({text for text in tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) if _WORD.fullmatch(text)})
    return single if len(single) >= 64 else [" " + letter for letter in "abcdefghijklmnopqrstuvwxyz"] + single


def _prompt(tokenizer: Any, words: list[str], tokens: int, generator: random.Random) -> str | None:
    """Words are added or taken away until the length is right; None where it is stepped over."""
    special = len(tokenizer("").input_ids)
    chosen = [generator.choice(words) for _ in range(max(1, tokens - special))]
    for _ in range(8):
        text = "".join(chosen).strip()
        excess = len(tokenizer(text).input_ids) - tokens
        if excess == 0:
            return text
        if excess > 0:
            chosen = chosen[: len(chosen) - max(1, min(excess // 2, len(chosen) - 1))]
        else:
            chosen += [generator.choice(words) for _ in range(-excess)]
        if not chosen:
            return None
    return None
