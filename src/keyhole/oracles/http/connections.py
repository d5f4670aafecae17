"""Connections to one server, kept open between requests, and names for everything that goes wrong on them.

They are made by the standard library's `http.client`; what travels on them is written and read in `replies`. No
cookies and no redirects: a token must not travel to another server.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import client
from threading import Lock
from time import monotonic
from typing import NamedTuple
from urllib.parse import urlsplit

from keyhole.errors import (
    BadAnswer,
    ConnectionLost,
    KeyholeError,
    QuestionRefused,
    ServerTimeout,
    ServerUnreachable,
    ServerUntrusted,
    UsageError,
)
from keyhole.oracles.http.replies import AnswerTooLong, Deadline, Reply, read_reply, request_head

CONNECT_SECONDS = 10.0  # to make a connection, where `timeout` allows longer
IDLE_SECONDS = 3.0  # a connection unused for longer is not used again: many servers close it after 5

Body = Sequence[bytes | memoryview]  # of a request, in pieces

# What can be raised -> (what it is here, whether to ask again, what to say); the first that fits counts.
NAMES: tuple[tuple[type[Exception], type[KeyholeError], bool, str], ...] = (
    (ssl.SSLZeroReturnError, ConnectionLost, True, "the connection ended before the answer did"),
    (ssl.SSLEOFError, ConnectionLost, True, "the connection ended before the answer did"),
    (ssl.SSLError, ServerUntrusted, False, "no secure connection"),
    (TimeoutError, ServerTimeout, True, "no answer in time: raise timeout, or lower batch"),
    (socket.gaierror, ServerUnreachable, True, "no such host: is the address right?"),
    (ConnectionRefusedError, ServerUnreachable, True, "no connection: is the server running? are host and port right?"),
    (client.RemoteDisconnected, ConnectionLost, True, "the connection ended before an answer came"),
    (ConnectionError, ConnectionLost, True, "the connection was lost"),
    (client.IncompleteRead, ConnectionLost, True, "the connection ended before the answer did"),
    (AnswerTooLong, BadAnswer, False, "an answer longer than any should be"),
    (client.BadStatusLine, BadAnswer, True, "it does not speak HTTP"),
    (client.LineTooLong, BadAnswer, True, "it does not speak HTTP"),
    (client.UnknownProtocol, BadAnswer, True, "it does not speak HTTP"),
    (client.UnknownTransferEncoding, BadAnswer, False, "its answer cannot be read"),
    (client.UnimplementedFileMode, BadAnswer, False, "its answer cannot be read"),
    (client.InvalidURL, UsageError, False, "that is no address"),
    (client.NotConnected, ConnectionLost, True, "the connection was lost"),
    (client.ImproperConnectionState, ConnectionLost, True, "the connection was lost"),
    (client.HTTPException, BadAnswer, True, "its answer cannot be read"),
    (OSError, ConnectionLost, True, "the connection was lost"),
    (ValueError, QuestionRefused, False, "the request is no valid HTTP"),
)


class Trouble(Exception):
    """An attempt that failed: the error it is, whether to try again, and when if the server said so."""

    def __init__(self, error: KeyholeError, *, again: bool, after: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.again = again
        self.after = after


class Connection(client.HTTPConnection):
    """A connection on which head and body of a request leave together, so that a server wakes up once for both."""

    used = 0.0  # when

    def ask(self, method: str, path: str, body: Body, headers: Mapping[str, str], deadline: Deadline) -> Reply:
        """One request and its reply."""
        size = {"Content-Length": str(sum(map(len, body)))} if body else {}
        head = request_head(method, path, {"Accept-Encoding": "identity", **headers, **size})
        try:
            _send(self.sock, [head, *body])
        except (BrokenPipeError, ConnectionResetError) as error:
            with suppress(Exception):  # a server may answer before it has read everything, and close
                return self._reply(method, deadline)
            raise error from None
        return self._reply(method, deadline)

    def _reply(self, method: str, deadline: Deadline) -> Reply:
        reply, again = read_reply(self.sock, method, deadline)
        if not again:
            self.close()
        return reply

    @property
    def stale(self) -> bool:
        """Whether it was closed, or something has come that nobody asked for."""
        if self.sock is None or monotonic() - self.used > IDLE_SECONDS:
            return True
        return bool(select.select([self.sock], [], [], 0)[0])


def _send(connection: socket.socket, pieces: Body) -> None:
    """All pieces in as few calls as possible, without a copy where the system can do that."""
    if isinstance(connection, ssl.SSLSocket) or not hasattr(connection, "sendmsg"):
        connection.sendall(b"".join(pieces))
        return
    left = [memoryview(piece) for piece in pieces]
    while left:
        sent = connection.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if left:
            left[0] = left[0][sent:]


class Proxy(NamedTuple):
    """A proxy, and the header in which it is told who asks."""

    host: str
    port: int
    authorization: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What it is told beside the request."""
        return {} if self.authorization is None else {"Proxy-Authorization": self.authorization}


