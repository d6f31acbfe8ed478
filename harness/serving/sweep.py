"""Measure arms behind servers: cells of concurrency and lengths, every repeat kept.

Order. Arms are interleaved repeat by repeat, forwards and backwards (BF16 PTQ QAD, QAD PTQ BF16, ...), so that a drift of the
machine hits them alike. Two servers never share a device: an arm's server is stopped before the next is started,
and stays up only where the next turn is the same arm's. In a turn every cell runs once, after a warm-up of its shape.
Prompts. Repeat i of a cell sends the same prompts to every arm; no prompt is used twice for one arm, warm-up included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from harness.engines.server import Server
from harness.records.record import Engine
from harness.records.serving import Cell, Overhead, Repeat, ServingData
from harness.serving.drivers import Driver, Load
from harness.serving.energy import EnergyMeter
from harness.serving.mock_server import MODEL
from harness.serving.observe import observe, repeat
from harness.serving.prompts import random_prompts
from harness.serving.statistics import summarize, tokens_per_s
from harness.serving.tap import Tap, tap
from qad.errors import DataError, UsageError

WARM_UP_TOKENS = 16


Start = Callable[[], AbstractContextManager[Server]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Cells are all of concurrency x input_tokens x output_tokens. requests: a run; None: four rounds, at least 16."""

    concurrency: Sequence[int]
    input_tokens: Sequence[int]
    output_tokens: Sequence[int]
    repeats: int = 3
    requests: int | None = None
    endpoint: str = "completions"
    seed: int = 0

    def cells(self) -> list[tuple[int, int, int]]:
        return [(c, i, o) for i in self.input_tokens for o in self.output_tokens for c in self.concurrency]

    def count(self, concurrency: int) -> int:
        return self.requests or max(16, 4 * concurrency)


