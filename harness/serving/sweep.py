"""Measure arms behind servers: cells of concurrency and lengths, every repeat kept.

Order. Arms are interleaved repeat by repeat, forwards and backwards (BF16 PTQ QAD, QAD PTQ BF16, ...), so that a drift of the
machine hits them alike. Two servers never share a device: an arm's server is stopped before the next is started,
and stays up only where the next turn is the same arm's. In a turn every cell runs once, after a warm-up of its shape.
Prompts. Repeat i of a cell sends the same prompts to every arm; no prompt is used twice for one arm, warm-up included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from harness.records.record import Engine
from harness.records.serving import Cell, Overhead, Repeat, ServingData
from harness.serving.drivers import Driver, Load
from harness.serving.energy import EnergyMeter
from harness.serving.mock_server import MODEL
from harness.serving.observe import CountTokens, observe, repeat
from harness.serving.prompts import random_prompts
from harness.serving.statistics import summarize, tokens_per_s
from harness.serving.tap import Tap, tap
from qad.errors import DataError, UsageError

WARM_UP_TOKENS = 16


class Server(Protocol):
    """A server that is ready. model: the name it serves the checkpoint under."""

    @property
    def base_url(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def engine(self) -> Engine: ...


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


def measure_serving(
    arms: Mapping[str, Start],
    plan: Plan,
    driver: Driver,
    tokenizer_folder: Path,
    say: Callable[[str], None] = lambda line: None,
    tokenizer: Any = None,
) -> dict[str, tuple[ServingData, Engine]]:
    """Every arm's cells, and what served them. tokenizer: of `tokenizer_folder`, loaded where not given.

    Raises UsageError for a plan that cannot be measured, LoadToolError where the load tool fails, DataError where a
    restarted server computes in another way than before.
    """
    check_plan(plan)
    if tokenizer is None:
        from qad.model.loader import load_tokenizer

        tokenizer = load_tokenizer(tokenizer_folder)

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    bench = _Bench(plan, driver, tokenizer_folder, tokenizer, count_tokens)
    order = turns(list(arms), plan.repeats)
    found: dict[str, list[list[Repeat]]] = {arm: [[] for _ in plan.cells()] for arm in arms}
    seen: dict[str, set[str]] = {arm: set() for arm in arms}
    engines: dict[str, Engine] = {}
    place = 0
    while place < len(order):
        arm = order[place][1]
        with arms[arm]() as server, tap(server.base_url) as wire:
            if engines.setdefault(arm, server.engine) != server.engine:
                raise DataError(f"the server of {arm} was {engines[arm]}, after a restart it is {server.engine}")
            while place < len(order) and order[place][1] == arm:
                turn = order[place][0]
                for cell, runs in enumerate(found[arm]):
                    runs.append(bench.run(wire, server.model, turn, cell, seen[arm]))
                    say(f"{arm}, repeat {turn + 1} of {plan.repeats}, {_line(plan, cell, runs[-1])}")
                place += 1
    overhead = [bench.overhead(concurrency) for concurrency in sorted(set(plan.concurrency))]
    return {
        arm: (
            ServingData(
                driver=driver.name,
                endpoint=plan.endpoint,
                order=[name for _, name in order],
                overhead=overhead,
                cells=[Cell(*shape, runs) for shape, runs in zip(plan.cells(), cells, strict=True)],
            ),
            engines[arm],
        )
        for arm, cells in found.items()
    }


@dataclasses.dataclass(frozen=True)
class _Bench:
    plan: Plan
    driver: Driver
    folder: Path
    tokenizer: Any
    count_tokens: CountTokens

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


def _line(plan: Plan, cell: int, measured: Repeat) -> str:
    shape = Cell(*plan.cells()[cell], [measured])
    good = [r for r in measured.requests if not r.failed]
    speed = tokens_per_s(measured)
    middle = statistics.median([r.ttft_ms for r in good if r.ttft_ms is not None]) if good else None
    return f"{shape.name}: " + (
        f"{speed:.1f} tokens/s, ttft {middle:.0f} ms, {len(good)} of {len(measured.requests)} requests succeeded"
        if speed is not None and middle is not None
        else "no successful request"
    )
