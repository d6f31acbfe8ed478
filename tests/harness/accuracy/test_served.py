"""An OpenAI server through lm-eval's back-ends: what is sent, what comes back, what fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from scored import score_tasks

from harness.accuracy import served as server_backend
from harness.accuracy.journal import Answer, as_ended
from harness.accuracy.scores import measure_suite
from harness.accuracy.served import open_server
from harness.accuracy.suite import Generation, Suite, SuiteTask
from harness.accuracy.task_files import Places
from harness.engines.transformers import LoadedModel
from qad.errors import DataError, UsageError

Reply = Callable[[dict[str, Any]], Any]


class Server:
    """Answers by `reply(payload)`: a value as JSON, an HTTP status to fail with, or the bytes of whatever else."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.reply: Reply = lambda payload: {}
        self.models: list[dict[str, Any]] = [{"id": "tiny", "max_model_len": 512, "owned_by": "vllm"}]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"data": outer.models})

            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(payload)
                found = outer.reply(payload)
                if isinstance(found, bytes):
                    self.wfile.write(found)
                    self.close_connection = True
                else:
                    self._send(found, {}) if isinstance(found, int) else self._send(200, found)

            def _send(self, status: int, body: Any) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 128  # of 5, which many requests at once overflow: connections would be reset

        self.http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(server_backend, "_WAIT_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever, daemon=True)
    thread.start()
    yield found
    found.http.shutdown()
    found.http.server_close()
    thread.join()


def says(text: str, reason: str = "stop", tokens: int = 3) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


def suite(think_end: str | None = None, chat: bool = False, **task: Any) -> Suite:
    return Suite(name="m", think_end=think_end, chat_template=chat, tasks=[SuiteTask(task="sums", **task)])


def test_every_request_is_explicit_and_has_a_seed_of_its_own(
    server: Server, sums: Places, tiny: LoadedModel, tiny_llama_dir: Path
) -> None:
    server.reply = lambda payload: says("7\n" if payload["seed"] % 2 else "8\n", tokens=2)
    backend, engine = open_server(server.url, str(tiny_llama_dir), chat=False, think_end=None)
    protocol = suite(repeats=8, generation=Generation(temperature=0.6, top_p=0.95))
    measured = measure_suite(backend, protocol, sums)
    assert (engine.name, engine.version) == ("server", "vllm")
    assert len(server.requests) == 24
    assert len({request["seed"] for request in server.requests}) == 24
    for request in server.requests:
        assert (request["temperature"], request["top_p"], request["top_k"]) == (0.6, 0.95, 0)
        assert (request["max_tokens"], request["stop"], request["model"]) == (6, ["\n"], "tiny")
    prompts = {tuple(request["prompt"][0]) for request in server.requests}
    assert prompts == {tuple(tiny.tokenizer.encode(q)) for q in ("The river", "A heron", "The miller")}
    scores = [item.score for item in measured.data.tasks[0].items]
    assert 0 < sum(scores) < 24
    outputs = measured.data.tasks[0].outputs
    assert outputs is not None
    assert (outputs.tokens, set(outputs.finish)) == ([2] * 24, {"stop"})
    again = measure_suite(backend, protocol, sums)
    assert again.data == measured.data


def test_stop_strings_are_not_sent_for_a_model_that_thinks(server: Server, sums: Places, tiny_llama_dir: Path) -> None:
    replies = iter([says("a\n\nb</think>7\nx"), says("the answer is 7", "length", 6), says("7")])
    server.reply = lambda payload: next(replies)
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=False, think_end="</think>")
    measured = measure_suite(backend, suite("</think>"), sums)
    assert all("stop" not in request for request in server.requests)
    assert sorted(sample.scored for sample in measured.samples) == ["", "7", "7"]
    cut = next(sample for sample in measured.samples if sample.finish == "length")
    assert (cut.scored, cut.empty, cut.tokens, cut.thinking_tokens) == ("", True, 6, 6)


