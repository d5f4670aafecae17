"""Several batches at a time: threads that ask one oracle, or workers that each ask a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

import numpy as np

from keyhole.arrays import Array, to_numpy
from keyhole.errors import OracleError, UsageError, WorkerError
from keyhole.executors.base import Crew, Shared, Workers, open_threads
from keyhole.oracles import Oracle

# A batch is split over lanes that nobody asked for as far as a piece still holds so many bytes of tokens: below that,
# what a request costs outweighs what a second one beside it gains.
WORTHWHILE = 2**20

Labelled = tuple[str, Array]  # a name of what is asked, which no two batches share, and tokens


@dataclass(frozen=True)
class Lanes:
    """So many batches at a time. Answers come as they are ready, and one fails after what is under way has come."""

    crew: Crew
    oracle: Oracle
    copies: Shared | None = None  # of the oracle, where workers ask these
    evenly: bool = True  # whether every lane gets something, however small

    @property
    def limit(self) -> int | None:
        """Most sequences in a batch."""
        limit = self.oracle.signature.batch_limit
        return None if limit is None else max(1, limit // self.oracle.lanes)

    def size(self, total: int, most: int, numbers: int) -> int:
        """Sequences of a batch, where so many are to be asked, each of so many numbers."""
        even = ceil(total / self.crew.workers)
        if not self.evenly:
            even = max(even, ceil(WORTHWHILE / (numbers * self.oracle.signature.space.itemsize)))
        return max(1, min(even, most, self.limit or most))

    def ask(self, batches: Iterable[Labelled]) -> Iterator[tuple[int, Array]]:
        """(number of the batch, answers), in any order."""
        try:
            if self.copies is None:
                work: Callable[[Labelled], Array] = lambda batch: self.oracle(batch[1])  # noqa: E731 - typed
                yield from self.crew.results(work, batches, ordered=False)
            else:
                plain = ((label, to_numpy(tokens)) for label, tokens in batches)
                found = self.crew.results(_ask_copy, plain, self.copies, ordered=False, size=_numbers)
                yield from ((number, self.oracle.signature.space.asarray(answers)) for number, answers in found)
        except WorkerError as error:
            raise OracleError(f"workers that ask the oracle failed: {error}") from error


def _numbers(batch: Labelled) -> float:
    """How much there is to do."""
    return float(batch[1].size)


def _ask_copy(oracle: Oracle, batch: Labelled) -> np.ndarray:
    """In a worker: the errors of answers depend on what is asked and on nothing else."""
    label, tokens = batch
    oracle.begin_anew(label)
    try:
        return np.array(to_numpy(oracle(oracle.signature.space.asarray(tokens))))
    except OracleError as error:
        error.box, error.arrived = None, ()
        raise


@contextmanager
def open_lanes(oracle: Oracle, workers: Workers, concurrency: int | None = None) -> Iterator[Lanes | None]:
    """The lanes that were asked for, those that the oracle has itself, or none."""
    if concurrency is not None and (isinstance(concurrency, bool) or not isinstance(concurrency, int)):
        raise UsageError(f"concurrency must be a whole number of at least 1, not {concurrency!r}")
    if concurrency is not None and concurrency < 1:
        raise UsageError(f"concurrency must be at least 1, not {concurrency}")
    if workers.several:
        if concurrency is not None:
            raise UsageError("concurrency is of requests from this process: leave it out where workers ask")
        copies = Shared(oracle, "name it by a text that workers can open, such as 'python:path.py:make'")
        with workers.open() as crew:
            yield Lanes(crew, oracle, copies)
    elif (concurrency or oracle.lanes) == 1:
        yield None
    else:
        with open_threads(concurrency or oracle.lanes) as crew:
            yield Lanes(crew, oracle, evenly=concurrency is not None)
