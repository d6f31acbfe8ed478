"""A tap on the wire between a load client and a server: passes every byte on as it is and notes when it came.

Load tools count an error inside a 200 stream as a success, take a chunk without a token for the first token, or count
tokens again. So the tool makes the load, and what happened is read here, by one definition for every tool.
The clock is `time.perf_counter` of this process for all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from harness.serving.loop_thread import loop_in_a_thread
from harness.serving.wire import Connection, Stream
from qad.errors import UsageError

_BACKLOG = 4096  # so that no client waits in the listen queue


class Tap:
    """base_url: what to give to the client instead of the server's address."""

    def __init__(self, base_url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.base_url = base_url
        self._loop = loop
        self._connections: list[Connection] = []
        self._open: set[_ClientSide] = set()

    def _opened(self, side: _ClientSide) -> None:
        self._connections.append(side.connection)
        self._open.add(side)

    def _closed(self, side: _ClientSide) -> None:
        self._open.discard(side)

    def take(self) -> list[Connection]:
        """The connections since the last call. Only between runs: an open connection is cut in two otherwise."""

        async def swap() -> list[Connection]:
            taken, self._connections = self._connections, []
            return taken

        return asyncio.run_coroutine_threadsafe(swap(), self._loop).result()


@contextlib.contextmanager
def tap(server_url: str) -> Iterator[Tap]:
    """Listen on a free local port until the block ends. Raises UsageError where server_url is no http:// address."""
    parts = urlsplit(server_url)
    if parts.scheme != "http" or not parts.hostname:
        raise UsageError(f"server {server_url!r} cannot be observed: give http://HOST:PORT (not https)")
    host, port = parts.hostname, parts.port or 80
    with loop_in_a_thread("tap") as loop:
        found = Tap("", loop)

        async def listen() -> asyncio.Server:
            return await loop.create_server(lambda: _ClientSide(found, host, port), "127.0.0.1", 0, backlog=_BACKLOG)

        server = asyncio.run_coroutine_threadsafe(listen(), loop).result()
        found.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield found
        finally:
            asyncio.run_coroutine_threadsafe(_close(server, found), loop).result()


async def _close(server: asyncio.Server, owner: Tap) -> None:
    server.close()
    for side in list(owner._open):
        side.abort()
    await asyncio.sleep(0.05)  # transports report their end in the loop's next rounds


class _ClientSide(asyncio.Protocol):
    """The client's connection; opens one to the server and holds back what comes until that one is open."""

    def __init__(self, owner: Tap, host: str, port: int) -> None:
        self.owner, self.host, self.port = owner, host, port
        self.connection = Connection()
        self.upstream: asyncio.Transport | None = None
        self.held: list[bytes] = []
        self.closed = self.refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.owner._opened(self)
        self.opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: _ServerSide(self), self.host, self.port)
        except OSError:
            self.connection.ended_s = time.perf_counter()
            self.refused = True
            if self.held:  # else when the request is here: it was made, and it failed
                self.transport.close()
            return
        self.upstream = transport
        for piece in self.held:
            transport.write(piece)
        if self.closed:
            transport.close()

    def data_received(self, data: bytes) -> None:
        self.connection.sent.add(data, time.perf_counter())
        if self.refused:
            self.transport.close()
        elif self.upstream is None:
            self.held.append(data)
        else:
            self.upstream.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.owner._closed(self)
        if self.upstream is not None:
            self.upstream.close()

    def abort(self) -> None:
        self.opening.cancel()
        self.transport.abort()
        if self.upstream is not None:
            self.upstream.abort()


class _ServerSide(asyncio.Protocol):
    def __init__(self, client: _ClientSide) -> None:
        self.client = client
        self.stream: Stream = client.connection.received

    def data_received(self, data: bytes) -> None:
        self.stream.add(data, time.perf_counter())
        self.client.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.client.connection.ended_s = time.perf_counter()
        self.client.transport.close()