@pytest.mark.parametrize(
    ("message", "reason", "scored"),
    [
        ({"content": "7\nx"}, "stop", "7"),
        ({"content": "7", "reasoning_content": "so\n\n6+1"}, "stop", "7"),
        ({"content": None, "reasoning_content": "so 7"}, "length", ""),
        ({"content": "a</think>7"}, "stop", "7"),
    ],
)
def test_conversations(
    server: Server, sums: Places, tiny_llama_dir: Path, message: dict[str, Any], reason: str, scored: str
) -> None:
    server.reply = lambda payload: {
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}],
        "usage": {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}},
    }
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=True, think_end="</think>")
    measured = measure_suite(backend, suite("</think>", chat=True, limit=1), sums)
    assert server.requests[0]["messages"][-1] == {"role": "user", "content": "The river"}
    (sample,) = measured.samples
    assert (sample.scored, sample.tokens, sample.thinking_tokens, sample.finish) == (scored, 9, 4, reason)
    assert measured.data.tasks[0].protocol["first_ids"] == []


def test_failed_requests_are_tried_again_then_counted(server: Server, sums: Places, tiny_llama_dir: Path, tmp_path: Path) -> None:
    from harness.accuracy.journal import Journal

    bad: set[int] = set()

    def reply(payload: dict[str, Any]) -> Any:
        first = len(server.requests) == 1
        if first:
            bad.add(payload["seed"])
        return 500 if payload["seed"] in bad else says("7")

    server.reply = reply
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=False, think_end=None, concurrency=2)
    path = tmp_path / "answers.jsonl"
    journal = Journal(path, {})
    measured = measure_suite(backend, suite(), sums, journal=journal)
    journal.close()
    assert len(server.requests) == 2 + server_backend.TRIES
    assert sorted(sample.finish for sample in measured.samples) == ["error", "stop", "stop"]
    assert sum(item.score for item in measured.data.tasks[0].items) == 2
    bad.clear()
    server.requests.clear()
    server.reply = lambda payload: says("7")
    journal = Journal(path, {})
    again = measure_suite(backend, suite(), sums, journal=journal)
    journal.close()
    assert len(server.requests) == 1, "what failed is asked again, what was answered is not"
    assert sum(item.score for item in again.data.tasks[0].items) == 3


def json_reply(text: str) -> bytes:
    kind = "Content-Type: application/json\r\nConnection: close\r\n"
    head = f"HTTP/1.1 200 OK\r\n{kind}Content-Length: {len(text.encode())}\r\n\r\n"
    return head.encode() + text.encode()


GOOD = says("7")
NONSENSE: dict[str, Any] = {
    "a choice that is a number": {**GOOD, "choices": [7]},
    "no choice": {**GOOD, "choices": []},
    "two choices": {**GOOD, "choices": GOOD["choices"] * 2},
    "choices that are an object": {**GOOD, "choices": {"text": "7"}},
    "a text that is a number": {**GOOD, "choices": [{"text": 7, "finish_reason": "stop"}]},
    "a reason that is a list": {**GOOD, "choices": [{"text": "7", "finish_reason": ["stop"]}]},
    "an aborted request": says("7", "abort"),
    "an engine's error": says("7", "error"),
    "a list": [GOOD],
    "a number": json_reply("7"),
    "usage that is a string": {**GOOD, "usage": "x"},
    "-7 tokens": says("7", tokens=-7),
    "1e999 tokens": json_reply('{"choices": [{"text": "7", "finish_reason": "stop"}], "usage": {"completion_tokens": 1e999}}'),
    "deep JSON": json_reply("[" * 100_000),
    "no JSON": json_reply("{"),
    "an error object": {"error": {"message": "engine died"}},
    "a bad status": b"HTTP/1.1 abc\r\n\r\n",
    "a status of five digits": b"HTTP/1.1 20000 OK\r\n\r\n",
    "a bad length": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
    "a length below 0": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    "an answer cut short": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 500\r\n\r\n{",
    "no HTTP": b"\xff\xfe garbage",
    "nothing": b"",
    "a refusal": 400,
    "a failure": 503,
}


def test_nonsense_is_a_failed_request_with_its_reason(server: Server, sums: Places, tiny_llama_dir: Path) -> None:
    """A question a kind of nonsense: each fails by itself, all others are scored."""
    kinds = list(NONSENSE)
    rows = "".join(json.dumps({"query": f"Number {i}", "answer": "7"}) + "\n" for i in range(len(kinds) + 5))
    (sums.folders[1] / "rows.jsonl").write_text(rows)
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=False, think_end=None)
    number = {tuple(backend.tok_encode(f"Number {i}")): i for i in range(len(kinds) + 5)}

    def reply(payload: dict[str, Any]) -> Any:
        place = number[tuple(payload["prompt"][0])]
        return NONSENSE[kinds[place]] if place < len(kinds) else GOOD

    server.reply = reply
    measured = measure_suite(backend, suite(), sums)
    outputs = measured.data.tasks[0].outputs
    assert outputs is not None
    assert [how == "error" for how in outputs.finish] == [i < len(kinds) for i in range(len(kinds) + 5)]
    assert [item.score for item in measured.data.tasks[0].items] == [0.0] * len(kinds) + [1.0] * 5
    assert sum((measured.data.failures or {}).values()) == len(kinds)
    assert measured.data.failed.startswith(f"{len(kinds)} requests failed: ")
    reasons = "; ".join(measured.data.failures or {})
    for reason in ("a reply with [7] for one choice", "completion_tokens is -7", "HTTP 400", "HTTP 503", "ended by abort"):
        assert reason in reasons
    refused = sum(
        tuple(r["prompt"][0]) == tuple(backend.tok_encode(f"Number {kinds.index('a refusal')}")) for r in server.requests
    )
    assert refused == 1, "what is refused is not asked again"


