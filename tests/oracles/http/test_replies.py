"""HTTP replies of all shapes, plain and peculiar, whole and in pieces."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from http import client

import pytest

from keyhole.oracles.http import replies
from keyhole.oracles.http.replies import AnswerTooLong, Deadline, Reply, read_reply, request_head

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Kind: plain\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(*pieces: bytes, seconds: float = 5.0, pause: float = 0.0) -> tuple[Reply, bool]:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, suppress(OSError):  # whoever reads may have had enough
            for piece in pieces:
                theirs.sendall(piece)
                time.sleep(pause)

    with ours:
        thread = threading.Thread(target=send)
        thread.start()
        try:
            return read_reply(ours, "POST", Deadline.after(seconds))
        finally:
            ours.close()
            thread.join()


@pytest.mark.parametrize(
    ("data", "status", "body", "again"),
    [
        (PLAIN, 200, b"hello", True),
        (PLAIN.replace(b"200 OK", b"503 "), 503, b"hello", True),
        (PLAIN.replace(b"200 OK", b"429"), 429, b"hello", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n", 200, b"", True),
        # Something follows that nobody asked for, or the server says that it will close.
        (PLAIN + PLAIN, 200, b"hello", False),
        (PLAIN.replace(b"X-Kind: plain", b"Connection: Close"), 200, b"hello", False),
        # Read by the standard library.
        (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, 200, b"hello", False),
        (CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", 200, b"hello", False),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", 200, b"hello", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", False),
        (PLAIN.replace(b"plain", b"folded\r\n twice"), 200, b"hello", False),
        (PLAIN.replace(b"plain", b"1\r\nX-Kind: 2"), 200, b"hello", False),
        (b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", 200, b"hello", False),
    ],
)
def test_replies_are_read_whole_or_in_pieces(data: bytes, status: int, body: bytes, again: bool) -> None:
    for pieces in ((data,), tuple(data[place : place + 1] for place in range(len(data)))):
        reply, usable = read(*pieces)
        assert (reply.status, reply.body) == (status, body)
        assert usable is again or len(pieces) > 1  # what follows may not have come yet


def test_headers_are_found_in_capitals_or_not() -> None:
    reply, _ = read(PLAIN)
    assert reply.headers.get("X-KIND") == reply.headers.get("x-kind") == "plain"
    assert reply.headers.get("other") is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", client.RemoteDisconnected),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", client.BadStatusLine),
        (b"HTTP/1.1 2xx OK\r\nContent-Length: 5\r\n\r\nhello", client.BadStatusLine),
        (PLAIN[:-1], client.IncompleteRead),
        (PLAIN.replace(b": 5", b": 500000"), client.IncompleteRead),
        (PLAIN.replace(b": 5", b": " + b"9" * 12), AnswerTooLong),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 30_000, client.HTTPException),
        (CHUNKED + b"ff\r\nhello", client.IncompleteRead),
    ],
)
def test_what_is_no_reply_is_an_exception_of_the_standard_library(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(data)


@pytest.mark.parametrize("data", [PLAIN, b"HTTP/1.1 200 OK\r\n\r\nhello"])
def test_a_reply_that_takes_too_long_in_all(data: bytes) -> None:
    with pytest.raises(TimeoutError, match="did not end in"):
        read(*(data[place : place + 1] for place in range(len(data))), seconds=0.05, pause=0.005)


def test_a_body_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "LARGEST_ANSWER", 1000)
    with pytest.raises(AnswerTooLong):
        read(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v2 HTTP/1.1\r\nX: y", {}),
        ("/v2/a b", {}),
        ("/v2/ä", {}),
        ("/v2", {"X": "a\r\nY: b"}),
        ("/v2", {"X\r\nY": "b"}),
        ("/v2", {"X: y": "b"}),
        ("/v2", {"": "b"}),
    ],
)
def test_nothing_is_smuggled_into_a_request(path: str, headers: dict[str, str]) -> None:
    with pytest.raises((client.InvalidURL, ValueError)):
        request_head("GET", path, {"Host": "h", **headers})
