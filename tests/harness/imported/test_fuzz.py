"""Mutated result files and server replies: an answer or one QadError, never anything else, in bounded time and memory.

Seeded, so a failure comes again. A fixed number of cases a target here; FUZZ=50 makes fifty times as many.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.compare.gate import judge
from harness.compare.policy import load_policy
from harness.compare.recovery import compare
from harness.imported.scores import read_imported
from harness.records import comparison as comparisons
from harness.records import record as records
from harness.records.record import Record
from harness.records.serving import Cell
from harness.serving.observe import observe, repeat
from harness.serving.pareto import pareto
from harness.serving.statistics import summarize
from harness.serving.wire import Connection
from qad.errors import QadError
from reports.sections.serving import serving_table

CASES = 100 * int(os.environ.get("FUZZ", "1"))
SECONDS, MEGABYTES = 20, 1000  # of one case; of all together
RECORDED = Path(__file__).parent / "recorded"

# --- mutations -----------------------------------------------------------------------------------

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -7,
    1,
    1.5,
    -0.5,
    1e308,
    5e-324,
    10**30,
    10**290,
    "",
    "x",
    "7",
    "NaN",
    "\u2028",
    "\ud800",
    "\x1b[31m",
    "a" * 5000,
    [],
    [1],
    [[]],
    {},
    {"": None},
    {"error": "x"},
    [None] * 50,
]
RAW = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 5000,
    b'{"a":' * 3000,
    b"\xff",
    b"\x00",
    b"\xef\xbb\xbf",
    b'"',
    b"}",
    b",",
    b"\n",
    b"\r\n",
    "\u2028\x85".encode(),
    b"null",
    b'"results": 1,',
    b"data: ",
    b"[DONE]",
    b"-",
    b"0x5",
    b": ",
]


def mutated(document: Any, rng: random.Random) -> Any:
    """One to three nodes of a JSON value replaced, removed, renamed, doubled or exchanged."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(document))
        if not places:
            return rng.choice(VALUES)
        holder, key = rng.choice(places)
        how = rng.randrange(6)
        if how < 3:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif how == 3:
            del holder[key]
        elif how == 4:
            other, name = rng.choice(places)
            if isinstance(other, dict) or name < len(other):
                holder[key] = copy.deepcopy(other.get(name)) if isinstance(other, dict) else copy.deepcopy(other[name])
        elif isinstance(holder, dict):
            holder[f"{key}{rng.choice(('', ' ', ',none', '_stderr'))}"] = holder.pop(key)
        else:
            holder.insert(key, copy.deepcopy(holder[key]))
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    children = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    for key, child in children:
        yield value, key
        yield from _places(child)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to three cuts, insertions or changes of the bytes."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(5)
        if how == 0:
            data = data[:at] + rng.choice(RAW) + data[at:]
        elif how == 1:
            data = data[:at] + rng.choice(RAW) + data[at + rng.randint(1, 40) :]
        elif how == 2:
            data = data[:at] + data[at + rng.randint(1, 200) :]
        elif how == 3:
            data = data[:at]
        else:
            data = data[:at] + data[max(0, at - rng.randint(1, 200)) :]
    return data


def text_of(documents: list[Any], rng: random.Random) -> bytes:
    """One document, or one a line; sometimes the bytes are damaged as well."""
    changed = list(documents)
    if rng.random() < 0.8:
        place = rng.randrange(len(changed))
        changed[place] = mutated(changed[place], rng)
    data = "\n".join(json.dumps(d) for d in changed).encode()
    return damaged(data, rng) if rng.random() < 0.4 else data


# --- guards --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """A case that runs on is ended; all of them together may not have taken much memory."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"a case ran for {SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, late)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1024 * MEGABYTES


def each(name: str, run: Callable[[random.Random], object], allowed: tuple[type[Exception], ...] = (QadError,)) -> int:
    """Run all cases of a target; how many of them were refused. What is not allowed escapes, with its number."""
    refused = 0
    for number in range(CASES):
        signal.alarm(SECONDS)
        try:
            run(random.Random(f"{name} {number}"))
        except allowed as error:
            refused += 1
            message = str(error)
        except BaseException as error:
            error.add_note(f"case {number} of {name}")
            raise
        else:
            continue
        assert "\n" not in message, (name, number)
        assert len(message) < 2000, (name, number)
    return refused


