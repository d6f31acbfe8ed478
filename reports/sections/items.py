"""Items by item: every arm's score beside BF16's, and of those that changed some on the page with what was said.

What an arm answered comes from the samples that an accuracy measurement leaves beside its record (a Parquet file); of
records without it the hashes and the scores are known.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet

from harness.records.comparison import BenchmarkRow, Comparison
from harness.records.record import ERROR, AccuracyData, Record, TaskScore
from qad.untrusted import clean
from reports.numbers import plural
from reports.parts import Block, Cell, Example, Examples, Group, Heading, Row, Table
from reports.sections.outcome import BASELINE, arm_name

SAMPLES = "accuracy.samples.parquet"
PER_BENCHMARK, ON_PAGE = 6, 120  # examples; 120 with all their text keep a page under 0.4 MB
PROMPT_LIMIT, ANSWER_LIMIT = 360, 160  # characters
_TEXT = ("prompt", "target", "text")

Key = tuple[str, str, str, str, int]  # task, filter, doc_hash, prompt_hash, repeat


@dataclasses.dataclass(frozen=True)
class Pair:
    """One item under BF16 and under an arm. change: worse, better or same. repeat: 0, 1, ... of equal hashes."""

    task: str
    filter: str
    metric: str
    arm: str
    doc_hash: str
    prompt_hash: str
    repeat: int
    cluster: str
    bf16: float
    score: float
    change: str

    @property
    def key(self) -> Key:
        return self.task, self.filter, self.doc_hash, self.prompt_hash, self.repeat


@dataclasses.dataclass(frozen=True)
class Said:
    """What was asked, what was right, and what one arm answered."""

    prompt: str
    target: str
    text: str


def pairs(records: Iterable[Record]) -> list[Pair]:
    """Every item that both BF16 and the arm answered, arm by arm, in the records' order. Of several BF16 records the first
    counts."""
    tasks = [(r.arm, task) for r in records if isinstance(r.data, AccuracyData) for task in r.data.tasks]
    base: dict[tuple[str, str, str], dict[tuple[str, str, int], tuple[str, float]]] = {}
    for arm, task in tasks:
        if arm == BASELINE:
            base.setdefault((task.task, task.filter, task.metric), _keyed(task))
    found = []
    for arm, task in tasks:
        baseline = base.get((task.task, task.filter, task.metric), {})
        for key, (cluster, score) in _keyed(task).items() if arm != BASELINE else ():
            if key in baseline:
                before = baseline[key][1]
                gain = score - before if task.higher_is_better else before - score
                change = "better" if gain > 0 else "worse" if gain < 0 else "same"
                found.append(Pair(task.task, task.filter, task.metric, arm, *key, cluster, before, score, change))
    return found


def _keyed(task: TaskScore) -> dict[tuple[str, str, int], tuple[str, float]]:
    """(doc_hash, prompt_hash, repeat) -> cluster, score; without the items whose request failed."""
    finish = task.outputs.finish if task.outputs else []
    seen: dict[tuple[str, str], int] = {}
    found = {}
    for place, item in enumerate(task.items):
        hashes = item.doc_hash, item.prompt_hash
        seen[hashes] = repeat = seen.get(hashes, -1) + 1
        if place >= len(finish) or finish[place] != ERROR:
            found[*hashes, repeat] = item.cluster, item.score
    return found


def said(run: Path, arms: Iterable[str], wanted: set[Key]) -> dict[tuple[str, Key], Said]:
    """(arm, item) -> its texts, of the wanted items whose samples are in the run. A damaged file holds none."""
    found = {}
    for arm in arms:
        for row in _rows(run / "measure" / arm / SAMPLES) if wanted else ():
            key = row["task"], row["filter"], row["doc_hash"], row["prompt_hash"], row["repeat"]
            if key in wanted:
                found[arm, key] = Said(*(str(row[name] or "") for name in _TEXT))
    return found


def _rows(path: Path) -> list[dict[str, object]]:
    if not path.is_file():
        return []
    try:
        columns = ["task", "filter", "doc_hash", "prompt_hash", "repeat", *_TEXT]
        rows: list[dict[str, object]] = parquet.read_table(path, columns=columns).to_pylist()
    except (OSError, ValueError, KeyError, pyarrow.ArrowException):
        return []
    return rows


# --- on the page ---------------------------------------------------------------------------------


def shown(rows: list[BenchmarkRow], found: list[Pair]) -> dict[str, list[list[Pair]]]:
    """Label of a benchmark -> the items shown of it, each with all its arms.

    Those that are worse under the last arm first, then the better ones, then those of other arms; in the order of
    their hashes, which is as good as a random one.
    """
    limit = max(1, min(PER_BENCHMARK, ON_PAGE // max(1, len(rows))))
    chosen = {}
    for row in rows:
        by_key: dict[Key, list[Pair]] = {}
        for pair in found:
            if (pair.task, pair.filter, pair.metric) == (row.task, row.filter, row.metric):
                by_key.setdefault(pair.key, []).append(pair)
        changed = [group for group in by_key.values() if any(pair.change != "same" for pair in group)]
        chosen[row.label] = sorted(changed, key=_place)[:limit]
    return {label: groups for label, groups in chosen.items() if groups}


def _place(group: list[Pair]) -> tuple[int, Key]:
    return ("worse", "better", "same").index(group[-1].change), group[-1].key


def on_page(run: Path, comparison: Comparison, found: list[Pair]) -> list[Block]:
    """One part a benchmark: how answers flipped, and items that did."""
    examples = shown(comparison.benchmarks, found)
    wanted = {pair.key for groups in examples.values() for group in groups for pair in group}
    texts = said(run, comparison.arms, wanted)
    return blocks(comparison.benchmarks, found, examples, texts)


def blocks(
    rows: list[BenchmarkRow], found: list[Pair], examples: dict[str, list[list[Pair]]], texts: dict[tuple[str, Key], Said]
) -> list[Block]:
    result: list[Block] = []
    for row in rows:
        mine = [p for p in found if (p.task, p.filter, p.metric) == (row.task, row.filter, row.metric)]
        if not mine:
            continue
        result.append(Heading(clean(row.label, 60)))
        result.append(_flips(row.label, mine))
        groups = examples.get(row.label, [])
        if groups:
            changed = len({pair.key for pair in mine if pair.change != "same"})
            title = f"{plural(changed, 'item')} changed under some arm, {len(groups)} shown"
            result.append(Examples(title, [_example(group, texts) for group in groups]))
    return result


def _flips(label: str, mine: list[Pair]) -> Table:
    """Right and wrong under BF16 and an arm; of scores that are not 0 or 1, worse, equal and better."""
    binary = all(pair.bf16 in (0.0, 1.0) and pair.score in (0.0, 1.0) for pair in mine)
    rows = []
    for arm in dict.fromkeys(pair.arm for pair in mine):
        own = [pair for pair in mine if pair.arm == arm]
        if binary:
            kinds = [(p.bf16, p.score) for p in own]
            counts = [kinds.count(kind) for kind in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0))]
        else:
            kinds_of_change = [pair.change for pair in own]
            counts = [kinds_of_change.count(kind) for kind in ("worse", "same", "better")]
        rows.append(Row(arm_name(arm), [*(Cell(f"{n:,}") for n in counts), Cell(plural(len(own), "answer"))]))
    names = ["Both right", "Only BF16", "Only the arm", "Both wrong"] if binary else ["Worse", "Equal", "Better"]
    return Table(f"Answers to {clean(label, 60)} beside BF16's", ["", *names, "n"], [Group("", rows)])


def _example(group: list[Pair], texts: dict[tuple[str, Key], Said]) -> Example:
    first = group[0]
    scores = [f"BF16 {_score(first.bf16)}", *(f"{arm_name(pair.arm)} {_score(pair.score)}" for pair in group)]
    answers = {arm: texts.get((arm, first.key)) for arm in (BASELINE, *(pair.arm for pair in group))}
    some = next((answer for answer in answers.values() if answer), None)
    facts = []
    if some:
        facts = [("Asked", _end(some.prompt)), ("Right", _one_line(some.target, ANSWER_LIMIT))]
        facts += [(arm_name(arm), _one_line(answer.text, ANSWER_LIMIT) or "nothing") for arm, answer in answers.items() if answer]
    return Example(f"{clean(first.doc_hash, 12)}: {', '.join(scores)}", facts)


def _score(value: float) -> str:
    return f"{value:g}"


def _end(prompt: str) -> str:
    """The end of a prompt: behind few-shot examples stands the question."""
    text = prompt.strip()
    cut = text if len(text) <= PROMPT_LIMIT else "…" + text[1 - PROMPT_LIMIT :]
    return _one_line(cut, PROMPT_LIMIT + 40)


def _one_line(text: str, limit: int) -> str:
    """Line ends as a sign; everything else that would not be seen, as `clean` shows it."""
    return clean(re.sub(r"\s*\n\s*", " ⏎ ", text.strip()), limit)