def turns(arms: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """(repeat, arm) in the order in which they run."""
    return [(i, arm) for i in range(repeats) for arm in (arms if i % 2 == 0 else list(reversed(arms)))]


class Runs:
    """What the turns of a plan gave: by arm every cell's repeats, and what computed them.

    order: (repeat, arm) as they run. say: is told of every run.
    """

    def __init__(self, arms: Iterable[str], plan: Plan, say: Callable[[str], None]) -> None:
        check_plan(plan)
        self.plan, self.say, self.order = plan, say, turns(list(arms), plan.repeats)
        self.repeats: dict[str, list[list[Repeat]]] = {arm: [[] for _ in plan.cells()] for _, arm in self.order}
        self.engines: dict[str, Engine] = {}

    def computed(self, arm: str, engine: Engine) -> None:
        """Raises DataError where another engine, or the same in another way, computed the arm before."""
        if self.engines.setdefault(arm, engine) != engine:
            raise DataError(f"{arm} was computed by {self.engines[arm]}, after a restart by {engine}")

    def add(self, arm: str, turn: int, cell: int, measured: Repeat) -> None:
        """One run."""
        self.repeats[arm][cell].append(measured)
        self.say(f"{arm}, repeat {turn + 1} of {self.plan.repeats}, {_line(Cell(*self.plan.cells()[cell], [measured]))}")

    def data(self, arm: str, driver: str, **facts: Any) -> ServingData:
        """For the record. facts: further fields of it."""
        cells = [Cell(*shape, runs) for shape, runs in zip(self.plan.cells(), self.repeats[arm], strict=True)]
        return ServingData(driver, self.plan.endpoint, cells, [name for _, name in self.order], **facts)


def measure_serving(
    arms: Mapping[str, Start],
    plan: Plan,
    driver: Driver,
    tokenizer_folder: Path,
    say: Callable[[str], None] = lambda line: None,
    *,
    tokenizer: Any,
) -> dict[str, tuple[ServingData, Engine]]:
    """Every arm's cells, and what served them. tokenizer: of `tokenizer_folder`.

    Raises UsageError for a plan that cannot be measured, LoadToolError where the load tool fails, DataError where a
    restarted server computes in another way than before.
    """
    runs, bench = Runs(arms, plan, say), _Bench(plan, driver, tokenizer_folder, tokenizer)
    seen: dict[str, set[str]] = {arm: set() for arm in arms}
    for arm, group in itertools.groupby(runs.order, key=lambda turn: turn[1]):
        with arms[arm]() as server, tap(server.base_url) as wire:
            runs.computed(arm, server.engine)
            for turn, _ in group:
                for cell in range(len(plan.cells())):
                    runs.add(arm, turn, cell, bench.run(wire, server.model, turn, cell, seen[arm]))
    overhead = [bench.overhead(concurrency) for concurrency in sorted(set(plan.concurrency))]
    return {arm: (runs.data(arm, driver.name, overhead=overhead), runs.engines[arm]) for arm in arms}


@dataclasses.dataclass(frozen=True)
class _Bench:
    plan: Plan
    driver: Driver
    folder: Path
    tokenizer: Any

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False).input_ids)

    def run(self, wire: Tap, model: str, turn: int, cell: int, seen: set[str]) -> Repeat:
        """Warm-up, then the run that is kept."""
        concurrency, input_tokens, output_tokens = self.plan.cells()[cell]
        count = self.plan.count(concurrency)
        warm = min(concurrency, count)
        texts = random_prompts(self.tokenizer, warm + count, input_tokens, [self.plan.seed, turn, cell])
        load = Load(
            wire.base_url, model, self.folder, texts[:warm], min(output_tokens, WARM_UP_TOKENS), concurrency, self.plan.endpoint
        )
        self.driver.run(load)
        repeat(observe(wire.take()), seen)
        with EnergyMeter() as meter:
            self.driver.run(dataclasses.replace(load, prompts=texts[warm:], output_tokens=output_tokens))
        observed = observe(wire.take(), self.count_tokens)
        measured = repeat(observed, seen)
        if not observed or measured.window is None:
            return measured
        origin = observed[0].start_s
        energy = meter.between(origin + measured.window.start_s, origin + measured.window.end_s)
        return dataclasses.replace(measured, energy_j=energy)

    def overhead(self, concurrency: int) -> Overhead:
        """The first shape against a server that answers at once."""
        _, input_tokens, output_tokens = self.plan.cells()[0]
        texts = random_prompts(self.tokenizer, self.plan.count(concurrency), input_tokens, [self.plan.seed, "overhead"])
        with _instant_server() as url, tap(url) as wire:
            self.driver.run(Load(wire.base_url, MODEL, self.folder, texts, output_tokens, concurrency, self.plan.endpoint))
            measured = repeat(observe(wire.take()), set())
        summary = summarize(Cell(concurrency, input_tokens, output_tokens, [measured]))
        return Overhead(concurrency, summary.ttft_ms[0], summary.tpot_ms[0], tokens_per_s(measured), len(measured.requests))


@contextlib.contextmanager
def _instant_server() -> Iterator[str]:
    """The mock server as a process of its own, so that it shares no interpreter with the tap."""
    command = [sys.executable, "-m", "harness.serving.mock_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def check_plan(plan: Plan) -> None:
    """Raises UsageError for a plan that cannot be measured."""
    sizes = [*plan.concurrency, *plan.input_tokens, *plan.output_tokens, plan.repeats, plan.requests or 1]
    if min(sizes) < 1:
        raise UsageError("concurrency, input and output tokens, repeats and requests must each be at least 1")
    if plan.requests is not None and plan.requests < max(plan.concurrency):
        raise UsageError(
            f"{plan.requests} requests never keep {max(plan.concurrency)} under way at once: ask for more (--requests)"
        )


def _line(cell: Cell) -> str:
    found = summarize(cell)
    speed, first = found.tokens_per_s[0], found.ttft_ms[0]
    if speed is None or first is None:
        return f"{cell.name}: no speed ({found.invalid or 'the run had no steady state'})"
    counted = f", {found.requests - found.failed} of {found.requests} requests succeeded" if found.requests else ""
    return f"{cell.name}: {speed:.1f} tokens/s, ttft {first:.0f} ms{counted}"
