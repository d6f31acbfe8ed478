"""A server that plays scripts: for the cost of client and observer (answers at once), and for trying out load tools.

It speaks the streaming OpenAI API over HTTP/1.1 and remembers what it was asked. As a process of its own:
`python -m harness.serving.mock_server` prints its address and answers at once until standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from harness.serving.loop_thread import loop_in_a_thread

MODEL = "mock"
BREAK = object()  # in a script: the connection ends here, in the middle of the stream
Body = dict[str, Any]
Script = Callable[[Body], Iterator[tuple[float, Any]]]  # (seconds to wait, event): a dict, a string, or BREAK


def at_once(body: Body) -> Iterator[tuple[float, Any]]:
    """max_tokens chunks of one token each without any delay, with usage."""
    yield from tokens(body, delay_s=0.0, first_s=0.0)


def tokens(body: Body, *, delay_s: float, first_s: float, share: float = 1.0) -> Iterator[tuple[float, Any]]:
    """`share` of max_tokens chunks of one token each: the first after first_s, the others after delay_s each."""
    count = max(1, int(share * (body.get("max_tokens") or body.get("max_completion_tokens") or 16)))
    running = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
    asked = len(str(body.get("prompt") or body.get("messages")).split())

    def usage(n: int) -> dict[str, int]:
        return {"prompt_tokens": asked, "completion_tokens": n, "total_tokens": asked + n}

    for i in range(count):
        last = i == count - 1
        event = chunk(body, " word", finish="length" if last else None)
        yield first_s if i == 0 else delay_s, {**event, **({"usage": usage(i + 1)} if running else {})}
    yield 0.0, {"id": "mock", "model": MODEL, "object": event["object"], "choices": [], "usage": usage(count)}
    yield 0.0, "[DONE]"


def chunk(body: Body, text: str, *, finish: str | None = None) -> dict[str, Any]:
    """One event with text, in the form of the endpoint that was asked."""
    chat = "messages" in body
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    return {
        "id": "mock",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
    }


@dataclasses.dataclass
class MockServer:
    """bodies: what was asked, in order. peak: most completions under way at once."""

    script: Script
    base_url: str = ""
    bodies: list[Body] = dataclasses.field(default_factory=list)
    peak: int = 0
    active: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request by request."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = next(
                    (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0
                )
                body = await reader.readexactly(length)
                if not head.startswith("POST"):
                    _plain(writer, head.split(" ")[1])
                elif not await self._answer(json.loads(body), writer):
                    break
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()

    async def _answer(self, body: Body, writer: asyncio.StreamWriter) -> bool:
        """Play the script; whether the connection goes on."""
        self.bodies.append(body)
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for delay_s, event in self.script(body):
                if delay_s:
                    await asyncio.sleep(delay_s)
                if event is BREAK:
                    await writer.drain()
                    return False
                data = b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            return True
        finally:
            self.active -= 1


def _plain(writer: asyncio.StreamWriter, path: str) -> None:
    models = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "mock"}]}
    text = json.dumps(models if path.endswith("/models") else {"status": "ok"}).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text)


@contextlib.contextmanager
def mock_server(script: Script = at_once) -> Iterator[MockServer]:
    """A mock server on a free local port, in a thread of this process."""
    mock = MockServer(script)
    with loop_in_a_thread("mock server") as loop:
        server = asyncio.run_coroutine_threadsafe(_listen(mock), loop).result()
        try:
            yield mock
        finally:
            asyncio.run_coroutine_threadsafe(_stop(server), loop).result()


async def _listen(mock: MockServer) -> asyncio.Server:
    server = await asyncio.start_server(mock.serve, "127.0.0.1", 0, backlog=4096)
    mock.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    return server


async def _stop(server: asyncio.Server) -> None:
    server.close()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    with mock_server() as running:
        print(running.base_url, flush=True)
        sys.stdin.read()