# --- targets -------------------------------------------------------------------------------------

MS = 1_000_000
SGLANG = {
    "backend": "sglang",
    "max_concurrency": 2,
    "request_rate": 2.0,
    "random_input_len": 4,
    "random_output_len": 3,
    "duration": 2.0,
    "completed": 2,
    "failed": 1,
    "total_output_tokens": 6,
    "total_output_tokens_retokenized": 7,
    "request_throughput": 1.0,
    "output_throughput": 3.0,
    "mean_ttft_ms": 150.0,
    "median_ttft_ms": 150.0,
    "errors": ["", ""],
    "input_lens": [4, 4],
    "output_lens": [3, 3],
    "ttfts": [0.1, 0.2],
    "itls": [[0.04, 0.06], [0.05, 0.05]],
}
TRTLLM = [
    {
        "id": i,
        "num_input_tokens": 4,
        "num_output_tokens": 5,
        "error_tokens": 0,
        "start_timestamp": (10 + i) * MS,
        "first_token_timestamp": (110 + i) * MS,
        "end_timestamp": (190 + i) * MS,
    }
    for i in range(3)
]
PERCENTILES = {"p50": 20.0, "p90": 21.0, "p99": 22.0, "average": 20.1}
REPORT = {
    "engine": {"version": "1.2.1"},
    "streaming_metrics": {"ttft_percentiles": PERCENTILES, "tpot_percentiles": PERCENTILES},
    "request_info": {"num_requests": 64, "avg_input_length": 128.0, "avg_output_length": 64.0},
    "performance": {
        "total_latency_ms": 4000.0,
        "system_output_throughput_tok_s": 1024.0,
        "request_latency_percentiles_ms": PERCENTILES,
    },
}
LM_EVAL = {
    "results": {"arc": {"alias": "arc", "acc,none": 0.8, "acc_stderr,none": 0.04}, "all": {"acc,none": 0.7}},
    "group_subtasks": {"all": ["arc"]},
    "versions": {"arc": 1.0},
    "n-shot": {"arc": 5},
    "higher_is_better": {"arc": {"acc": True}},
    "configs": {"arc": {"output_type": "multiple_choice"}},
    "n-samples": {"arc": {"original": 9, "effective": 9}},
    "model_name": "m",
    "config": {"model": "hf", "model_args": {"pretrained": "m"}, "limit": None, "random_seed": 0},
}
SAMPLES = [
    {
        "doc_id": i,
        "doc": {"q": i},
        "target": "0",
        "arguments": {"gen_args_0": {}, "gen_args_1": {}},
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": f"d{i}",
        "prompt_hash": f"p{i}",
        "target_hash": f"t{i}",
        "acc": float(i % 3 > 0),
    }
    for i in range(9)
]
NEMO = [{"problem_idx": i, "reward": float(i % 3 > 0), "repeat": 0, "expected_answer": str(i)} for i in range(9)]
CSV = b"# source: a\nbenchmark,bf16,ptq,qad,items,stderr,maximum\nmmlu,80.1,78.2,79.9,1000,0.5,\nocr,855,850,858,,,1000\n"


