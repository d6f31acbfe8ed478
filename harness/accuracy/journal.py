"""What a model said to one request, what of it is scored, and the file that keeps answers until a measurement is whole.

The file is a way to resume, no cache: it lies beside the record, goes when the record is written, and its keys hold everything
an answer depends on (weights, engine, settings, prompt, generation settings, seed). So an answer is never given in the name of
another model, whatever files lie around.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from harness.records.record import ERROR, LENGTH
from qad.artifact import digest_of
from qad.place import writing
from qad.untrusted import strict_json, text_lines

# A text that ends in one unit, said at least so often over at least so many characters, is a loop.
_TIMES, _CHARACTERS, _LONGEST_UNIT = 4, 120, 400


@dataclasses.dataclass(frozen=True)
class Answer:
    """text: everything generated, thinking included. tokens, thinking_tokens: generated, None where nobody counted.

    finish: stop, length (cut off: by the limit of new tokens, or inside its thinking), error (the server failed; text is empty)
    or "" (not told). reason: of a failure.
    """

    text: str
    tokens: int | None
    finish: str
    thinking_tokens: int | None = None
    reason: str = ""

    @property
    def loops(self) -> bool:
        return ends_in_a_loop(self.text)


def opening(think_end: str) -> str:
    """The mark that begins the thinking which `think_end` ends, "" where that does not tell: </think> -> <think>."""
    return think_end.replace("/", "", 1) if "/" in think_end else ""


def as_ended(answer: Answer, prompt: str, think_end: str | None, most: int) -> Answer:
    """The answer, cut off where it was and nobody said so: a server that tells no reason and used all `most` tokens; thinking
    that prompt or answer opened and nothing closed, or that no reason tells to be over.

    prompt: as it was sent, "" where a server's own template makes it.
    """
    if answer.finish in (ERROR, LENGTH):
        return answer
    cut = not answer.finish and answer.tokens is not None and answer.tokens >= most
    if think_end is not None and think_end not in answer.text:
        mark = opening(think_end)
        asked = prompt.rpartition(think_end)[2]
        cut |= not answer.finish or (bool(mark) and (mark in answer.text or mark in asked))
    return dataclasses.replace(answer, finish=LENGTH) if cut else answer


def scored_text(answer: Answer, until: Iterable[str], think_end: str | None) -> str:
    """What follows the thinking, cut at the task's stop strings; empty where the thinking was cut off.

    Stop strings never act on the thinking. An answer that ended by itself without the mark did not think.
    """
    text = answer.text
    if think_end is not None:
        _, found, after = text.rpartition(think_end)
        if found:
            text = after.lstrip()
        elif answer.finish == LENGTH:
            return ""
    for stop in until:
        text = text.split(stop)[0] if stop else text
    return text


def ends_in_a_loop(text: str) -> bool:
    """Whether the end of a text is one unit of at most 400 characters, repeated at least four times over at least 120."""
    tail = text.rstrip()[-max(_CHARACTERS, _TIMES * _LONGEST_UNIT) :]
    for unit in range(1, len(tail) // _TIMES + 1):
        span = max(_CHARACTERS, _TIMES * unit)
        if span <= len(tail) and tail[-span:-unit] == tail[unit - span :]:
            return True
    return False


class Journal:
    """Answers by key, appended to a JSONL file as they come. path None: in memory only.

    identity: what every answer depends on beside its request. Lines of other identities have other keys; a line that a kill
    cut short is passed over.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, object]) -> None:
        self._identity = digest_of(dict(identity))
        self._found: dict[str, object] = dict(_lines(path)) if path is not None and path.is_file() else {}
        self._path = path
        self._file: TextIO | None = None

    def key(self, kind: str, request: Any) -> str:
        """Of one request, plain JSON, of a kind (generate_until, loglikelihood, ...)."""
        return digest_of([self._identity, kind, request])

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> Any:
        return self._found[key]

    def put(self, key: str, value: object, keep: bool = True) -> None:
        """keep: also in the file; what is not kept is asked again after an interruption."""
        self._found[key] = value
        if self._path is None or not keep:
            return
        with writing(self._path):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
                self._file.write("\n")  # ends a line that a kill may have cut short
            self._file.write(json.dumps({"key": key, "value": value}, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Raises StorageError where what a full disk had no room for still has none."""
        if self._file is not None and self._path is not None:
            file, self._file = self._file, None
            with writing(self._path):
                file.close()


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for _, line in text_lines(path):
        try:
            entry = strict_json(line)
            yield str(entry["key"]), entry["value"]
        except (ValueError, KeyError, TypeError):
            continue
