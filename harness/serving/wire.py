"""What went over a connection, byte by byte with times -> HTTP exchanges with the time of each server-sent event.

Parsing waits until the run is over: while requests are under way, only bytes and times are kept. HTTP/1.1 with a
Content-Length, chunked or until-close body; no compression (load clients of language models ask for none).
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from harness.statistics.intervals import Ints
from qad.untrusted import mapping, strict_json

CHUNKED, UNTIL_CLOSE, BROKEN = -1, -2, -3
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}\s*")


class Stream:
    """Bytes of one direction; `when(i)` is the time at which byte i had arrived."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._ends: list[int] = []
        self._times: list[float] = []

    def add(self, piece: bytes, time_s: float) -> None:
        self._pieces.append(piece)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(piece))
        self._times.append(time_s)

    def when(self, index: int) -> float:
        return self._times[bisect.bisect_right(self._ends, index)]

    @property
    def data(self) -> bytes:
        return b"".join(self._pieces)


@dataclasses.dataclass
class Connection:
    """One client's connection. ended_s: when the server's side closed, None while it is open."""

    sent: Stream = dataclasses.field(default_factory=Stream)
    received: Stream = dataclasses.field(default_factory=Stream)
    ended_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """One `data:` message of a stream; time_s: its last byte arrived."""

    time_s: float
    data: str


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A request and its answer. status 0: none came; -1: one that is no HTTP. whole: the answer was not cut off. end_s: its last
    byte, or the end of the connection. text: the body where it is no event stream."""

    method: str
    path: str
    body: dict[str, object]
    start_s: float
    end_s: float
    status: int
    whole: bool
    events: list[Event]
    text: str = ""


@dataclasses.dataclass(frozen=True)
class _Message:
    """One parsed HTTP message. places: where each byte of the body lies in the stream, int64 [len(body)]; a chunked one lies in
    pieces. first, last: those of the whole message."""

    line: str
    headers: dict[str, str]
    body: bytes
    places: Ints
    first: int
    last: int
    whole: bool

    @property
    def status(self) -> int:
        """Of an answer; -1 where its first line holds none."""
        return _status(self.line)


def exchanges(connection: Connection) -> list[Exchange]:
    """The requests of one connection with their answers, in order."""
    asked = list(_messages(connection.sent.data, is_request=True))
    answered = [m for m in _messages(connection.received.data, is_request=False) if m.status // 100 != 1]
    return [_exchange(connection, request, answered[i] if i < len(answered) else None) for i, request in enumerate(asked)]


def _exchange(connection: Connection, request: _Message, answer: _Message | None) -> Exchange:
    method, path, _ = f"{request.line}  ".split(" ", 2)
    start = connection.sent.when(request.first)
    if answer is None:
        end = start if connection.ended_s is None else connection.ended_s
        return Exchange(method, path, _json(request.body), start, end, 0, False, [])
    end = connection.received.when(answer.last)
    if not answer.whole and connection.ended_s is not None:
        end = connection.ended_s
    streamed = "event-stream" in answer.headers.get("content-type", "")
    return Exchange(
        method,
        path,
        _json(request.body),
        start,
        end,
        answer.status,
        answer.whole,
        list(_events(answer, connection.received)) if streamed else [],
        "" if streamed else answer.body.decode("utf-8", "replace"),
    )


def _messages(data: bytes, *, is_request: bool) -> Iterator[_Message]:
    at = 0
    while at < len(data):
        head_end = data.find(b"\r\n\r\n", at)
        if head_end < 0:
            return
        line, *fields = data[at:head_end].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        body, places, end, whole = _body(data, head_end + 4, _length(line, headers, is_request))
        yield _Message(line, headers, body, places, at, max(end, head_end + 4) - 1, whole)
        if not whole:
            return
        at = end


def _length(line: str, headers: dict[str, str], is_request: bool) -> int:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return CHUNKED
    if "content-length" in headers:
        length = headers["content-length"]
        return int(length) if re.fullmatch("[0-9]{1,15}", length) else BROKEN
    status = _status(line)
    return 0 if is_request or status in (204, 304) or status // 100 == 1 else UNTIL_CLOSE


def _status(line: str) -> int:
    found = re.match(r"HTTP/\S+ +([1-9][0-9]{2})(?: |$)", line)
    return int(found[1]) if found else -1


_Body = tuple[bytes, Ints, int, bool]  # body, its places, the one behind it, complete?


def _body(data: bytes, at: int, length: int) -> _Body:
    """A body until the close of the connection counts as complete: its last event says whether it is. One whose length nobody
    can tell does not."""
    if length == CHUNKED:
        return _chunks(data, at)
    end = len(data) if length in (UNTIL_CLOSE, BROKEN) else min(at + length, len(data))
    return data[at:end], np.arange(at, end), end, length in (UNTIL_CLOSE, end - at)


def _chunks(data: bytes, at: int) -> _Body:
    parts: list[Ints] = [np.arange(0)]
    end, whole = len(data), False
    while (line_end := data.find(b"\r\n", at)) >= 0:
        told = data[at:line_end].split(b";")[0]
        if not _CHUNK_SIZE.fullmatch(told):
            break
        size, first = int(told, 16), line_end + 2
        if size == 0:
            closing = data.find(b"\r\n", first)
            end, whole = (closing + 2, True) if closing >= 0 else (end, False)
            break
        parts.append(np.arange(first, min(first + size, len(data))))
        at = first + size + 2
    places = np.concatenate(parts)
    return b"".join(data[part[0] : part[-1] + 1] for part in parts if len(part)), places, end, whole


def _events(answer: _Message, stream: Stream) -> Iterator[Event]:
    """Messages end with an empty line; the `data:` lines of one are joined. An unfinished last one is dropped."""
    at = 0
    for match in re.finditer(rb"\r?\n\r?\n", answer.body):
        lines = answer.body[at : match.start()].decode("utf-8", "replace").replace("\r", "").split("\n")
        text = "\n".join(line[5:].removeprefix(" ") for line in lines if line.startswith("data:"))
        if text:
            yield Event(stream.when(int(answer.places[match.end() - 1])), text)
        at = match.end()


def _json(body: bytes) -> dict[str, object]:
    try:
        return mapping(strict_json(body))
    except ValueError:
        return {}
