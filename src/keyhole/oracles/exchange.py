"""Requests to one server: repeated where that is safe, every failure under a name of its own.

Asking again is safe because inference changes nothing at the server, and it is done only while no intact answer to
the question has come: after a lost connection, a time-out, a failure of the server (500, 502, 504), a garbled
answer or one to another question, each at most `retries` times for one question; and after a request to wait (429, 503
with Retry-After) for as long as `patience` lasts. Whatever the server does answer is final.
"""

from __future__ import annotations

import random
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from threading import Event, Lock
from time import monotonic, time
from typing import Any, TypeVar

from keyhole.errors import (
    AccessDenied,
    BadAnswer,
    ConnectionLost,
    KeyholeError,
    QuestionRefused,
    ServerBusy,
    ServerError,
    ServerFailed,
    ServerTimeout,
    ServerUnreachable,
    ServerUntrusted,
    UnknownModel,
    UsageError,
)
from keyhole.oracles.inference import Malformed, parse

Result = TypeVar("Result")

FIRST_PAUSE = 0.1  # seconds before a question is asked again; doubled each time
LONGEST_PAUSE = 10.0
LEAST_PAUSE = 0.02  # even if a server says to come back at once
CONNECT_SECONDS = 10.0  # to make a connection, where `timeout` allows longer
IDLE_SECONDS = 3.0  # a connection unused for longer is not used again: many servers close it after 5
LARGEST_ANSWER = 2**30  # bytes; a server that sends more is not believed
SHOWN = 300  # characters of a server's own words that an error repeats

# Every exception of httpx -> (what it is here, whether to ask again, what to say).
NAMES: dict[str, tuple[type[KeyholeError], bool, str]] = {
    "ConnectTimeout": (ServerTimeout, True, "no connection in time: is the address right? is a firewall in the way?"),
    "ReadTimeout": (ServerTimeout, True, "no answer in time: raise timeout, or lower batch"),
    "WriteTimeout": (ServerTimeout, True, "it did not take the question in time: raise timeout, or lower batch"),
    "PoolTimeout": (ServerTimeout, True, "no connection became free in time: raise timeout"),
    "TimeoutException": (ServerTimeout, True, "no answer in time: raise timeout"),
    "ConnectError": (ServerUnreachable, True, "no connection: is the server running? are host and port right?"),
    "ReadError": (ConnectionLost, True, "the connection was lost before the answer came"),
    "WriteError": (ConnectionLost, True, "the connection was lost while the question was sent"),
    "CloseError": (ConnectionLost, True, "the connection was lost"),
    "NetworkError": (ConnectionLost, True, "the connection was lost"),
    "RemoteProtocolError": (ConnectionLost, True, "the connection ended before the answer did, or it is no HTTP"),
    "LocalProtocolError": (QuestionRefused, False, "the request is no valid HTTP: look for line breaks in the token"),
    "ProtocolError": (BadAnswer, False, "it does not speak HTTP as it should"),
    "ProxyError": (ServerUnreachable, True, "the proxy does not pass the question on: is its address right?"),
    "UnsupportedProtocol": (UsageError, False, "the address must begin with http:// or https://"),
    "TransportError": (ConnectionLost, True, "the connection was lost"),
    "DecodingError": (BadAnswer, True, "its answer cannot be decompressed"),
    "TooManyRedirects": (BadAnswer, False, "it sends from one address to another and back"),
    "RequestError": (ServerError, False, "the question could not be sent"),
    "HTTPStatusError": (ServerFailed, False, "it failed"),
    "HTTPError": (ServerError, False, "the question could not be sent"),
    "InvalidURL": (UsageError, False, "that is no address"),
    "CookieConflict": (BadAnswer, False, "its cookies contradict each other"),
    "StreamError": (ServerError, False, "its answer could not be read"),
    "StreamConsumed": (ServerError, False, "its answer could not be read"),
    "StreamClosed": (ServerError, False, "its answer could not be read"),
    "ResponseNotRead": (ServerError, False, "its answer could not be read"),
    "RequestNotRead": (ServerError, False, "its answer could not be read"),
}
# Statuses that say nothing of the question, so that it may be asked again.
PASSING = (408, 429, 500, 502, 503, 504)
# What the reasons for asking again are called in a report.
WORDS: dict[type[KeyholeError], str] = {
    ServerTimeout: "time-out",
    ServerUnreachable: "no connection",
    ConnectionLost: "lost connection",
    ServerBusy: "request to wait",
    ServerFailed: "failure of the server",
    BadAnswer: "garbled answer",
}


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
    headers: Mapping[str, str]
    body: bytes