@pytest.mark.parametrize("damage", ["short", "long", "nan", "positive", "text", "none", "deep"])
def test_log_likelihoods_that_are_none_are_not_scored(server: Server, tiny_llama_dir: Path, damage: str) -> None:
    def reply(payload: dict[str, Any]) -> Any:
        (ids,) = payload["prompt"]
        own: list[Any] = [None, *[-1.0] * len(ids)]
        top = [None, *[{"t": -0.5}] * len(ids)]
        own = {
            "short": own[:-1],
            "long": [*own, -1.0],
            "nan": [None, float("nan"), *own[2:]],
            "positive": [None, 0.5, *own[2:]],
            "text": [None, "-1", *own[2:]],
            "none": [None, None, *own[2:]],
        }.get(damage, own)
        whole = {"choices": [{"index": 0, "logprobs": {"token_logprobs": own, "top_logprobs": top}}]}
        return json_reply("[" * 100_000) if damage == "deep" else whole

    server.reply = reply
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=False, think_end=None)
    with pytest.raises(DataError, match="failed 3 times to score a prompt") as caught:
        measure_suite(backend, Suite(name="m", tasks=[SuiteTask(task="qad_facts", limit=2)]), Places.of())
    assert "\n" not in str(caught.value)


THINK = "</think>"


@pytest.mark.parametrize(
    ("text", "reason", "tokens", "scored", "finish"),
    [
        ("<think>6 and 1 is 7", "stop", 3, "", "length"),  # thinking that a stop cut: no answer
        ("<think>6 and 1 is 7", "", 3, "", "length"),
        ("6 and 1 is 7", "", 3, "", "length"),  # nobody tells that it is over
        ("6 and 1 is 7", "length", 3, "", "length"),
        ("<think>6 + 1</think>7", "stop", 3, "7", "stop"),
        ("6 + 1</think>7", "", 3, "7", ""),
        ("6 + 1</think>7", "", 6, "7", "length"),  # all six tokens that it had
        ("7", "stop", 3, "7", "stop"),  # it did not think
        ("7", "stop", 6, "7", "stop"),
    ],
)
def test_thinking_that_was_cut_is_no_answer_whatever_the_server_says(
    server: Server, sums: Places, tiny_llama_dir: Path, text: str, reason: str, tokens: int, scored: str, finish: str
) -> None:
    server.reply = lambda payload: says(text, reason, tokens)
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=False, think_end=THINK)
    measured = measure_suite(backend, suite(THINK, limit=1), sums)
    (sample,) = measured.samples
    assert (sample.scored, sample.finish) == (scored, finish)


