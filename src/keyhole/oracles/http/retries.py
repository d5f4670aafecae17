"""Requests to one server: repeated where that is safe, every failure under a name of its own.

Asking again is safe because inference changes nothing at the server, and it is done only while no intact answer to
the query has come: after a lost connection, a time-out, a failure of the server (500, 502, 504), a garbled
answer or one to another query, each at most `retries` times for one query; and after a request to wait (429, 503
with Retry-After) for as long as `patience` lasts. Whatever the server does answer is final.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
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
    UnknownModel,
)
from keyhole.inference_protocol import Malformed, parse
from keyhole.oracles.http.connections import PROXY_ASKS, Body, Connections, Reply, Trouble

Result = TypeVar("Result")
Make = Callable[[], tuple[Body, dict[str, str]]]  # makes body and headers of an attempt

FIRST_PAUSE = 0.1  # seconds before a query is asked again; doubled each time
LONGEST_PAUSE = 10.0
LEAST_PAUSE = 0.02  # even if a server says to come back at once
SHOWN = 300  # characters of a server's own words that an error repeats
COMPLAINTS = ("error", "detail", "message")  # where servers say what is wrong, in the order of trust

# Statuses that say nothing of the query, so that it may be asked again.
PASSING = (408, 429, 500, 502, 503, 504)
DENIED = (AccessDenied, "name the environment variable that holds the right token, token_env=")
BUSY = (ServerBusy, "wait, or ask with fewer connections")
REFUSALS: dict[int, tuple[type[ServerError], str]] = {
    401: DENIED,
    403: DENIED,
    404: (UnknownModel, "is the name of the model right, and its version?"),
    407: (AccessDenied, PROXY_ASKS),
    408: (ServerTimeout, "lower batch"),
    413: (QuestionRefused, "lower batch"),
    429: BUSY,
    503: BUSY,
}
BY_HUNDREDS: dict[int, tuple[type[ServerError], str]] = {
    3: (ServerUnreachable, "if you trust it, ask there"),
    4: (QuestionRefused, "the model does not take such tokens"),
    5: (ServerFailed, "look at the server's log"),
}
# What the reasons for asking again are called in a report.
WORDS: dict[type[KeyholeError], str] = {
    ServerTimeout: "time-out",
    ServerUnreachable: "no connection",
    ConnectionLost: "lost connection",
    ServerBusy: "request to wait",
    ServerFailed: "failure of the server",
    BadAnswer: "garbled answer",
}


class Exchange:
    """Queries to one server, repeated where that is safe."""

    def __init__(
        self,
        connections: Connections,
        *,
        retries: int,
        patience: float,
        headers: Mapping[str, str],
        secret: str | None = None,  # never to be shown
    ) -> None:
        self.retries, self.patience = retries, patience
        self.requests = 0
        self.retried: Counter[str] = Counter()
        self._connections, self._secret = connections, secret
        self._headers = {**headers, "User-Agent": "keyhole"}
        self._lock = Lock()
        self._closing = Event()
        self._not_before = 0.0  # the server asked to wait until then

    def close(self) -> None:
        """End pauses and connections."""
        self._closing.set()
        self._connections.close()

    def facts(self) -> dict[str, Any]:
        """Requests and repetitions, for the report."""
        return {"server": {"requests": self.requests, "retries": self.retried.total(), "reasons": dict(self.retried)}}

    def send(
        self,
        url: str,
        read: Callable[[Reply], Result],
        make: Make | None = None,
        *,
        again: bool = True,
    ) -> Result:
        """What `read` makes of the reply to what `make` makes, each attempt made anew."""
        began, attempts, failures = monotonic(), 0, 0
        while True:
            self._hold()
            attempts += 1
            try:
                return self._once(url, read, make)
            except Trouble as trouble:
                failures += trouble.after is None
                pause = self._pause(trouble, failures, monotonic() - began) if again or trouble.after else None
                if pause is None:
                    tries = f" (asked {attempts} times in {monotonic() - began:.1f} s)" if attempts > 1 else ""
                    error = type(trouble.error)(f"{trouble.error}{tries}")
                    raise error from (trouble.error.__cause__ or trouble.error)
                with self._lock:
                    self.retried[_word(trouble.error)] += 1
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

    def _once(self, url: str, read: Callable[[Reply], Result], make: Make | None) -> Result:
        """One attempt. A connection that has brought something garbled may bring more of it, and is not used again."""
        connection = self._connections.take(url)
        try:
            content, headers = make() if make else ((), {})
            with self._lock:
                self.requests += make is not None
            result = read(connection.ask(url, content, {**self._headers, **headers}))
        except BaseException:
            connection.close()
            raise
        self._connections.give(connection)
        return result

    def refuse(self, reply: Reply, url: str) -> Trouble:
        """What a reply other than 200 means."""
        status, after = reply.status, None
        kind, said = REFUSALS.get(status) or BY_HUNDREDS.get(status // 100, (BadAnswer, "expected 200"))
        if status in (429, 503):
            after = retry_after(reply.headers)
        if status // 100 == 3:
            said = f"it sends to {reply.headers.get('location')!r}; {said}"
        error = kind(f"{url} answered {status}{self._words(reply)}: {said}")
        return Trouble(error, again=status in PASSING, after=after)

    def _words(self, reply: Reply) -> str:
        """The server's own words, in one connection, without the secret should it repeat that."""
        try:
            message = parse(reply.body)
            said = str(next((message[name] for name in COMPLAINTS if message.get(name)), ""))
        except Malformed:
            said = reply.body[:SHOWN].decode("utf-8", errors="replace") if reply.body else ""
        said = " ".join("".join(mark if mark.isprintable() else " " for mark in said).split())
        if self._secret:
            said = said.replace(self._secret, "***")
        return f" ({said[:SHOWN]})" if said else ""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: in milliseconds, as a number, or as a date; None where it does not say."""
    for name, in_a_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        with suppress(ValueError):
            seconds = float(headers.get(name) or "nan") / in_a_second
            if 0 <= seconds < math.inf:
                return seconds
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(headers["retry-after"]).timestamp() - time())
    return None


def _word(error: KeyholeError) -> str:
    return next((word for kind, word in WORDS.items() if isinstance(error, kind)), "failure")
