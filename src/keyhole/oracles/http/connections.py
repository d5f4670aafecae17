"""Requests to one server over libcurl, and names for everything that goes wrong on them.

libcurl keeps connections open, knows TLS and proxies, reads replies of every shape, and gives up where a whole one
takes too long, however it drips in. No cookies and no redirects: a token must not travel to another server.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

from keyhole.errors import (
    BadAnswer,
    ConnectionLost,
    KeyholeError,
    ServerTimeout,
    ServerUnreachable,
    ServerUntrusted,
    UsageError,
)
from keyhole.optional import extra

CONNECT_SECONDS = 10.0  # to make a connection, where `timeout` allows longer
LARGEST_ANSWER = 2**30  # bytes; a server that sends more is not believed
PIECE = 2**18  # bytes sent or read at a time

PLAIN = ("Accept-Encoding: identity", "Expect:")  # answers as they are, and no pause before a large request

Body = Sequence[bytes | memoryview]  # of a request, in pieces

NO_HTTP = (BadAnswer, True, "it does not speak HTTP")
LOST = (ConnectionLost, True, "the connection was lost")
UNTRUSTED = (ServerUntrusted, False, "no secure connection: if you trust its certificate, give the file, ca=")
# Names that libcurl has for failures -> what it is here, whether to ask again, what to say.
NAMES: dict[str, tuple[type[KeyholeError], bool, str]] = {
    "OPERATION_TIMEDOUT": (ServerTimeout, True, "no answer in time: raise timeout, or lower batch"),
    "COULDNT_RESOLVE_HOST": (ServerUnreachable, True, "no such host: is the address right?"),
    "COULDNT_RESOLVE_PROXY": (ServerUnreachable, True, "no such proxy: is its address right?"),
    "COULDNT_CONNECT": (ServerUnreachable, True, "no connection: is the server running? are host and port right?"),
    "GOT_NOTHING": (ConnectionLost, True, "the connection ended before an answer came"),
    "PARTIAL_FILE": (ConnectionLost, True, "the connection ended before the answer did"),
    "SEND_ERROR": LOST,
    "RECV_ERROR": LOST,
    "ABORTED_BY_CALLBACK": LOST,
    "UNSUPPORTED_PROTOCOL": NO_HTTP,
    "FTP_WEIRD_SERVER_REPLY": NO_HTTP,
    "FILESIZE_EXCEEDED": (BadAnswer, False, "an answer longer than any should be"),
    "URL_MALFORMAT": (UsageError, False, "that is no address"),
    "SSL_CONNECT_ERROR": UNTRUSTED,
    "PEER_FAILED_VERIFICATION": UNTRUSTED,
    "SSL_CACERT_BADFILE": UNTRUSTED,
}
BROKEN = ("SYSCALL", "eof", "Send failure", "Recv failure")  # words of failures of TLS that are those of a connection
OTHER = (BadAnswer, True, "its answer cannot be read")


class Trouble(Exception):
    """An attempt that failed: the error it is, whether to try again, and when if the server said so."""

    def __init__(self, error: KeyholeError, *, again: bool, after: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.again = again
        self.after = after


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]  # by their names in small letters
    body: bytes


class Connection:
    """A connection of libcurl, for one request at a time."""

    def __init__(self, curl: Any, options: Mapping[str, Any], closed: Event) -> None:
        self._curl, self._handle = curl, curl.Curl()
        self._head: list[bytes] = []
        self._pieces: list[bytes] = []
        self._sent = False
        callbacks = {
            "HEADERFUNCTION": self._head.append,
            "WRITEFUNCTION": self._pieces.append,
            "XFERINFOFUNCTION": lambda *_: int(closed.is_set()),  # ends it unless 0; called once a second or more often
            "PREREQFUNCTION": self._before,
        }
        for name, value in {**options, **callbacks}.items():
            self._handle.setopt(getattr(curl, name), value)

    def _before(self, *_: Any) -> int:
        """Let a request go once: libcurl sends it again, uncounted, where a connection ends before a reply."""
        again, self._sent = self._sent, True
        return int(self._curl.PREREQFUNC_ABORT if again else self._curl.PREREQFUNC_OK)

    def ask(self, url: str, body: Body, headers: Mapping[str, str]) -> Reply:
        """The reply to a request, to POST where it has a body; Trouble where there is none."""
        curl, handle, content, self._sent = self._curl, self._handle, b"".join(body), False
        self._head.clear()
        self._pieces.clear()
        handle.setopt(curl.URL, url)
        if content:
            handle.setopt(curl.POSTFIELDSIZE, len(content))
            handle.setopt(curl.POSTFIELDS, content)
        else:
            handle.setopt(curl.HTTPGET, 1)
        handle.setopt(curl.HTTPHEADER, [*PLAIN, *(f"{name}: {text}" for name, text in headers.items())])
        try:
            handle.perform()
        except curl.error as error:
            code, detail = error.args
            connecting = handle.getinfo(curl.PRETRANSFER_TIME) == 0
            raise trouble_of(curl, code, detail, url, connecting=connecting) from error
        lines = (line.decode("latin-1").partition(":") for line in self._head)
        found = {name.lower(): text.strip() for name, _, text in lines}
        return Reply(handle.getinfo(curl.RESPONSE_CODE), found, b"".join(self._pieces))

    def close(self) -> None:
        """Not to be used again."""
        self._handle.close()


class Connections:
    """Connections to one server, kept open between requests."""

    def __init__(self, timeout: float, ca: str | None = None, proxy: str | None = None) -> None:
        self._curl = curl = extra("pycurl", "http", "asking a server")
        self._closed = Event()
        self._idle: list[Connection] = []
        trusted = ssl.get_default_verify_paths()  # those of the environment, as the ssl module finds them
        self._options: dict[str, Any] = {
            "NOSIGNAL": 1,
            "NOPROGRESS": 0,
            "PROTOCOLS": curl.PROTO_HTTP | curl.PROTO_HTTPS,
            "HTTP_VERSION": curl.CURL_HTTP_VERSION_1_1,
            "TIMEOUT_MS": round(1000 * timeout) or 1,
            "CONNECTTIMEOUT_MS": round(1000 * min(timeout, CONNECT_SECONDS)) or 1,
            "MAXFILESIZE_LARGE": LARGEST_ANSWER,
            "BUFFERSIZE": PIECE,
            "UPLOAD_BUFFERSIZE": PIECE,
            "PROXY": proxy or "",  # whoever calls has read the environment
            "NOPROXY": "",
            "SSL_OPTIONS": 0 if ca else curl.SSLOPT_NATIVE_CA,
        }
        for name, place in (("CAINFO", ca or trusted.cafile), ("CAPATH", None if ca else trusted.capath)):
            if place is not None:
                self._options |= {name: place, f"PROXY_{name}": place}
        if ca is not None:
            _check_authorities(ca)

    def close(self) -> None:
        """Close every connection; a request under way ends within a second."""
        self._closed.set()
        while self._idle:
            self._idle.pop().close()

    def take(self, url: str) -> Connection:
        """A connection that nobody uses."""
        if self._closed.is_set():
            raise Trouble(ConnectionLost(f"{url}: the oracle was closed"), again=False)
        try:
            return self._idle.pop()
        except IndexError:
            return Connection(self._curl, self._options, self._closed)

    def give(self, connection: Connection) -> None:
        """Back for the next request."""
        self._idle.append(connection)
        if self._closed.is_set():
            self.close()


def trouble_of(curl: Any, code: int, detail: str, url: str, *, connecting: bool = False) -> Trouble:
    """The error of ours that a failure of libcurl is."""
    known = {getattr(curl, f"E_{name}"): entry for name, entry in NAMES.items()}
    kind, again, said = known.get(code, OTHER)
    if kind is ServerTimeout and connecting:
        said = "no connection in time: is the address right? is a firewall in the way?"
    elif kind is ConnectionLost and connecting:
        kind, said = ServerUnreachable, "no connection: are host and port right?"
    elif kind is ServerUntrusted and any(word in detail for word in BROKEN):
        kind, again, said = ConnectionLost, True, "the connection ended before it was secure"
    elif kind is ServerUntrusted and ("wrong version" in detail or "http request" in detail):
        said = "no secure connection: it may speak plain http://"
    return Trouble(kind(f"{url}: {said}" + (f" ({detail})" if detail else "")), again=again)


def _check_authorities(ca: str) -> None:
    try:
        ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"ca={ca!r} is no file of certificates ({error}): name one in PEM format") from error
