"""One HTTP reply, read off a connection as quickly as Python can.

Nearly all replies are of one plain kind: a status, headers that stand there once, and a body of a length that is known.
Those are read here. The standard library's `http.client` reads all others (chunked ones, those that end with the
connection, headers over several lines), and decides what is no HTTP. On plain replies it takes 0.1 ms more, where a
small query takes a server half a millisecond.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http import client
from time import monotonic
from typing import Any

LARGEST_ANSWER = 2**30  # bytes; a server that sends more is not believed
PIECE = 2**20  # bytes read at a time
HEAD_PIECE = 2**16  # of what begins with a head
END_OF_HEAD = b"\r\n\r\n"
BODILESS = (204, 304)


class AnswerTooLong(client.HTTPException):
    """A body of more bytes than any answer has."""


class Headers(dict[str, str]):
    """Headers by name, in capitals or not."""

    def get(self, name: str, default: Any = None) -> Any:
        """The text of a header."""
        return super().get(name.lower(), default)


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: Any  # looked up by name, in capitals or not
    body: bytes


@dataclass(frozen=True)
class Deadline:
    """When a reply has to be complete: a socket limits the time of single reads only."""

    seconds: float
    end: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(seconds, monotonic() + seconds)

    def check(self) -> None:
        """TimeoutError once it is past."""
        if monotonic() > self.end:
            raise TimeoutError(f"the answer did not end in {self.seconds:g} s")


def read_reply(connection: socket.socket, method: str, deadline: Deadline) -> tuple[Reply, bool]:
    """The reply to a request, and whether the connection may be used again."""
    data = connection.recv(HEAD_PIECE)
    while data and (end := data.find(END_OF_HEAD)) < 0 and len(data) < HEAD_PIECE:
        deadline.check()
        more = connection.recv(HEAD_PIECE)
        if not more:
            break
        data += more
    plain = _plain_head(data[:end]) if data and end >= 0 else None
    if plain is None:
        return _unusual(connection, data, method, deadline)
    status, headers, size = plain
    body = data[end + len(END_OF_HEAD) :]
    if size > LARGEST_ANSWER:
        raise AnswerTooLong(f"{size} bytes")
    if len(body) < size:
        body = _rest(connection, body, size, deadline)
    # What follows a body was not asked for: whatever it is, it must not be taken for the next answer.
    again = len(body) == size and headers.get("connection", "").lower() != "close"
    return Reply(status, headers, body[:size]), again


def _plain_head(head: bytes) -> tuple[int, Headers, int] | None:
    """Status, headers and length of the body of a reply without peculiarities."""
    first, *lines = head.decode("latin-1").split("\r\n")
    code = first[9:12]
    if first[:9] != "HTTP/1.1 " or first[12:13] not in ("", " ") or not (code.isascii() and code.isdecimal()):
        return None
    headers = Headers()
    for line in lines:
        name, colon, text = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or name in headers or "\n" in line:
            return None
        headers[name] = text.strip()
    size, status = headers.get("content-length", ""), int(code)
    if "transfer-encoding" in headers or status < 200 or status in BODILESS:
        return None
    return (status, headers, int(size)) if size.isascii() and size.isdecimal() and len(size) < 20 else None


def _rest(connection: socket.socket, begun: bytes, size: int, deadline: Deadline) -> bytes:
    pieces, have = [begun], len(begun)
    while have < size:
        deadline.check()
        piece = connection.recv(min(size - have, PIECE))
        if not piece:
            raise client.IncompleteRead(b"", size - have)
        pieces.append(piece)
        have += len(piece)
    return b"".join(pieces)


def _unusual(connection: socket.socket, begun: bytes, method: str, deadline: Deadline) -> tuple[Reply, bool]:
    """A reply as the standard library reads it, from what has been read already and the connection."""
    with client.HTTPResponse(_Begun(connection, begun), method=method) as response:  # type: ignore[arg-type]
        response.begin()
        pieces, size = [], 0
        while response.length != 0:
            piece = response.read1(PIECE)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST_ANSWER:
                raise AnswerTooLong(f"{size} bytes")
            deadline.check()
        if response.length:
            raise client.IncompleteRead(b"", response.length)
        # What it has read beyond the reply is lost, so that a connection is used once.
        return Reply(response.status, response.headers, b"".join(pieces)), False


class _Begun(io.RawIOBase):
    """A connection of which something has been read already, as `http.client` wants it: something to make a file of."""

    def __init__(self, connection: socket.socket, begun: bytes) -> None:
        super().__init__()
        self._connection, self._begun = connection, memoryview(begun)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """The file to read from."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, room: Any) -> int:
        """Some bytes."""
        if not self._begun:
            return self._connection.recv_into(room)
        count = min(len(self._begun), len(room))
        room[:count] = self._begun[:count]
        self._begun = self._begun[count:]
        return count


def request_head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request; ValueError where a line break or a space would make another request of it."""
    lines = [f"{name}: {text}" for name, text in headers.items()]
    names = "".join(name or " " for name in headers)
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise client.InvalidURL("the path holds something that must be written as %xx")
    if not names.isascii() or not names.replace("-", "").replace("_", "").isalnum() or not "".join(lines).isprintable():
        raise ValueError("a header holds a line break or another unusual character")
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")