@pytest.mark.parametrize("reason", ["stop", None, "length"])
def test_thinking_alone_is_no_answer_in_a_conversation(
    server: Server, sums: Places, tiny_llama_dir: Path, reason: str | None
) -> None:
    server.reply = lambda payload: {
        "choices": [{"index": 0, "message": {"content": None, "reasoning_content": "so 7"}, "finish_reason": reason}]
    }
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=True, think_end=THINK)
    (sample,) = measure_suite(backend, suite(THINK, chat=True, limit=1), sums).samples
    assert (sample.scored, sample.finish, sample.text) == ("", "length", "so 7")


@pytest.mark.parametrize("prompt", ["Q<think>\n", "<think>a</think>b Q<think>"])
def test_thinking_that_the_prompt_opens_has_to_be_closed(prompt: str) -> None:
    answer = Answer("6 and 1 is 7", 5, "stop")
    assert as_ended(answer, prompt, THINK, 9).finish == "length"
    assert as_ended(answer, "<think>a</think>b Q", THINK, 9).finish == "stop"
    assert as_ended(answer, prompt, "[END]", 9).finish == "stop", "a mark that does not tell how it begins"
    assert as_ended(answer, prompt, None, 9) == answer


def test_log_likelihoods_are_those_of_the_model_in_this_process(server: Server, tiny: LoadedModel, tiny_llama_dir: Path) -> None:
    def reply(payload: dict[str, Any]) -> Any:
        (ids,) = payload["prompt"]
        with torch.no_grad():
            log_probs = tiny.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        own = [None, *(float(log_probs[i, ids[i + 1]]) for i in range(len(ids) - 1)), 0.0]
        top = [None, *({"t": float(log_probs[i].max())} for i in range(len(ids) - 1)), {"t": 0.0}]
        return {"choices": [{"index": 0, "logprobs": {"token_logprobs": own, "top_logprobs": top}}]}

    server.reply = reply
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=False, think_end=None)
    protocol = Suite(name="m", tasks=[SuiteTask(task="qad_facts", limit=6)])
    served = measure_suite(backend, protocol, Places.of()).data
    ours = score_tasks(tiny.model, tiny.tokenizer, ["qad_facts"], limit=6)
    assert served.tasks == ours.tasks
    assert all(request["echo"] and request["max_tokens"] == 1 for request in server.requests)


def test_a_server_that_cannot_be_used(server: Server, tiny_llama_dir: Path) -> None:
    def opened(**options: Any) -> Any:
        return open_server(server.url + "/v1/", str(tiny_llama_dir), chat=False, think_end=None, **options)

    server.models = [{"id": "tiny"}]
    with pytest.raises(UsageError, match="does not tell its context length"):
        opened()
    assert opened(max_length=64)[0].max_length == 64
    server.models = [{"id": "a", "max_model_len": 8}, {"id": "b", "max_model_len": 9}]
    with pytest.raises(UsageError, match="serves a, b: give one of them"):
        opened()
    assert opened(model="b")[0].model == "b"
    for models in ([7], "x", [{"id": 7}], [{"max_model_len": 8}], {"id": "a"}):
        server.models = models  # type: ignore[assignment]
        with pytest.raises(UsageError, match="does not answer as an OpenAI server"):
            opened()
    server.models = [{"id": "a", "max_model_len": -8}]
    with pytest.raises(UsageError, match="does not tell its context length"):
        opened()
    with pytest.raises(UsageError, match="does not answer as an OpenAI server"):
        open_server("http://127.0.0.1:9", str(tiny_llama_dir), chat=False, think_end=None)


def test_nothing_is_cut_to_2048_tokens(server: Server, sums: Places, tiny_llama_dir: Path) -> None:
    server.models[0]["max_model_len"] = 100_000
    (sums.folders[1] / "rows.jsonl").write_text(json.dumps({"query": "The river. " * 1500, "answer": "7"}) + "\n")
    server.reply = lambda payload: says("7")
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=False, think_end=None)
    measure_suite(backend, suite(), sums)
    assert len(server.requests[0]["prompt"][0]) == len(backend.tok_encode("The river. " * 1500)) > 2048
    server.models[0]["max_model_len"] = 512
    backend, _ = open_server(server.url, str(tiny_llama_dir), chat=False, think_end=None)
    with pytest.raises(DataError, match="the model takes 512"):
        measure_suite(backend, suite(), sums)
