"""Independent pieces of work: done here, by processes of this machine, by any executor of futures, or by Dask.

Results come back in the order of the pieces, each once, whoever did them: what is added up from them does not depend
on how many workers there are. A piece whose worker died is done again.
"""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from keyhole.errors import KeyholeError, UsageError
from keyhole.optional import extra

Piece = TypeVar("Piece")
Result = TypeVar("Result")

# Libraries of linear algebra read these when they are loaded: one thread per process that shares the work.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Seconds between two looks at a result that is awaited, so that a limit on the time or Ctrl-C can end it.
LOOK = 0.05
# Workers that may die, one after the other, without one piece done in between.
MOST_DEATHS = 3
# Pieces handed out for each worker beyond those it has done: enough to keep it busy, few enough to hold their results.
AHEAD = 2
# Seconds in which a scheduler must answer.
PATIENCE = 10.0


class Crew(ABC):
    """Whoever does pieces of work that do not depend on each other."""

    @abstractmethod
    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> Iterator[Result]:
        """The results, in the order of the pieces."""


class OneProcess(Crew):
    """Whoever calls, one piece after the other."""

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> Iterator[Result]:
        """The results, each made when it is asked for."""
        return (work(piece) for piece in pieces)


@dataclass
class FutureCrew(Crew):
    """An executor of futures. One that breaks with its workers is opened again where `reopen` can do so."""

    executor: Executor
    ahead: int  # pieces that are handed out at a time
    reopen: Callable[[], Executor] | None = None
    deaths: int = field(default=0, init=False)  # in all

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> Iterator[Result]:
        """The results. A piece counts once, however often it had to be done."""
        waiting: deque[_Handed[Piece, Result]] = deque()
        rest, lives = iter(pieces), MOST_DEATHS
        try:
            while True:
                waiting += (_Handed(piece) for piece in islice(rest, self.ahead - len(waiting)))
                if not waiting:
                    return
                try:
                    for each in waiting:
                        each.future = each.future or self.executor.submit(work, each.piece)
                    result = awaited(waiting[0].future)
                except BrokenExecutor as error:  # also of a worker that died between two pieces
                    lives -= 1
                    self._open_again(lives, error)
                    for each in waiting:
                        each.forget()
                    continue
                waiting.popleft()
                lives = MOST_DEATHS
                yield result
        finally:
            for each in waiting:
                if each.future is not None:
                    each.future.cancel()

    def _open_again(self, lives: int, error: BrokenExecutor) -> None:
        self.deaths += 1
        if self.reopen is None or lives < 0:
            often = f" {MOST_DEATHS + 1} times" if self.reopen is not None else ""
            raise KeyholeError(
                f"a worker died{often}, maybe for want of memory: use fewer workers, or smaller shards ({error})"
            ) from error
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.executor = self.reopen()


@dataclass
class _Handed(Generic[Piece, Result]):
    """A piece of work that was handed out."""

    piece: Piece
    future: Future[Result] | None = None

    def forget(self) -> None:
        """Hand it out again, unless it was done in time."""
        future = self.future
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            self.future = None


def awaited(future: Future[Result] | None) -> Result:
    """The result of a future, awaited in short pieces of time."""
    assert future is not None
    while not wait([future], timeout=LOOK).done:
        pass
    return future.result()


@contextmanager
def open_crew(workers: int = 1, dask: str | None = None, executor: Executor | None = None) -> Iterator[Crew]:
    """Whoever calls, `workers` processes of this machine, the Dask cluster at an address, or a given executor."""
    if executor is not None:
        if not isinstance(executor, Executor):
            raise UsageError(f"executor must be a concurrent.futures.Executor, not {type(executor).__name__}")
        if workers > 1 or dask is not None:
            raise UsageError("executor= is told who does the work: leave workers and dask out")
        yield FutureCrew(executor, AHEAD * (os.cpu_count() or 1))
    elif dask is not None:
        if workers > 1:
            raise UsageError("workers are processes of this machine, and dask an address: give one of them")
        with _dask_crew(dask) as crew:
            yield crew
    elif workers > 1:
        with one_thread_each():
            own = FutureCrew(processes(workers), AHEAD * workers, lambda: processes(workers))
            try:
                yield own
            finally:
                own.executor.shutdown(wait=True, cancel_futures=True)
    else:
        yield OneProcess()


def processes(workers: int) -> Executor:
    """Processes of this machine, each started when it is needed."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))  # threads of BLAS do not survive a fork


@contextmanager
def _dask_crew(address: str) -> Iterator[Crew]:
    """The workers of a Dask scheduler. It gives the pieces of workers that die to others."""
    distributed = extra("distributed", "dask", "a Dask cluster")
    try:
        client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"no Dask scheduler answers at {address!r} within {PATIENCE:g} s: {error}") from error
    with client:
        cores = sum(client.ncores().values())
        if not cores:
            raise UsageError(
                f"the Dask scheduler at {address!r} has no workers: start some with `dask worker {address}`"
            )
        try:
            yield FutureCrew(client.get_executor(pure=False), AHEAD * cores)
        except distributed.KilledWorker as error:
            raise KeyholeError(f"Dask gave a piece of work up, whose workers died: {error}") from error


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes started inside have one thread of linear algebra each."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