class Exchange:
    """A few connections to one server."""

    def __init__(
        self,
        *,
        connections: int,
        timeout: float,
        retries: int,
        patience: float,
        headers: Mapping[str, str],
        secret: str | None = None,  # never to be shown
        ca: str | None = None,
        proxy: str | None = None,
    ) -> None:
        httpx = import_httpx()
        self.timeout, self.retries, self.patience = timeout, retries, patience
        self.requests = 0
        self.retried: Counter[str] = Counter()
        self._secret = secret
        self._lock = Lock()
        self._closing = Event()
        self._not_before = 0.0  # the server asked to wait until then
        # The transport alone: no cookies, no redirects (a token must not travel to another server), and no proxy,
        # netrc or certificate that only an environment variable knows of. It also takes less time than a client.
        self._connect = partial(
            httpx.HTTPTransport,
            verify=_trust(ca),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=IDLE_SECONDS),
            proxy=_proxy(proxy),
            trust_env=False,
        )
        self._transport = self._connect()
        self._retired: list[Any] = []
        self._extensions = {"timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)).as_dict()}
        self._headers = {**headers, "Accept-Encoding": "identity", "User-Agent": "keyhole"}
        self._urls: dict[str, Any] = {}

    def close(self) -> None:
        """End pauses and connections."""
        self._closing.set()
        for each in (*self._retired, self._transport):
            each.close()

    def send(
        self,
        method: str,
        url: str,
        read: Callable[[Reply], Result],
        make: Callable[[], tuple[bytes, dict[str, str]]] | None = None,
        *,
        again: bool = True,
    ) -> Result:
        """What `read` makes of the reply to what `make` makes, each attempt made anew."""
        began, attempts, failures = monotonic(), 0, 0
        while True:
            self._hold()
            attempts += 1
            try:
                return read(self._once(method, url, make))
            except Trouble as trouble:
                failures += trouble.after is None
                pause = self._pause(trouble, failures, monotonic() - began) if again or trouble.after else None
                if pause is None:
                    tries = f" (asked {attempts} times in {monotonic() - began:.1f} s)" if attempts > 1 else ""
                    error = type(trouble.error)(f"{trouble.error}{tries}")
                    raise error from (trouble.error.__cause__ or trouble.error)
                with self._lock:
                    self.retried[_word(trouble.error)] += 1
                    if isinstance(trouble.error, BadAnswer):
                        # What else is on the way on these connections may be as wrong: others are made.
                        self._retired.append(self._transport)
                        self._transport = self._connect()
                if self._closing.wait(pause):
                    raise trouble.error from None

    def _pause(self, trouble: Trouble, failures: int, waited: float) -> float | None:
        """Seconds before the next attempt; None to give up."""
        if not trouble.again or failures > self.retries:
            return None
        pause = min(FIRST_PAUSE * 2 ** (failures - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        if trouble.after is not None:
            pause = max(trouble.after, LEAST_PAUSE)
            with self._lock:  # every connection waits, not only the one that was told to
                self._not_before = max(self._not_before, monotonic() + pause)
        return pause if waited + pause <= self.patience else None

    def _hold(self) -> None:
        with self._lock:
            pause = self._not_before - monotonic()
        if pause > 0:
            self._closing.wait(min(pause, self.patience))

    def _once(self, method: str, url: str, make: Callable[[], tuple[bytes, dict[str, str]]] | None) -> Reply:
        httpx = import_httpx()
        content, headers = make() if make else (None, {})
        with self._lock:
            self.requests += make is not None
        try:
            if url not in self._urls:  # to take an address apart costs as much as a question
                self._urls[url] = httpx.URL(url)
            headers = {**self._headers, "Host": self._urls[url].netloc.decode(), **headers}
            request = httpx.Request(
                method, self._urls[url], headers=headers, content=content, extensions=self._extensions
            )
            deadline = monotonic() + self.timeout
            with closing(self._transport.handle_request(request)) as response:
                response.request = request
                return Reply(response.status_code, response.headers, self._body(response, deadline))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError) as error:
            raise named(error, url) from error
        except RuntimeError as error:  # how httpx says that it was closed
            raise Trouble(ConnectionLost(f"{url}: the oracle was closed"), again=False) from error

    def _body(self, response: Any, deadline: float) -> bytes:
        """All of it, unless it takes too long in all or is too long: httpx limits the time of single reads only."""
        pieces, size = [], 0
        for piece in response.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST_ANSWER:
                raise Trouble(BadAnswer(f"{response.url}: an answer of more than {LARGEST_ANSWER} bytes"), again=False)
            if monotonic() > deadline:
                error = ServerTimeout(f"{response.url}: the answer did not end in {self.timeout:g} s: raise timeout")
                raise Trouble(error, again=True)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def refuse(self, reply: Reply, url: str) -> Trouble:
        """What a reply other than 200 means."""
        status, said = reply.status, self._words(reply)
        what = f"{url} answered {status}{said}"
        again = status in PASSING
        error: ServerError
        if status in (401, 403):
            error = AccessDenied(f"{what}: name the environment variable that holds the right token, token_env=")
        elif status == 404:
            error = UnknownModel(f"{what}: is the name of the model right, and its version?")
        elif status == 408:
            error = ServerTimeout(f"{what}: lower batch")
        elif status == 413:
            error = QuestionRefused(f"{what}: lower batch")
        elif status in (429, 503):
            error = ServerBusy(f"{what}: wait, or ask with fewer connections")
        elif 300 <= status < 400:
            error = ServerUnreachable(
                f"{what}: it sends to {reply.headers.get('location')!r}; if you trust it, ask there"
            )
        elif status >= 500:
            error = ServerFailed(f"{what}: look at the server's log")
        elif status >= 400:
            error = QuestionRefused(f"{what}: the model does not take such tokens")
        else:
            error = BadAnswer(f"{what}, expected 200")
        return Trouble(error, again=again, after=retry_after(reply.headers) if status in (429, 503) else None)

    def _words(self, reply: Reply) -> str:
        """The server's own words, in one line, without the secret should it repeat that."""
        try:
            said = str(parse(reply.body).get("error", ""))
        except Malformed:
            said = reply.body[:SHOWN].decode("utf-8", errors="replace") if reply.body else ""
        said = " ".join("".join(mark if mark.isprintable() else " " for mark in said).split())
        if self._secret:
            said = said.replace(self._secret, "***")
        return f" ({said[:SHOWN]})" if said else ""


def named(error: Exception, url: str) -> Trouble:
    """The error of ours that an exception of httpx is."""
    kind, again, said = next(NAMES[each.__name__] for each in type(error).__mro__ if each.__name__ in NAMES)
    if kind is ServerUnreachable and (insecure := _tls(error)) is not None:
        kind, again = ServerUntrusted, False
        plain = "WRONG_VERSION" in insecure or "HTTP_REQUEST" in insecure
        remedy = "it may speak plain http://" if plain else "if you trust its certificate, give the file, ca="
        said = f"no secure connection ({insecure}): {remedy}"
    detail = f" ({error})" if str(error) and kind is not ServerUntrusted else ""
    made = kind(f"{url}: {said}{detail}")
    made.__cause__ = error
    return Trouble(made, again=again)


def _tls(error: BaseException | None) -> str | None:
    """What was wrong with TLS, if that is why there is no connection."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return getattr(error, "verify_message", None) or error.reason or str(error)
        error = error.__cause__ or error.__context__
    return None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: as a number, as a date, or in milliseconds; None where it does not say."""
    exact = _seconds(headers.get("retry-after-ms"))
    if exact is not None:
        return exact / 1000
    text = headers.get("retry-after")
    seconds = _seconds(text)
    if seconds is not None or text is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except (ValueError, TypeError):
        return None


def _seconds(text: str | None) -> float | None:
    try:
        number = float(text or "nan")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _word(error: KeyholeError) -> str:
    return next((word for kind, word in WORDS.items() if isinstance(error, kind)), "failure")


def _trust(ca: str | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"ca={ca!r} is no file of certificates ({error}): name one in PEM format") from error


def _proxy(address: str | None) -> Any:
    if address is None:
        return None
    try:
        return import_httpx().Proxy(address)
    except Exception as error:
        raise UsageError(f"proxy={address!r} is no address of a proxy ({error}): write http://host:port") from error


def import_httpx() -> Any:
    """The library httpx, or how to get it."""
    try:
        import httpx  # noqa: PLC0415 - in the extra http
        import orjson  # noqa: F401, PLC0415
    except ImportError as error:
        raise UsageError(f"asking a server needs {error.name}: pip install 'keyhole[http]'") from error
    return httpx
