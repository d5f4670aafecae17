"""Requests to one server: repeated where that is safe, every failure under a name of its own.

Asking again is safe because inference changes nothing at the server, and it is done only while no intact answer to
the query has come: after a lost connection, a time-out, a failure of the server (500, 502, 504), a garbled
answer or one to another query, each at most `retries` times for one query; and after a request to wait (429, 503
with Retry-After) for as long as `patience` lasts. Whatever the server does answer is final.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
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
from keyhole.oracles.http.connections import Body, ConnectionPool, Trouble
from keyhole.oracles.http.replies import Reply

Result = TypeVar("Result")

FIRST_PAUSE = 0.1  # seconds before a query is asked again; doubled each time
LONGEST_PAUSE = 10.0
LEAST_PAUSE = 0.02  # even if a server says to come back at once
SHOWN = 300  # characters of a server's own words that an error repeats

# Statuses that say nothing of the query, so that it may be asked again.
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


class Exchange:
    """Queries to one server, repeated where that is safe."""

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        retries: int,
        patience: float,
        headers: Mapping[str, str],
        secret: str | None = None,  # never to be shown
    ) -> None:
        self.retries, self.patience = retries, patience
        self.requests = 0
        self.retried: Counter[str] = Counter()
        self._pool, self._secret = pool, secret
        self._headers = {**headers, "User-Agent": "keyhole"}
        self._lock = Lock()
        self._closing = Event()
        self._not_before = 0.0  # the server asked to wait until then

    def close(self) -> None:
        """End pauses and connections."""
        self._closing.set()
        self._pool.close()

    def facts(self) -> dict[str, Any]:
        """Requests and repetitions, for the report."""
        return {"server": {"requests": self.requests, "retries": self.retried.total(), "reasons": dict(self.retried)}}

    def send(
        self,
        method: str,
        url: str,
        read: Callable[[Reply], Result],
        make: Callable[[], tuple[Body, dict[str, str]]] | None = None,
        *,
        again: bool = True,
    ) -> Result:
        """What `read` makes of the reply to what `make` makes, each attempt made anew."""
        began, attempts, failures = monotonic(), 0, 0
        while True:
            self._hold()
            attempts += 1
            try:
                return self._once(method, url, read, make)
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

    def _once(
        self,
        method: str,
        url: str,
        read: Callable[[Reply], Result],
        make: Callable[[], tuple[Body, dict[str, str]]] | None,
    ) -> Result:
        """One attempt. A connection that has brought something garbled may bring more of it, and is not used again."""
        connection = self._pool.take(url)
        try:
            content, headers = make() if make else ((), {})
            with self._lock:
                self.requests += make is not None
            result = read(self._pool.ask(connection, method, url, content, {**self._headers, **headers}))
        except BaseException:
            self._pool.drop(connection)
            raise
        self._pool.give(connection)
        return result

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
        """The server's own words, in one connection, without the secret should it repeat that."""
        try:
            said = str(parse(reply.body).get("error", ""))
        except Malformed:
            said = reply.body[:SHOWN].decode("utf-8", errors="replace") if reply.body else ""
        said = " ".join("".join(mark if mark.isprintable() else " " for mark in said).split())
        if self._secret:
            said = said.replace(self._secret, "***")
        return f" ({said[:SHOWN]})" if said else ""


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
