"""Sweeps against a scripted server: which prompts it sees, how many at once, in which order, and what is said of it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.records.record import Engine, from_json, to_json
from harness.records.serving import Cell, Overhead, ServingData
from harness.serving import sweep
from harness.serving.drivers import Load
from harness.serving.mock_server import MockServer, Script, at_once, mock_server, tokens
from harness.serving.observe import observe, repeat
from harness.serving.statistics import summarize
from harness.serving.sweep import Plan, measure_serving, turns
from harness.serving.tap import tap
from qad.errors import DataError, UsageError

ENGINE = Engine("mock", "1", "none", "cpu", "no kernels", False)


@dataclasses.dataclass(frozen=True)
class Ready:
    base_url: str
    model: str = "mock"
    engine: Engine = ENGINE


class Arms:
    """Servers of several arms. up: how many are up; most: at once; starts: arms in the order in which they were started."""

    def __init__(self, script: Script = at_once) -> None:
        self.script = script
        self.up = self.most = 0
        self.starts: list[str] = []
        self.bodies: dict[str, list[dict[str, Any]]] = {}

    def start(self, arm: str, engine: Engine = ENGINE) -> Any:
        @contextlib.contextmanager
        def serve() -> Iterator[Ready]:
            self.starts.append(arm)
            self.up += 1
            self.most = max(self.most, self.up)
            with mock_server(self.script) as mock:
                yield Ready(mock.base_url, engine=engine)
                self.bodies.setdefault(arm, []).extend(mock.bodies)
            self.up -= 1

        return serve


@pytest.fixture(autouse=True)
def _no_overhead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "overhead" not in request.node.name:
        monkeypatch.setattr(sweep._Bench, "overhead", lambda self, concurrency: Overhead(concurrency, None, None, None, 0))


def measure(arms: Arms, plan: Plan, driver: Any, words: Any, names: str = "bf16") -> dict[str, ServingData]:
    starts = {arm: arms.start(arm) for arm in names.split()}
    found = measure_serving(starts, plan, driver, Path("tokenizer"), tokenizer=words)
    assert {engine for _, engine in found.values()} == {ENGINE}
    return {arm: data for arm, (data, _) in found.items()}


def test_arms_are_interleaved_forwards_and_backwards() -> None:
    assert [arm for _, arm in turns(["bf16", "ptq", "qad"], 2)] == ["bf16", "ptq", "qad", "qad", "ptq", "bf16"]


# --- E10 ------------------------------------------------------------------------------------------


def test_no_prompt_is_shared_between_cells_repeats_and_warm_up(tiny_driver: Any, words: Any) -> None:
    arms = Arms()
    plan = Plan([1, 2], [6, 9], [4], repeats=3, requests=4)
    found = measure(arms, plan, tiny_driver, words, "bf16 ptq")
    assert arms.most == 1, "two servers on one device"
    assert arms.starts == ["bf16", "ptq", "bf16", "ptq"], "an arm that is next again stays up"
    for arm, data in found.items():
        prompts = [body["prompt"] for body in arms.bodies[arm]]
        assert len(prompts) == len(set(prompts)) == 3 * 2 * (1 + 4 + 2 + 4)
        assert [len(cell.repeats) for cell in data.cells] == [3] * 4
        for cell in data.cells:
            assert [r.prompts_seen_before for r in cell.repeats] == [0, 0, 0]
            assert [len(r.requests) for r in cell.repeats] == [4] * 3, "the warm-up is not counted"
            assert not summarize(cell).warnings
        assert all(body["temperature"] == 0 and body["ignore_eos"] is True for body in arms.bodies[arm])
    assert sorted(b["prompt"] for b in arms.bodies["bf16"]) == sorted(b["prompt"] for b in arms.bodies["ptq"])
    assert {len(words(body["prompt"]).input_ids) for body in arms.bodies["bf16"]} == {6, 9}


def test_a_client_that_shares_prompts_is_found_out(words: Any, tiny_driver: Any) -> None:
    """Also where the server says that its cache answered."""

    def cached(body: dict[str, Any]) -> Any:
        *events, usage, done = tokens(body, delay_s=0, first_s=0)
        yield from events
        usage[1]["usage"] |= {"prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 6}}
        yield from (usage, done)

    class Forgetful:
        name = "forgetful"

        def run(self, load: Any) -> None:
            tiny_driver.run(dataclasses.replace(load, prompts=["the same"] * len(load.prompts)))

    data = measure(Arms(cached), Plan([2], [6], [4], 2, 4), Forgetful(), words)["bf16"]
    summary = summarize(data.cells[0])
    assert [r.prompts_seen_before for r in data.cells[0].repeats] == [4, 4]
    assert summary.cached_share == pytest.approx(6 / 8)
    assert "8 requests repeat a prompt" in summary.warnings[0]
    assert "75% of the prompt tokens" in summary.warnings[1]
    assert "the server counted 8 prompt tokens in 8 of 8 requests, 6 were sent" in summary.warnings[2]


def test_a_client_that_samples_is_found_out(words: Any) -> None:
    import http.client
    import json
    from urllib.parse import urlsplit

    class Sampler:
        name = "sampler"

        def run(self, load: Any) -> None:
            for prompt in load.prompts:
                connection = http.client.HTTPConnection(urlsplit(load.base_url).netloc)
                connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 4}))
                connection.getresponse().read()
                connection.close()

    data = measure(Arms(), Plan([1], [6], [4], 1, 2), Sampler(), words)["bf16"]
    assert data.cells[0].repeats[0].not_greedy == 2
    assert "without temperature 0" in summarize(data.cells[0]).warnings[0]


# --- E7 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 100])
def test_more_than_a_hundred_at_once_or_a_refusal(limit: int | None, tiny_driver: Any) -> None:
    """The server answers nobody before all have come; a client that holds some back is found out."""
    expected = limit or 256
    servers: list[MockServer] = []

    def script(body: dict[str, Any]) -> Any:
        deadline = time.monotonic() + 60
        while servers[0].peak < expected and time.monotonic() < deadline:
            yield 0.05, {"choices": []}
        yield from at_once(body)

    tiny_driver.limit = limit
    with mock_server(script) as mock, tap(mock.base_url) as wire:
        servers.append(mock)
        prompts = [f"prompt {i}" for i in range(256)]
        tiny_driver.run(Load(wire.base_url, "mock", Path(), prompts, 4, 256))
        measured = repeat(observe(wire.take()), set())
    assert mock.peak == measured.peak_active == expected
    invalid = summarize(Cell(256, 2, 4, [measured])).invalid
    assert invalid == ("" if limit is None else "the client kept at most 100 requests under way, 256 were asked for")


# --- E11 ------------------------------------------------------------------------------------------


def test_answers_that_are_too_short_are_counted(tiny_driver: Any, words: Any) -> None:
    def short(body: dict[str, Any]) -> Any:
        return tokens(body, delay_s=0.05, first_s=0.2, share=0.6)

    data = measure(Arms(short), Plan([2], [6], [10], 2, 4), tiny_driver, words)["bf16"]
    summary = summarize(data.cells[0])
    assert (summary.output_tokens, summary.short, summary.invalid) == (6.0, 8, "")
    assert "8 of 8 answers are shorter than the 10 tokens asked for" in summary.warnings


# --- the record -----------------------------------------------------------------------------------


def test_the_record_survives_json(tiny_driver: Any, words: Any) -> None:
    from harness.records.record import Record

    data = measure(Arms(), Plan([2], [6], [4], 2, 4), tiny_driver, words)["bf16"]
    record = Record("bf16", "m", "c", ENGINE, {}, {}, "now", 1.0, data)
    assert from_json(to_json(record)) == record
    assert record.kind == "serving"


def test_the_overhead_of_the_client_stands_beside_the_results(tiny_driver: Any, words: Any) -> None:
    data = measure(Arms(), Plan([1, 2], [6], [4], 1, 4), tiny_driver, words)["bf16"]
    assert [cost.concurrency for cost in data.overhead] == [1, 2]
    assert all(cost.n == 4 and cost.ttft_ms is not None and cost.ttft_ms >= 0 for cost in data.overhead)


def test_another_kernel_after_a_restart_is_an_error(tiny_driver: Any, words: Any) -> None:
    kernels = iter(["marlin", "marlin", "emulation"])
    arms = Arms()

    def start() -> Any:
        return arms.start("bf16", dataclasses.replace(ENGINE, kernel_path=next(kernels)))()

    with pytest.raises(DataError, match="after a restart"):
        measure_serving({"bf16": start, "ptq": start}, Plan([1], [6], [4], 2, 2), tiny_driver, Path(), tokenizer=words)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan([0], [6], [4]), "at least 1"),
        (Plan([4], [6], [4], requests=3), "never keep 4"),
        (Plan([1], [6], [4], repeats=0), "at least 1"),
    ],
)
def test_plans_that_cannot_be_measured(plan: Plan, message: str, tiny_driver: Any, words: Any) -> None:
    with pytest.raises(UsageError, match=message):
        measure_serving({"bf16": Arms().start("bf16")}, plan, tiny_driver, Path(), tokenizer=words)
    assert tiny_driver.loads == []