def lines(name: str) -> list[Any]:
    text = (RECORDED / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else [json.loads(text)]


def used(found: list[Record] | None, folder: Path, base: list[Record] | None) -> None:
    """What every command does with records: write, read back, compare, judge, show."""
    for number, record in enumerate(found or []):
        path = folder / f"{number}.json"
        records.write(record, path)
        assert records.to_json(records.read(path)) == records.to_json(record)
    if not found or not base:
        return
    both = [*base, *(r for r in found if r.arm != "bf16")]
    comparison = compare(both)
    judge(comparison, load_policy("drop-1pct"))
    raw = json.loads(json.dumps(comparisons.to_json(comparison)))
    comparisons.from_json(raw)
    serving_table(comparison, both)
    for record in both:
        if record.kind == "serving":
            pareto(record)


FILES: dict[str, tuple[list[Any], str]] = {
    "vllm": (lines("vllm.json"), "r.json"),
    "guidellm": (lines("guidellm.json"), "r.json"),
    "nemo": (NEMO, "r.jsonl"),
    "aiperf": (lines("aiperf.jsonl"), "r.jsonl"),
    "sglang": ([SGLANG, SGLANG], "r.jsonl"),
    "trtllm": ([TRTLLM], "r.json"),
    "trtllm report": ([REPORT], "r.json"),
    "lm-eval": ([LM_EVAL], "results_1.json"),
    "lm-eval samples": (SAMPLES, "samples_arc_1.jsonl"),
}


@pytest.mark.parametrize("name", FILES)
def test_result_files(name: str, tmp_path: Path) -> None:
    documents, file = FILES[name]
    folder = tmp_path / "in"
    folder.mkdir()
    if name == "lm-eval samples":
        (folder / "results_1.json").write_text(json.dumps(LM_EVAL))
    path = folder if name.startswith("lm-eval") else folder / file
    (folder / file).write_bytes("\n".join(json.dumps(d) for d in documents).encode())
    base = read_imported(path, "bf16")
    assert base
    used(read_imported(path, "qad"), tmp_path, base)

    def run(rng: random.Random) -> None:
        (folder / file).write_bytes(text_of(documents, rng))
        used(read_imported(path, "qad"), tmp_path, base)

    assert 0 < each(name, run) < CASES


def test_csv_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"

    def run(rng: random.Random) -> None:
        path.write_bytes(damaged(CSV, rng))
        found = read_imported(path, "qad") or []
        if "bf16" in {record.arm for record in found}:
            used(found, tmp_path, [record for record in found if record.arm == "bf16"])

    assert 0 < each("csv", run) < CASES


@pytest.mark.parametrize("kind", ["serving", "scores", "accuracy"])
def test_records(kind: str, tmp_path: Path) -> None:
    """A record that was changed by hand is read as what it says, or refused as a ValueError of one line, and then used."""
    source = {"serving": (SGLANG, "r.json"), "scores": (LM_EVAL, "results_1.json"), "accuracy": (NEMO, "r.jsonl")}[kind]
    documents = source[0] if isinstance(source[0], list) else [source[0]]
    (tmp_path / source[1]).write_text("\n".join(json.dumps(d) for d in documents))
    base = read_imported(tmp_path if kind == "scores" else tmp_path / source[1], "bf16")
    assert base
    plain = records.to_json(base[0]) | {"arm": "qad"}
    path = tmp_path / "record.json"

    def run(rng: random.Random) -> None:
        path.write_bytes(text_of([plain], rng))
        used([records.read(path)], tmp_path / "out", base)

    assert 0 < each(f"record {kind}", run, (QadError, ValueError)) < CASES


EVENTS = [
    {
        "object": "text_completion",
        "choices": [{"text": " a", "finish_reason": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    },
    {"choices": [{"index": 0, "delta": {"content": "b", "reasoning": "c", "tool_calls": [{"i": 1}]}}]},
    {"choices": [{"text": "", "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}},
]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
HEADS = [STREAM + b"Transfer-Encoding: chunked\r\n\r\n", STREAM + b"\r\n", b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\n{}"]
REQUEST = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}'


def test_server_replies() -> None:
    """Nothing is refused here: a reply is a success or a failed request with its reason, and the run can be summed up."""

    def run(rng: random.Random) -> None:
        connections = []
        for _ in range(2):
            events = [mutated(event, rng) if rng.random() < 0.4 else event for event in EVENTS]
            body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
            head = rng.choice(HEADS)
            if b"chunked" in head:
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            answer = damaged(head + body, rng) if rng.random() < 0.7 else head + body
            connection = Connection()
            connection.sent.add(REQUEST * rng.randint(1, 2), 1.0)
            for at in range(0, len(answer), step := rng.choice((1, 7, 100_000))):
                connection.received.add(answer[at : at + step], 1.1 + at / 1e4)
            connection.ended_s = rng.choice((None, 9.0))
            connections.append(connection)
        observed = observe(connections, lambda words: len(words.encode()))
        assert all(o.request.reason for o in observed if o.request.failed)
        assert all(not o.request.impossible for o in observed if not o.request.failed)
        summarize(Cell(2, 3, 2, [repeat(observed, set())]))

    assert each("replies", run) == 0
