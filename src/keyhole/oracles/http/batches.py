"""A batch of sequences in requests over several connections, and what arrived where one of them fails."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np

from keyhole.arrays import Array, to_numpy
from keyhole.errors import OracleError
from keyhole.oracles.base import Oracle

# A batch is split over the connections as far as a request still holds so many bytes of tokens: below that, what a
# request costs outweighs what a second connection gains. Where a server computes for long, a small `most` splits more.
WORTHWHILE = 2**20

Ask = Callable[[Array], Array]  # one request: (batch, length, width) -> answers


class Batches:
    """Requests of at most `most` sequences, as many at a time as there are connections."""

    def __init__(self, ask: Ask, most: int, connections: int) -> None:
        self._ask, self.most, self._connections = ask, most, connections
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0  # whose pool it is

    def close(self) -> None:
        """Start no further request."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def answer(self, tokens: Array, oracle: Oracle) -> Array:
        """The answers, in as many requests as it takes; what arrived before one of them failed goes with the error."""
        plain = np.asarray(to_numpy(tokens))
        slices = self.slices(plain)
        if len(slices) == 1:
            return self._ask(plain)
        if self._pool is None or self._process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self._connections, thread_name_prefix="keyhole-http")
            self._process = os.getpid()
        stop = Event()
        futures = [self._pool.submit(self._unless, stop, plain[start:end]) for start, end in slices]
        try:
            pieces = [(start, future.result()) for (start, _), future in zip(slices, futures, strict=True)]
        except BaseException:  # a person who stops: what is under way is not waited for
            stop.set()
            for future in futures:
                future.cancel()
            raise
        failed = [piece for _, piece in pieces if isinstance(piece, OracleError)]
        if failed:
            error = failed[0]
            arrived = [(start, piece) for start, piece in pieces if isinstance(piece, np.ndarray)]
            error.arrived, error.box = tuple(arrived), oracle
            raise error
        return np.concatenate([piece for _, piece in pieces])

    def slices(self, tokens: Array) -> Sequence[tuple[int, int]]:
        """First and last sequence of each request."""
        total = tokens.shape[0]
        least = math.ceil(WORTHWHILE / max(1, tokens[:1].nbytes))
        step = min(self.most, max(least, math.ceil(total / self._connections)))
        return [(start, min(start + step, total)) for start in range(0, total, step)] or [(0, 0)]

    def _unless(self, stop: Event, tokens: Array) -> Array | OracleError | None:
        """The answers, the error there was instead, or nothing where another request has failed before this began."""
        if stop.is_set():
            return None
        try:
            return self._ask(tokens)
        except OracleError as error:
            stop.set()
            return error