class SecureConnection(Connection, client.HTTPSConnection):
    """A connection over TLS on which head and body of a request leave together."""


class ConnectionPool:
    """Connections to the server of one address, one for each request under way."""

    def __init__(self, server: str, timeout: float, ca: str | None = None, proxy: Proxy | None = None) -> None:
        parts = urlsplit(server)
        self.timeout = timeout
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        trusted = None if ca is None and parts.scheme != "https" else _trust(ca)
        self._secure = trusted if parts.scheme == "https" else None
        self._proxy = proxy
        self._netloc = parts.netloc
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._lock = Lock()
        self._closed = False

    def close(self) -> None:
        """Close every connection, those in use too."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()

    def take(self, url: str) -> Connection:
        """A connection that is open."""
        while True:
            with self._lock:
                if self._closed:
                    raise Trouble(ConnectionLost(f"{url}: the oracle was closed"), again=False)
                connection = self._idle.pop() if self._idle else None
                if connection is not None:
                    self._busy.add(connection)
            if connection is None:
                return self._open(url)
            if not connection.stale:
                return connection
            self.drop(connection)

    def give(self, connection: Connection) -> None:
        """Back for the next request."""
        connection.used = monotonic()
        with self._lock:
            self._busy.discard(connection)
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def drop(self, connection: Connection) -> None:
        """Not to be used again."""
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _open(self, url: str) -> Connection:
        host, port = self._proxy[:2] if self._proxy else (self._host, self._port)
        seconds = min(self.timeout, CONNECT_SECONDS)
        connection = (
            Connection(host, port, timeout=seconds)
            if self._secure is None
            else SecureConnection(host, port, timeout=seconds, context=self._secure)
        )
        if self._proxy and self._secure is not None:
            connection.set_tunnel(self._host, self._port, self._proxy.headers)
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout)
        except TimeoutError as error:
            connection.close()
            said = "no connection in time: is the address right? is a firewall in the way?"
            raise Trouble(ServerTimeout(f"{url}: {said}"), again=True) from error
        except OSError as error:
            connection.close()
            raise trouble_of(error, url, connecting=True) from error
        with self._lock:
            self._busy.add(connection)
        return connection

    def ask(self, connection: Connection, method: str, url: str, body: Body, headers: Mapping[str, str]) -> Reply:
        """One request and its reply on a connection."""
        path = url.partition(self._netloc)[2]
        if self._proxy and self._secure is None:
            path, headers = url, {**headers, **self._proxy.headers}  # a proxy wants all of it
        try:
            return connection.ask(method, path, body, {"Host": self._netloc, **headers}, Deadline.after(self.timeout))
        except (OSError, client.HTTPException, ValueError) as error:
            raise trouble_of(error, url) from error


def trouble_of(error: Exception, url: str, *, connecting: bool = False) -> Trouble:
    """The error of ours that an exception is."""
    kind, again, said = next((kind, again, said) for each, kind, again, said in NAMES if isinstance(error, each))
    if connecting and kind is ConnectionLost:
        kind, said = ServerUnreachable, "no connection: are host and port right?"
    detail = str(error)
    if kind is ServerUntrusted:
        detail = str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error)
        plain = "WRONG_VERSION" in detail or "HTTP_REQUEST" in detail
        said += ": it may speak plain http://" if plain else ": if you trust its certificate, give the file, ca="
    made = kind(f"{url}: {said}" + (f" ({detail})" if detail else ""))
    made.__cause__ = error
    return Trouble(made, again=again)


def _trust(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"ca={ca!r} is no file of certificates ({error}): name one in PEM format") from error
